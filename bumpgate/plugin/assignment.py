"""Assignment of a lane's tests to the workers of xdist. `--dist` selects one of xdist's own schedulers instead."""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from bumpgate.plugin.lanes import chosen_lane, lanes_of
from bumpgate.plugin.scheduling import ALONE_UNIT, unit
from bumpgate.process.gpu_shares import visible

# Tests that a worker runs or has been assigned: it starts a test only once the next is known.
AHEAD = 2


class TestByTest(LoadScopeScheduling):
    """Assigns the units of `scheduling.unit`, in the order in which the tests were collected.

    gpus: number of groups of GPUs that the workers take in turn. Tests that run alone are one unit for each of them,
    which a worker of that group runs.

    It changes five things in xdist 3.8.0: a test that crashes its worker counts as run; a replacement worker gets tests
    once it has collected them; a worker whose death is not yet reported may be assigned tests; each worker has two
    tests or has been shut down, since it starts one only once the next is known; and tests that have run are forgotten.
    """

    __test__ = False

    def __init__(self, config: Any, log: Any = None, gpus: int = 1) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # it would put units of many tests first
        self._places: dict[str, int] = {}
        self._gpus = gpus
        self._alone: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        name = unit(self.config.rootpath, nodeid)
        if name != ALONE_UNIT or self._gpus < 2:
            return name
        # The tests that run alone are dealt out to the GPUs.
        return self._alone.setdefault(nodeid, f"{ALONE_UNIT} {len(self._alone) % self._gpus}")

    def remove_node(self, node: Any) -> str | None:
        """Return the test in which the worker crashed; None if it had none left."""
        crashed = None
        for tests in self.assigned_work[node].values():
            crashed = next((test for test, completed in tests.items() if not completed), None)
            if crashed:
                tests[crashed] = True
                break
        super().remove_node(node)
        return crashed

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """Record that a worker has run a test, and assign it the next one."""
        test = self.registered_collections[node][item_index]
        name, tests = self._split_scope(test), self.assigned_work[node]
        tests[name][test] = True
        if all(tests[name].values()):
            del tests[name]
        self._reschedule(node)

    def _assign_work_unit(self, node: Any) -> None:
        if not self._places:  # of the first test with an id, as list.index
            tests = [*enumerate(self.registered_collections[node])]
            self._places = {test: place for place, test in reversed(tests)}
        name = next((name for name in self.workqueue if self._fits(name, node)), None)
        if name is None:
            node.shutdown()
            return
        tests = self.workqueue.pop(name)
        self.assigned_work[node][name] = tests
        with suppress(OSError):  # its death is reported next, and its tests go to other workers
            node.send_runtest_some([self._places[test] for test, completed in tests.items() if not completed])

    def _fits(self, name: str, node: Any) -> bool:
        """Return whether a worker may run a unit: tests that run alone on a GPU need a worker of that GPU, if any."""
        if name not in self._alone.values():
            return True
        gpu = int(name.rpartition(" ")[2])
        on_gpu = [other for other in self.assigned_work if _number(other) % self._gpus == gpu]
        return node in on_gpu or all(other.shutting_down for other in on_gpu)

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


def _number(node: Any) -> int:
    return int(node.gateway.id.removeprefix("gw"))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    if config.option.dist != "load":
        return None
    if not hasattr(config.option, "loadscopereorder"):
        found = importlib.metadata.version("pytest-xdist")
        why = f"pytest-xdist {found} changes the order of the tests: pip install 'pytest-xdist>=3.8', or -n 0"
        raise pytest.UsageError(why)
    name = chosen_lane(config)
    return TestByTest(config, log, len(visible(lanes_of(config)[name].count)) if name else 1)
