"""Which worker runs what on the H200 lane: test by test, but for tests that share something.

That is what is dear to make, or the machine as a whole: one worker runs those that may not run side by side, so that
no others wait for each other's locks.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

# Each has a fixture of the module's scope that compiles, builds or searches for ten seconds to two minutes.
TOGETHER = {
    "suites/cache/test_keys.py",
    "suites/cache/test_layers.py",
    "suites/launch/test_capabilities.py",
    "suites/launch/test_knobs.py",
    "suites/wheels/test_abi.py",
}
# Of ten seconds to three minutes a test, the longest first: begun late, one would be what the timed tests wait for. By
# how a test's id begins. Two large models have room at a time, before what doctor's and the errors' oracles take.
# What only reads another test's result comes with the short ones.
FIRST = (
    "suites/throughput/test_restart.py::test_a_warm_restart",
    "suites/throughput/test_restart.py::test_a_cold_first_step[nam52-whole_disabled",
    "suites/throughput/test_restart.py::test_a_cold_first_step[nam56r",
    "suites/throughput/test_restart.py::test_a_cold_first_step[nam12",
    "suites/cache/test_keys.py",
    "suites/cache/test_layers.py",
    "suites/kernels/test_model_shapes.py::test_first_call",
    "suites/throughput/test_restart.py::test_a_cold_first_step",
    "suites/wheels/test_machine.py",
    "suites/compile/test_dynamic_batch.py",
    "suites/launch/test_optimizers.py",
    "suites/compile/test_recompiles.py",
    "suites/numerics/test_compiled_gradients.py",
    "suites/launch/test_train.py",
    "suites/cache/test_autotune.py",
    "suites/kernels/test_model_shapes.py::test_error",
)
AHEAD = 2
ALONE = {"exclusive_machine", "speed"}  # fixtures that give a test the machine to itself


def turn(test: str, alone: bool) -> tuple[int, int]:
    """Sorts tests by their ids: the long ones, the others, and behind them those that want the machine to themselves.

    Of the last, the kernels come first: behind a model that filled the memory, what moves memory was slower by 10 %.
    """
    if alone:
        return (1 if test.startswith("suites/kernels/") else 2), 0
    return 0, next((i for i, start in enumerate(FIRST) if test.startswith(start)), len(FIRST))


@cache
def arguments(file: Path) -> dict[str, frozenset[str]]:
    """Test function -> its arguments. Read from the text: the process that hands out tests imports none."""
    tree = ast.parse(file.read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {f.name: frozenset(arg.arg for arg in f.args.args) for f in functions}


class TestByTest(LoadScopeScheduling):
    """Hands out single tests in the order of their collection, the modules of TOGETHER each to one worker.

    Four things that xdist 3.8.0 does not do. A test that ends its worker counts as run: it would be run again. A
    worker that replaces another takes tests once it has collected them: where two are replaced at a time the run would
    end with a KeyError. One that died a moment ago, which nobody has said yet, can be given tests: the run would end
    with the pipe's OSError. And each worker has two tests or knows that no more will come: it begins none before it
    knows the next, so that one with a single test would wait forever.
    """

    __test__ = False

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        asked = arguments(self.config.rootpath / file).get(test.partition("[")[0], frozenset())
        if asked & ALONE:
            return "alone"
        return file if file in TOGETHER else nodeid

    def remove_node(self, node: Any) -> str | None:
        """-> the test in which the worker ended; None where it had none left."""
        crashed = None
        for unit in self.assigned_work[node].values():
            crashed = next((test for test, completed in unit.items() if not completed), None)
            if crashed:
                unit[crashed] = True
                break
        super().remove_node(node)
        return crashed

    def _assign_work_unit(self, node: Any) -> None:
        with suppress(OSError):  # its death comes next, and what it was to run goes to the others
            super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        while (
            self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < AHEAD
        ):
            self._assign_work_unit(node)
        if not self.workqueue:
            for other in self.assigned_work.keys() & self.registered_collections.keys():
                if not other.shutting_down:
                    other.shutdown()
