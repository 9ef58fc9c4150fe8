"""The scheduler of xdist that bumpgate/plugin/scheduling.py selects."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from xdist.scheduler import LoadScopeScheduling

from bumpgate.plugin.scheduling import unit

# Tests that a worker runs or has been assigned: it starts a test only once the next is known.
AHEAD = 2


class TestByTest(LoadScopeScheduling):
    """Assigns what scheduling.unit names, in the order in which the tests were collected.

    It changes four things in xdist 3.8.0. A test that crashes its worker counts as run; otherwise it would be run
    again. A replacement worker gets tests once it has collected them; if two are replaced at a time, the run would end
    with a KeyError. A worker that died but whose death is not yet reported may still be assigned tests; the run would
    end with the pipe's OSError. Each worker has two tests or has been shut down: it starts a test only once the next is
    known, so that a worker with a single test would wait forever.
    """

    __test__ = False

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # it would put units of many tests first

    def _split_scope(self, nodeid: str) -> str:
        return unit(self.config.rootpath, nodeid)

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
