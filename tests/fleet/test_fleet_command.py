"""Exit codes and lines of `bumpgate fleet gate` and `bumpgate fleet check`, without an engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from bumpgate import cli
from bumpgate.core.findings import Decision
from bumpgate.fleet import command, gates
from bumpgate.fleet.engine import Done, Host, Lost, Task
from bumpgate.fleet.gates import LaneGate

FACTS = {"python": "CPython 3.11.7", "package torch": "2.13.0"}


class FakeEngine:
    """Two hosts of one name. answers: what each of them returns."""

    def __init__(self, *answers: Done | Lost) -> None:
        self.answers = answers

    def hosts(self, needs: Sequence[str] = ()) -> list[Host]:
        offered = frozenset({"lane_cpu", "node:10.0.0.1"})
        return [Host("node", f"{place}" * 12, offered) for place, _ in enumerate(self.answers)]

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Done | Lost]]:
        yield from reversed([*enumerate(self.answers)])

    def close(self) -> None:
        pass


def fleet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: FakeEngine, *arguments: str
) -> tuple[int, list[str]]:
    monkeypatch.setattr(command.Fleet, "engine", lambda self: engine)
    monkeypatch.setattr(sys, "argv", ["bumpgate", "fleet", "--ray", "a:1", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), capsys.readouterr().out.splitlines()


def verdict(lane: str, decision: Decision) -> LaneGate:
    found = SimpleNamespace(decision=decision, findings=(), wall_seconds=60.0)
    return LaneGate(lane, "node", found)  # type: ignore[arg-type]


ADOPT, HOLD = verdict("cpu", Decision.ADOPT), verdict("v6e", Decision.HOLD)
LOST, REFUSED = LaneGate("h200", why="its host died"), LaneGate("tpu", why="no such lane", bad_input=True)


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([ADOPT], 0),
        ([ADOPT, HOLD], 1),
        ([ADOPT, LOST], 125),
        ([LOST, HOLD, ADOPT], 1),
        ([REFUSED, LOST, HOLD], 4),
    ],
    ids=["adopt", "hold", "unknown", "hold before unknown", "bad input before all"],
)
def test_worst_lane_decides_the_exit_code_of_gates(
    results: list[LaneGate],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gates, "run", lambda *_: iter(results))
    lanes = [part for result in results for part in ("--lane", result.lane)]
    ended, out = fleet(
        monkeypatch,
        capsys,
        FakeEngine(),
        "gate",
        *lanes,
        "--out",
        str(tmp_path),
        "--",
        "--candidate",
        "torch==2",
    )
    assert (ended, len(out)) == (code, len(results)), out
    for line, result in zip(out, results):
        words = (
            result.gate.decision.name if result.gate else f"UNKNOWN  {result.lane}: no verdict: {result.why}"
        )
        assert line.startswith(words)


def test_known_verdicts_count_in_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gates, "read", lambda folder: HOLD.gate if folder.name == "v6e" else None)
    monkeypatch.setattr(
        gates, "run", lambda engine, left, *_: iter([ADOPT]) if left == ["cpu"] else iter([LOST])
    )
    monkeypatch.setattr(gates, "differences", lambda *_: "")
    arguments = ("gate", "--lane", "cpu", "--lane", "v6e", "--out", str(tmp_path))
    assert fleet(monkeypatch, capsys, FakeEngine(), *arguments, "--resume", "--", "-q")[0] == 1


def test_resumed_run_refuses_the_gate_of_another_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "bumpgate gate --lane cpu --candidate torch==2.14.0 --out /home/a/gate"
    found = SimpleNamespace(decision=Decision.ADOPT, command=text, binding={})
    monkeypatch.setattr(gates, "read", lambda folder: found)
    arguments = ("gate", "--lane", "cpu", "--out", str(tmp_path), "--resume", "--")
    assert fleet(monkeypatch, capsys, FakeEngine(), *arguments, "--candidate", "torch==2.15.0") == (4, [])


@pytest.mark.parametrize("option", [("--lane", "cpu"), ("--lane=cpu",), ("--out", "elsewhere")])
def test_gate_refuses_own_options_after_the_dashes(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last of two --lane counts: another lane than the named one would be gated."""
    monkeypatch.setattr(gates, "run", lambda *_: iter([ADOPT]))
    arguments = ("gate", "--lane", "h200", "--", "--candidate", "torch==2.14.0", *option)
    assert fleet(monkeypatch, capsys, FakeEngine(), *arguments) == (4, [])


def test_gates_of_a_fleet_are_kept_in_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[tuple[list[str], str]] = []
    monkeypatch.setattr(command.history, "command", lambda words, store: kept.append((words, store)))
    monkeypatch.setattr(gates, "run", lambda *_: iter([ADOPT, LOST]))
    options = ("--out", str(tmp_path), "--history", "sqlite:///h.db")
    fleet(monkeypatch, capsys, FakeEngine(), "gate", "--lane", "cpu", "--lane", "h200", *options, "--", "-q")
    assert kept == [(["add", str(tmp_path / "cpu/gate.json")], "sqlite:///h.db")]


@pytest.mark.parametrize(
    ("answers", "code", "lines"),
    [
        ((Done("node", FACTS), Done("node", FACTS)), 0, ["2 hosts: equal"]),
        (
            (Done("node", FACTS), Done("node", FACTS | {"package torch": "2.14.0"})),
            1,
            [
                "package torch: 2.13.0 on node (00000000); 2.14.0 on node (11111111)",
                "2 hosts: 1 difference",
            ],
        ),
        (
            (Done("node", FACTS), Lost("its host died")),
            125,
            ["node (11111111): no answer: its host died", "2 hosts: 1 difference"],
        ),
        ((Done("node", FACTS),), 0, ["1 host: equal"]),
    ],
    ids=["equal", "another torch", "a silent host", "one host"],
)
def test_check_names_each_difference_between_hosts(
    answers: tuple[Done | Lost, ...],
    code: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended, out = fleet(monkeypatch, capsys, FakeEngine(*answers), "check")
    names = [f"node ({place * 8})" for place in "01"] if len(answers) > 1 else ["node"]
    assert (ended, out) == (code, [*(f"{name}: lane_cpu" for name in names), *lines])
