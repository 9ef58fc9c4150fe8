"""A miniature tree to gate: real processes and real interpreters, a few seconds per gate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bumpgate.core.baseline import Baseline, Reviewed, save
from bumpgate.gate import state
from tests.support.project import (
    EXISTING_BYTECODE,
    GOOD,
    Project,
    Result,
    counted,
    package_of_side,
    wrapped_python,
)

CANARY = """
@lanes("cpu")
def test_canary(lane, row, request):
    reason = os.environ.get("CANARY", "")
    request.config.stash[CANARY_RESULTS] = {"graphs": reason}
    row.bound("canaries/graphs/agrees", not reason, "bool", seen=1, rule="I1", expected=True, evidence=[reason],
        instruments=["graphs"])
"""
# Work is counted, with 0.2 % of noise that differs between processes: no load of the machine changes a ratio.
# SLOWER lengthens one of them.
TIMES = """
import random

@lanes("cpu")
def test_times(lane, row):
    noise = random.Random(os.getpid())
    for case, factor in (("same", 1.0), ("slow", float(os.environ.get("SLOWER", "1")))):
        ratios = sorted(factor * noise.uniform(0.998, 1.002) for _ in range(41))
        timing = at(ratios[20], ratios[14], ratios[26])
        row.timed(f"throughput/{case}/ratio", timing, "ratio", seen=3, rule="C37", tolerance=9.0)
"""
TIMED = ("throughput/same/ratio", "throughput/slow/ratio")


class Tree(Project):
    """A project with a canary, one count and two timed rows, and an interpreter for each side."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.workers(1)
        self.env |= {"BUMPGATE_HOME": str(root / "home"), "TMPDIR": str(root)}
        self.tests(CANARY, "suites/canaries/test_canaries.py")
        self.tests(GOOD)
        self.tests(TIMES, "suites/throughput/test_times.py")
        rows = {row: Reviewed(1.0, "ratio", "lower", 9.0, test=TIMES_TEST) for row in TIMED}
        rows["canaries/graphs/agrees"] = Reviewed(
            True, "bool", "derived", test="suites/canaries/test_canaries.py::test_canary[cpu]"
        )
        rows["compile/good/graph_breaks"] = counted("test_good")
        save(root / "baselines/cpu.json", Baseline("cpu", {"torch": "9.9.0", "triton": None}, rows))
        self.adopted, self.candidate = self.interpreter("adopted"), self.interpreter("candidate")

    def interpreter(
        self, side: str, bytecode: Mapping[str, str] = EXISTING_BYTECODE, **variables: str
    ) -> Path:
        """Create a python that wraps this one with extra env_vars; fast, because it loads few plugins."""
        path, site = self.root / side / "python", package_of_side(self.root / side / "site", side)
        self.write(f"{side}/python", wrapped_python(bytecode, site, SIDE=side, **variables))
        path.chmod(0o755)
        return path

    def sides(self) -> tuple[str, ...]:
        interpreters = "--python-adopted", str(self.adopted), "--python-candidate", str(self.candidate)
        return "gate", "--lane", "cpu", *interpreters, "--out", "g"

    def gate(self, *more: str) -> Result:
        return self.bumpgate(*self.sides(), *more)

    def raw(self) -> Any:
        return json.loads((self.root / "g" / state.NAME).read_text())


TIMES_TEST = "suites/throughput/test_times.py::test_times[cpu]"
COUNTS = ("--", "suites/canaries", "suites/compile")
