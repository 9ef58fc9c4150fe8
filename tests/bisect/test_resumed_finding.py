"""A bisect of a gate's finding resumes only with that finding: the command line names nothing but the gate's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.bisect import command, journal
from bumpgate.bisect.candidates import Range
from bumpgate.bisect.command_probe import CommandTest
from bumpgate.bisect.gate_finding import GateFinding
from bumpgate.bisect.options import BisectError, Options

ROW, TEST = "throughput/a/seconds", "suites/throughput/test_a.py::test_time[cpu]"


def options(row: str = ROW, ratio: float = 1.3) -> Options:
    finding = GateFinding("cpu", (TEST,), {"torch": "2.0.0"}, {"torch": "2.1.0"}, {row: TEST}, {row: ratio})
    ends = ("torch", "2.0.0", "2.1.0", "cpu", (TEST,), "", None, (), ())
    return Options(*ends, None, False, None, None, 0.98, None, gate="/gate/gate.json", finding=finding)


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
        command._continue(other, out)
    assert str(caught.value) == (
        f"{out} is of another finding than /gate/gate.json has now, which was written again: name another --out"
    )


def test_resume_continues_with_the_same_finding(out: Path) -> None:
    state, _ = command._continue(options(), out)
    assert state
    state.close()
