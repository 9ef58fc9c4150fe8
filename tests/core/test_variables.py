"""Every BUMPGATE_* variable that bumpgate or the suites' support reads has a line in bumpgate.core.variables."""

from __future__ import annotations

import re
from pathlib import Path

from bumpgate.core.variables import RUNS, USERS

ROOT = Path(__file__).parents[2]


def test_each_variable_has_a_line() -> None:
    files = [*(ROOT / "bumpgate").rglob("*.py"), *(ROOT / "suites/support").rglob("*.py")]
    files += ROOT.glob("suites/**/conftest.py")
    files = [file for file in files if file.name != "variables.py" and "launch" not in file.parts]
    used = {name for file in files for name in re.findall(r"\bBUMPGATE_[A-Z]\w*", file.read_text())}
    assert used == RUNS.keys() | USERS.keys()
