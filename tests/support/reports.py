"""Records and gates as written by a run, for tests of their readers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bumpgate import cli
from bumpgate.core.findings import TimedOutcome
from bumpgate.core.rows import (
    Judgement,
    Problem,
    ProblemKind,
    Record,
    Row,
    Value,
    Verdict,
    digest_of,
    write_record,
)
from bumpgate.gate.evidence import judge
from bumpgate.gate.plan import SessionPlan
from bumpgate.gate.sequential import Timed
from bumpgate.gate.state import Gate, GateConfig, Inputs, SideState
from bumpgate.gate.timed import Sessions
from bumpgate.gate.verdict import GateVerdict, Side
from bumpgate.history.archive import Archive
from bumpgate.process.tree_digest import Binding

TEST = "suites/compile/test_policies.py::test_counts[nam52-regional-cpu]"
EVIL = "<script>alert('x')</script> & \"$\\alpha$\" `|` ]]>"
BREAK = "break x1: GB0098 at model/hybrid.py:{line} `x = block(x)`: Skip calling disabled function <function {name}>"
HERE = {
    "lane": "cpu",
    "device": "cpu",
    "cpu": "AMD EPYC",
    "torch": "2.13.0+cpu",
    "torch_git": "c" * 40,
    "triton": None,
    "wheel_set": "4f7f599cac02c236",
    "commit": "f" * 40,
    "started": "2026-11-20T02:00:00+00:00",
    "wall_seconds": 312.0,
    "full_run": True,
}
TIME = {"unit": "s", "better": "lower", "tolerance": 0.1}
# Rows of the gates by day.
BREAKS, OTHER, TIMED = "compile/nam52/graph_breaks", "compile/nam12/graph_breaks", "throughput/nam52/seconds"
THERE = HERE | {"torch": "2.14.0+cpu", "torch_git": "d" * 40, "wheel_set": "77aa"}


def row(id: str = "compile/nam52-regional/graph_breaks", value: Value = 13, **fields: Any) -> Row:
    made = {"id": id, "value": value, "unit": "count", "witness": 1, "rule": "C6", "test": TEST}
    return Row(**made | fields)


def judged(verdict: Verdict, made: Row, reason: str = "", **fields: Any) -> Judgement:
    return Judgement(made, verdict, reason, "" if verdict is Verdict.PASS else "pytest -m cpu -n 0", **fields)


def loss_curve(slope: float) -> tuple[float, ...]:
    return tuple(6.7 * math.exp(-slope * step) + 1.9 + 0.05 * math.sin(step) for step in range(200))


def shared_rows(kernels: int, line: int, name: str, slope: float) -> list[Row]:
    """Rows of one side: a break with its reason, kernels, a curve, a timed row, and an ordinary one."""
    evidence = (BREAK.format(line=line, name=name), "4 operators", f"at 0x7f{line}")
    return [
        row(evidence=evidence),
        row("compile/nam52-regional/recompiles", 0),
        row("throughput/nam52-regional/generated_kernels", kernels, per_build=True),
        row("model/nam12-corpus/loss_after_200_steps", 2.4, unit="nats", series={"loss": loss_curve(slope)}),
        row("throughput/nam52-regional/seconds", 1.0, interval=(0.98, 1.03), **TIME),
    ]


def write_gate(
    folder: Path,
    good: Side,
    bad: Side,
    timed: Mapping[str, Timed] | None = None,
    *,
    lane: str = "cpu",
    started: str = "2026-11-21T02:00:00+00:00",
    candidate: str = "torch==2.14.0",
    selection: tuple[str, ...] = (),
    sessions: int | None = None,
    binding: Binding | None = None,
    pythons: tuple[str, str] = ("", ""),
) -> tuple[Path, GateVerdict]:
    """Write gate.json as the gate does, with adopted.json, candidate.json and its verdict.

    timed: row id -> outcome, ratio and number of the sessions that are made up for it.
    pythons: interpreters of both sides.
    """
    sides = {}
    for key, side, python in zip(("adopted", "candidate"), (good, bad), pythons, strict=True):
        if r := side.record:
            write_record(
                folder / f"{key}.json", r.provenance, r.judgements, complete=r.complete, problems=r.problems
            )
        sides[key] = SideState(
            name=side.name,
            record=f"{key}.json" if side.record else None,
            failure=side.failure,
            canaries=dict(side.canaries),
            measured=True,
            command=side.command,
            python=python,
            packages={"torch": side.name.split()[-1], "numpy": "2.4.6"},
            git_version={"torch": r.provenance["torch_git"]} if r else {},
        )
    plan = SessionPlan()
    ratios = {row: log_ratios(t) for row, t in (timed or {}).items()}
    paired = Sessions(dict.fromkeys(ratios, TEST), plan, plan.budget, log_ratios=ratios) if ratios else None
    gate = Gate(
        GateConfig(lane, candidate=candidate, selection=selection, sessions=sessions),
        started,
        "bumpgate gate --lane cpu --candidate torch==2.14.0",
        wall_seconds=803.5,
        finished=True,
        sides=sides,
        paired=paired,
        binding=binding,
        inputs=Inputs(plan=plan, today=date(2026, 11, 21)),
    )
    made = judge(gate, {"adopted": good.record, "candidate": bad.record})
    made.write(folder)
    return folder / "gate.json", GateVerdict(made.decision, made.findings)


def log_ratios(t: Timed) -> list[float]:
    """Return sessions that give this outcome: of little noise, or of so much that nothing can be decided."""
    noise = 0.2 if t.outcome is TimedOutcome.INCONCLUSIVE else 0.01
    return [math.log(t.ratio) + noise * (-1) ** k for k in range(t.sessions)]


def save_record(path: Path, raw: dict[str, Any]) -> None:
    """Write the edited content of a record with the digest that a run would have given it."""
    path.write_text(json.dumps({**raw, "digest": digest_of(raw)}))


def paired(outcome: TimedOutcome, ratio: float, sessions: int = 16) -> Timed:
    return Timed(outcome, ratio, (ratio - 0.015, ratio + 0.02), sessions, 0.001)


def gate_of_day(
    folder: Path,
    day: int,
    red: Iterable[str] = (BREAKS,),
    *,
    rows: Iterable[str] = (BREAKS, OTHER),
    label: Verdict = Verdict.CHANGED,
    problems: tuple[str, ...] = (),
    timed: TimedOutcome | None = None,
    candidate: str = "torch==2.15.0",
    selection: tuple[str, ...] = (),
    test: str = "",
) -> Path:
    """Write a gate of that day of November whose candidate has other values in the rows `red`."""
    folder = folder / f"{day:02d}-{candidate.partition('=')[0]}"
    folder.mkdir()
    started = f"2026-11-{day:02d}T02:00:00+00:00"
    more = {"test": test} if test else {}
    good = tuple(judged(Verdict.PASS, row(id, **more)) for id in rows)
    bad = tuple(
        judged(label if id in red else Verdict.PASS, row(id, 17 if id in red else 13, **more)) for id in rows
    )
    found = tuple(map(Problem.from_json, problems))
    sides = (
        Side("torch 2.14.0", Record(HERE | {"started": started}, good)),
        Side("torch 2.15.0", Record(THERE | {"started": started}, bad, problems=found)),
    )
    ratios = {TIMED: paired(timed, 1.06 if timed is TimedOutcome.SLOWER else 1.0)} if timed else {}
    started = f"2026-11-{day:02d}T03:00:00+00:00"
    return write_gate(folder, *sides, ratios, started=started, candidate=candidate, selection=selection)[0]


def many_readings(archive: Archive, rows: int, nights: int, last: date) -> None:
    """Store so many readings of counts up to a day, every tenth row with a change of level."""
    sql, tables = archive.sql, archive.tables
    start = last - timedelta(nights - 1)
    with archive.transaction() as connection:
        for n in range(nights):
            run = {"id": n + 1, "digest": str(n), "lane": "cpu", "host_class": "Xeon", "red": False}
            run["started"] = f"{start + timedelta(n)}T02:00:00+00:00"
            connection.execute(sql.insert(tables["runs"]), [run])
            same = {"run": n + 1, "unit": "count", "verdict": "PASS", "row_red": False}
            values = [13 + (r % 10 == 0 and n > nights // 2) for r in range(rows)]
            made = [
                same | {"row": f"a/case{r}/count", "value": json.dumps(value), "number": value}
                for r, value in enumerate(values)
            ]
            connection.execute(sql.insert(tables["readings"]), made)


def record(*judgements: Judgement, **fields: object) -> Record:
    return Record(HERE, judgements, **fields)  # type: ignore[arg-type]


def held(folder: Path) -> Path:
    """Write a gate with findings of every kind, with hostile text in every text field."""
    before = shared_rows(113, 66, "Mamba3Block.forward", 0.05)
    after = shared_rows(121, 71, "M2RNNBlock.forward", 0.03)
    after[0] = row(value=17, evidence=(*after[0].evidence, EVIL))
    good = Side("torch 2.13.0", Record(HERE, tuple(judged(Verdict.PASS, r) for r in before)))
    changed = judged(Verdict.CHANGED, after[0], f"reviewed 13, measured 17 {EVIL}")
    kept = judged(
        Verdict.CHANGED, after[1], "reviewed 1, measured 0", accepted=f"ada, until 2026-12-31: {EVIL}"
    )
    judgements = changed, kept, *(judged(Verdict.PASS, r) for r in after[2:])
    found = Record(THERE, judgements, problems=(Problem("t.py::a", ProblemKind.FAILED, EVIL),))
    bad = Side(f"torch 2.14.0 {EVIL}", found, canaries={"graphs": EVIL}, command=EVIL)
    timed = {
        "throughput/nam52-regional/seconds": paired(TimedOutcome.SLOWER, 1.061),
        "throughput/nam52-eager/seconds": paired(TimedOutcome.SAME, 1.003),
    }
    return write_gate(folder, good, bad, timed)[0]


def bumpgate(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Call the command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["bumpgate", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


class ParsedPage(HTMLParser):
    """A page as parsed by a browser: its elements, its text, and every URL in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())
