"""Writes a reproducer as the test of a defect row, and runs it once on each side: red there, green here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from packaging.version import Version

from bumpgate.core import rules
from bumpgate.core.baseline import investigate
from bumpgate.core.errors import BumpgateError
from bumpgate.core.rows import Verdict, read_record
from bumpgate.process import child
from bumpgate.process.host import read_or_empty
from bumpgate.process.runner import child_environment
from bumpgate.reproduce.reproduction import Reproduction

TEST = '''"""A known defect: move this test to the suite that meets it."""

import pytest
{program}


@pytest.mark.{lane}
def test_{name}(row):
    """{title}."""
{found}
    row.defect(
        {row!r}, bool(found), known_in={known_in!r},
        reason={title!r},
        witness=1, {rule}program={name},
    )
'''
CALLED = "    torch.manual_seed(0)\n    found = {name}(){beyond}"
TRIED = """    torch.manual_seed(0)
    try:
        found = {name}()
    except Exception as error:
        if {words!r} not in f"{{type(error).__name__}}: {{error}}":
            raise
        found = True"""
SECONDS = 600.0


def known_in(found: Reproduction, package: str, first: str = "") -> str:
    """Return the versions with the defect as far as they were run: up to the good one, or the bad one alone.

    first: the first bad version, if a bisect found it.
    """
    good, bad = (Version(side.versions[package]).public for side in (found.good, found.bad))
    if Version(bad) < Version(good):
        return f"{package}>={bad},<{good}"
    return f"{package}>={first},<={bad}" if first else f"{package}=={bad}"


def text(found: Reproduction, row: str, lane: str, range_: str, root: Path) -> str:
    """Return the test. Raises BumpgateError for a script: a row needs a function."""
    name = found.program.name
    if not name:
        raise BumpgateError("--row needs a function: name --program FILE.py:function instead of a script")
    if found.wrong.kind == "RAISED":
        call = TRIED.format(name=name, words=found.wrong.words)
    else:
        call = CALLED.format(name=name, beyond="" if found.limit is None else f" > {found.limit!r}")
    program = (
        found.source
        if re.search(r"^import torch$", found.source, re.MULTILINE)
        else f"import torch\n{found.source}"
    )
    return TEST.format(
        program=program.strip(),
        lane=lane,
        name=name,
        title=found.program.title.rstrip("."),
        found=call,
        row=row or f"features/{name}/defect",
        known_in=range_,
        rule='rule="R1", ' if (root / rules.FILE).is_file() else "",
    )


def check(found: Reproduction, root: Path, file: Path, lane: str) -> str:
    """Run the test without its range on both sides; return both results in a line.

    A row that nobody has reviewed yet is NEW if the defect is absent. Raises BumpgateError if a result is wrong.
    """
    if root not in file.parents:
        return f"not run: it is outside of {root}; name an --out in it"
    blind, log, record = (
        file.with_name(f"test_blind_{file.stem}{suffix}") for suffix in (".py", ".log", ".json")
    )
    text = re.sub(r"known_in='([\w-]+)[^']*'", r"known_in='\1<0'", file.read_text(encoding="utf-8"))
    results = []
    try:
        blind.write_text(text, encoding="utf-8")
        for side, word, right in (
            (found.bad, "red", [Verdict.REGRESSION]),
            (found.good, "green", [Verdict.PASS, Verdict.NEW]),
        ):
            record.unlink(missing_ok=True)
            pytest = shlex.split(investigate(lane, str(blind)))
            command = [str(side.python), "-m", *pytest, f"--record={record}"]
            child.run_child(command, root, child_environment(side.python, root), SECONDS, log)
            printed = read_or_empty(log)
            if "No module named pytest" in printed:
                return f"not run: {side.python} has no pytest"
            rows = read_record(record).judgements if record.exists() else ()
            if not any(j.verdict in right for j in rows):
                raise BumpgateError(f"{file}: expected {right[0].value} under {side}:\n{printed[-2000:]}")
            results.append(f"{word} under {side}")
    finally:
        for path in (blind, log, record):
            path.unlink(missing_ok=True)
    return ", ".join(results) + ", each without its range"
