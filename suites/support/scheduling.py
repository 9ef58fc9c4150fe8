"""Which worker runs what on the H200 lane: test by test, but for modules whose tests share what is dear to make."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

# Each has a fixture of the module's scope that compiles, builds or searches for ten seconds to two minutes.
TOGETHER = {
    "suites/cache/test_keys.py",
    "suites/cache/test_layers.py",
    "suites/launch/test_capabilities.py",
    "suites/launch/test_knobs.py",
    "suites/wheels/test_abi.py",
}


class TestByTest(LoadScopeScheduling):
    """Hands out single tests in the order of their collection, after the modules of TOGETHER."""

    __test__ = False

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file in TOGETHER else nodeid
