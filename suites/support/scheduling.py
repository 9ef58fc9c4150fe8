"""Assignment of tests to workers on the GPU lanes: test by test, except for tests that share something.

These share an expensive fixture or the whole machine. One worker runs those that must not run in parallel, so that no
others wait for each other's locks.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

# Each has a module-scoped fixture that compiles, trains, builds or searches for ten seconds to two minutes.
TOGETHER = {
    "suites/cache/test_keys.py",
    "suites/cache/test_layers.py",
    "suites/distributed/test_collectives.py",
    "suites/distributed/test_data_parallel.py",
    "suites/distributed/test_nccl.py",
    "suites/distributed/test_training.py",
    "suites/launch/test_capabilities.py",
    "suites/launch/test_knobs.py",
    "suites/wheels/test_abi.py",
}
# Prefixes of the ids of tests that take ten seconds to three minutes, the longest first: started late, one would delay
# the timed tests. Two large models fit into memory at a time, so they come before doctor's check and the errors'
# oracles. Tests that only read another test's result come with the short ones.
FIRST = (
    "suites/throughput/test_restart.py::test_warm_restart_of_full_size_model",
    "suites/throughput/test_restart.py::test_cold_first_step[nam52-whole_disabled",
    "suites/throughput/test_restart.py::test_cold_first_step[nam56r",
    "suites/throughput/test_restart.py::test_cold_first_step[nam12",
    "suites/cache/test_keys.py",
    "suites/cache/test_layers.py",
    "suites/kernels/test_model_shapes.py::test_first_call",
    "suites/throughput/test_restart.py::test_cold_first_step",
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
    """Return the sort key of a test id: long tests first, then the others, then those that need the machine to
    themselves.

    Of the last, the kernels come first: after a model that filled the memory, memory-bound ones were slower by 10 %.
    """
    if alone:
        return (1 if test.startswith("suites/kernels/") else 2), 0
    return 0, next((i for i, start in enumerate(FIRST) if test.startswith(start)), len(FIRST))


@cache
def arguments(file: Path) -> dict[str, frozenset[str]]:
    """Return test function -> its arguments. Parsed from the text: the scheduling process imports no tests."""
    tree = ast.parse(file.read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {f.name: frozenset(arg.arg for arg in f.args.args) for f in functions}


class TestByTest(LoadScopeScheduling):
    """Schedules single tests in collection order, the modules of TOGETHER each on one worker.

    It changes four things in xdist 3.8.0. A test that crashes its worker counts as run; otherwise it would be run
    again. A replacement worker gets tests once it has collected them; if two are replaced at a time, the run would end
    with a KeyError. A worker that died but whose death is not yet reported may still be assigned tests; the run would
    end with the pipe's OSError. Each worker has two tests or has been shut down: it starts a test only once the next is
    known, so that a worker with a single test would wait forever.
    """

    __test__ = False

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        fixtures = arguments(self.config.rootpath / file).get(test.partition("[")[0], frozenset())
        if fixtures & ALONE:
            return "alone"
        return file if file in TOGETHER else nodeid

    def remove_node(self, node: Any) -> str | None:
        """Return the test in which the worker crashed; None if it had none left."""
        crashed = None
        for unit in self.assigned_work[node].values():
            crashed = next((test for test, completed in unit.items() if not completed), None)
            if crashed:
                unit[crashed] = True
                break
        super().remove_node(node)
        return crashed

    def _assign_work_unit(self, node: Any) -> None:
        with suppress(OSError):  # its death is reported next, and its tests go to other workers
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
