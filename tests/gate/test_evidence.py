"""A gate that is read is judged again from its files, and a gate of a set with itself says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core.accepted import Acceptance
from bumpgate.core.errors import BumpgateError
from bumpgate.core.findings import Decision
from bumpgate.core.gate_file import GateFile
from bumpgate.core.rows import Verdict
from bumpgate.gate.evidence import read_judged
from bumpgate.gate.plan import plan_for, plan_of
from bumpgate.gate.state import NAME, SideState
from tests.support.gating import TIME_ROW as TIMED
from tests.support.gating import TODAY, Machine, count, labels


@pytest.fixture
def gate(machine: Machine, out: Path) -> Path:
    """A finished gate that holds for a count and a slower time."""
    machine.plant("candidate", counts=[count(14, Verdict.CHANGED)], slower={TIMED: 1.1})
    machine.gate(out)
    return out / NAME


def edited_record(raw: dict[str, Any], out: Path) -> None:
    path = out / "candidate.json"
    path.write_text(path.read_text().replace('"value": 14', '"value": 13'))


def put(*keys: str, value: Any) -> Callable[[dict[str, Any], Path], None]:
    def edit(raw: dict[str, Any], out: Path) -> None:
        for key in keys[:-1]:
            raw = raw[key]
        raw[keys[-1]] = value

    return edit


EDITS: Mapping[str, tuple[Callable[[dict[str, Any], Path], object], str]] = {
    "no finding": (
        lambda raw, out: raw.update(decision="ADOPT", exit_code=0, findings=[]),
        "its evidence gives HOLD with 2 findings, the file says ADOPT with 0",
    ),
    "decision": (put("decision", value="ADOPT"), "states ADOPT, and its worst finding is HOLD"),
    "findings": (put("findings", value=[]), "states HOLD, and its worst finding is ADOPT"),
    "time": (put("timed", TIMED, "outcome", value="SAME"), "(other timed)"),
    "exit code": (put("exit_code", value=0), "(other exit_code)"),
    "moved": (put("moved", value=[]), "(other moved)"),
    "session": (put("sessions", "log_ratios", TIMED, value=[0.0] * 16), "evidence changed since the verdict"),
    "package": (put("sides", "candidate", "packages", "torch", value="9"), "evidence changed"),
    "day": (put("inputs", "today", value="2026-01-01"), "evidence changed"),
    "options": (put("config", "selection", value=["suites"]), "evidence changed"),
    "no digest": (put("digests", value={}), "changed since the verdict"),
    "no options": (put("config", value=None), "config must be a dict, got None"),
    "text for a boolean": (put("finished", value="no"), "finished must be a bool, got 'no'"),
    "no inputs": (put("inputs", value=None), "it does not hold what it was judged from"),
    "older schema": (put("schema", value=3), "a gate of schema 3"),
    "replaced record": (
        lambda raw, out: shutil.copy(out / "adopted.json", out / "candidate.json"),
        "candidate.json changed since the verdict",
    ),
    "edited record": (edited_record, "candidate.json changed since the verdict"),
    "lost record": (lambda raw, out: (out / "adopted.json").unlink(), "adopted.json changed"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_gate_is_refused(gate: Path, edit: str) -> None:
    found = read_judged(gate)
    assert isinstance(found, GateFile)
    assert {f.label for f in found.findings} == {"CHANGED", "SLOWER"}
    change, words = EDITS[edit]
    raw = json.loads(gate.read_text())
    change(raw, gate.parent)
    gate.write_text(json.dumps(raw))
    with pytest.raises(BumpgateError) as refused:
        read_judged(gate)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_verdict_with_acceptances_and_drift_is_the_same_again(machine: Machine, out: Path) -> None:
    """Everything that a verdict depends on is in the files: here an accepted slowdown."""
    machine.plant("candidate", slower={TIMED: 1.1})
    entry = Acceptance("cpu", TIMED, None, "ada", "upstream", TODAY, TODAY.replace(year=2027), ratio=1.2)
    (machine.root / "baselines").mkdir()
    (machine.root / "baselines/accepted.toml").write_text(
        f'[[accepted]]\nlane = "cpu"\nrow = "{TIMED}"\nratio = 1.2\nowner = "ada"\nreason = "upstream"\n'
        f"since = {entry.since}\nexpires = {entry.expires}\n"
    )
    made = machine.gate(out)
    assert made.decision is Decision.ADOPT, labels(made)
    found = read_judged(out / NAME)
    assert isinstance(found, GateFile)
    assert found.accepted == (f"{TIMED} {entry.measured}: accepted by {entry}",)
    assert plan_of(json.loads((out / NAME).read_text())["inputs"]["plan"]) == plan_for()


def side(**packages: str) -> SideState:
    return SideState(packages=packages, git_version={"torch": "f00d"})


@pytest.mark.parametrize(
    ("candidate", "equal"),
    [
        (side(torch="2.13.0"), True),
        (side(torch="2.14.0"), False),
        (side(torch="2.13.0", numpy="2"), False),
        (side(), False),
        (replace(side(torch="2.13.0"), git_version={"torch": "beef"}), False),
        (replace(side(torch="2.13.0"), wheels={"flash-attn": "1"}), False),
        (replace(side(torch="2.13.0"), artifacts={"torch": ["a", "c"]}), True),
        (replace(side(torch="2.13.0"), artifacts={"torch": ["b"]}), False),
    ],
)
def test_sides_are_equal_if_all_their_packages_are(candidate: SideState, equal: bool) -> None:
    adopted = replace(side(torch="2.13.0"), artifacts={"torch": ["a"]})
    assert adopted.equals(candidate) is equal
    assert candidate.equals(adopted) is equal


@pytest.mark.parametrize("value", [13, 14])
def test_gate_of_a_set_with_itself_is_unknown_and_still_holds(
    machine: Machine, out: Path, value: int
) -> None:
    broken = value != 13
    counts = [count(value, Verdict.CHANGED if broken else Verdict.PASS)]
    machine.plant("candidate", torch="2.13.0", counts=counts)
    made = machine.gate(out)
    assert made.decision is (Decision.HOLD if broken else Decision.UNKNOWN)
    (equal,) = (f for f in made.findings if f.label == "EQUAL")
    assert equal.head == "the sides are equal: the same packages in the same versions"
