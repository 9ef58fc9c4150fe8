"""Options of a bisect: the command line that repeats it, and the finding of a gate that it follows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.bisect import command, journal
from bumpgate.bisect.candidates import Range
from bumpgate.bisect.gate_finding import GateFinding
from bumpgate.bisect.options import BisectError, Options
from bumpgate.bisect.probe import CommandTest

ROW, TEST = "throughput/a/seconds", "suites/throughput/test_a.py::test_time[cpu]"


def options(row: str = ROW, ratio: float = 1.3) -> Options:
    finding = GateFinding("cpu", (TEST,), {"torch": "2.0.0"}, {"torch": "2.1.0"}, {row: TEST}, {row: ratio})
    return Options(
        good="2.0.0",
        bad="2.1.0",
        lane="cpu",
        selection=(TEST,),
        from_gate=Path("/gate/gate.json"),
        finding=finding,
    )


def test_resume_line_repeats_the_options() -> None:
    options = Options(
        good="2.0.0",
        bad="2.1.0",
        lane="cpu",
        selection=("suites", "-k", "a b"),
        index="https://user:secret@example.org/index",
        find_links=("wheels",),
        extra=("numpy<2",),
        timeout=2.5,
        budget=9,
        find_fix=True,
        attribution=False,
        disk="40G",
    )
    assert options.resume_line() == (
        "bumpgate bisect --lane cpu --package torch --good 2.0.0 --bad 2.1.0 --index https://example.org/index"
        " --timeout 2.5 --confidence 0.98 --budget 9 --find-links wheels --with 'numpy<2' --find-fix"
        " --out bisect-torch-2.0.0-2.1.0 --no-attribution --disk 40G --resume -- suites -k 'a b'"
    )


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return the folder of an interrupted bisect."""
    span = Range("torch", ("2.0.0", "2.0.1", "2.1.0"), "2.0.0", "2.1.0", {})
    journal.begin(tmp_path / "state.jsonl", options().plan(span, CommandTest("", "torch", tmp_path))).close()
    return tmp_path


@pytest.mark.parametrize(
    "other", [options("throughput/b/seconds"), options(ratio=1.02)], ids=["row", "ratio"]
)
def test_resume_refuses_a_gate_with_another_finding(out: Path, other: Options) -> None:
    """The next gate of the same candidate wrote the file again while the bisect was interrupted."""
    with pytest.raises(BisectError) as caught:
        command._continue(replace(other, out=out))
    assert str(caught.value) == (
        f"{out} is of another finding than /gate/gate.json has now, which was written again: name another --out"
    )


def test_resume_continues_with_the_same_finding(out: Path) -> None:
    state, _ = command._continue(replace(options(), out=out))
    assert state
    state.close()
