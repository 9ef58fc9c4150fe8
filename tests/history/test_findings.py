"""Memory of findings: new, still there, gone, back, not measured; known issues and owners."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bumpgate.core.findings import Decision, Finding, TimedOutcome
from bumpgate.core.rows import Verdict
from bumpgate.history.archive import Archive, default_store
from bumpgate.history.known_findings import GONE, NEW, STILL, UNMEASURED, FindingError
from tests.support.project import in_process
from tests.support.reports import BREAKS, OTHER, TIMED, gate_of_day, save_record

ISSUE = "https://github.com/pytorch/pytorch/issues/1"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUMPGATE_HOME", str(tmp_path / "home"))


@pytest.fixture
def archive() -> Archive:
    return Archive(default_store())


def states(archive: Archive, path: Path) -> list[str]:
    return [found.state for found in archive.add(path).findings]


def done(*args: object) -> list[str]:
    """Run bumpgate, which must succeed, and return the lines that it prints."""
    ran = in_process(Path(), *map(str, args))
    assert ran.code == 0, ran
    return ran.out.splitlines()


def test_finding_states_are_new_still_gone_and_back(tmp_path: Path) -> None:
    printed = []
    for day, red in ((1, (BREAKS,)), (2, (BREAKS, OTHER)), (3, ()), (4, ()), (5, (BREAKS,))):
        printed.append(done("history", "add", gate_of_day(tmp_path, day, red))[1:])
    (first,), (second,), (third,), fourth, (fifth,) = printed
    key = first.split()[1]
    assert first == f"new           {key}  CHANGED graph_breaks; 1 row; since 2026-11-01"
    assert second == (
        f"still there   {key}  CHANGED graph_breaks; 2 rows; 1 more than before; since 2026-11-01 (2 gates)"
    )
    assert third == (
        f"gone          {key}  CHANGED graph_breaks; 2 rows; since 2026-11-01 (2 gates); "
        "last seen 2026-11-02; gone 2026-11-03"
    )
    assert fourth == []
    assert fifth.startswith(f"back          {key}  ")


def test_findings_do_not_depend_on_the_order_of_gates(tmp_path: Path, archive: Archive) -> None:
    days = {1: (BREAKS,), 2: (), 3: (OTHER,), 4: (BREAKS, OTHER)}
    paths = [gate_of_day(tmp_path, day, red) for day, red in days.items()]
    other = Archive(f"sqlite:///{tmp_path / 'other.sqlite'}")
    for path in paths:
        archive.add(path)
    for path in reversed(paths):
        other.add(path)
    assert archive.findings() == other.findings()
    (found,) = archive.findings()
    assert (found.first[:10], found.gates, found.state) == ("2026-11-01", 3, STILL)


def test_gate_without_the_row_leaves_the_finding_open(tmp_path: Path, archive: Archive) -> None:
    assert states(archive, gate_of_day(tmp_path, 1)) == [NEW]
    assert states(archive, gate_of_day(tmp_path, 2, (), rows=(OTHER,))) == [UNMEASURED]
    assert states(archive, gate_of_day(tmp_path, 3, ())) == [GONE]


def test_row_that_is_red_for_another_reason_is_not_gone(tmp_path: Path, archive: Archive) -> None:
    archive.add(gate_of_day(tmp_path, 1))
    found = archive.add(gate_of_day(tmp_path, 2, label=Verdict.REGRESSION)).findings
    assert {(f.label, f.state) for f in found} == {("CHANGED", UNMEASURED), ("REGRESSION", NEW)}


def test_row_that_is_shown_but_not_judged_is_not_gone(tmp_path: Path, archive: Archive) -> None:
    """A timed row on another class of host than the baseline's."""
    archive.add(gate_of_day(tmp_path, 1))
    path = gate_of_day(tmp_path, 2, ())
    for side in ("adopted.json", "candidate.json"):
        record = json.loads((path.parent / side).read_text())
        for judgement in record["rows"]:
            judgement |= {"verdict": "INCONCLUSIVE", "explains": True}
        save_record(path.parent / side, record)
    assert states(archive, path) == [UNMEASURED]


def test_gate_of_another_package_does_not_end_a_finding(tmp_path: Path, archive: Archive) -> None:
    archive.add(gate_of_day(tmp_path, 1))
    assert states(archive, gate_of_day(tmp_path, 2, (), candidate="triton==3.9.0")) == []
    (found,) = archive.findings()
    assert (found.state, found.gone, found.package) == (NEW, None, "torch")


def test_slower_row_is_gone_only_if_its_sessions_decide(tmp_path: Path, archive: Archive) -> None:
    rows = (BREAKS, TIMED)
    assert states(archive, gate_of_day(tmp_path, 1, (), rows=rows, timed=TimedOutcome.SLOWER)) == [NEW]
    assert states(archive, gate_of_day(tmp_path, 2, (), rows=rows)) == [UNMEASURED]
    found = archive.add(gate_of_day(tmp_path, 3, (), rows=rows, timed=TimedOutcome.INCONCLUSIVE)).findings
    assert {f.label: f.state for f in found} == {"SLOWER": UNMEASURED, "INCONCLUSIVE": NEW}
    found = archive.add(gate_of_day(tmp_path, 4, (), rows=rows, timed=TimedOutcome.SAME)).findings
    assert {f.state for f in found} == {GONE}


def test_drift_is_gone_only_if_read_against_the_anchor(tmp_path: Path, archive: Archive) -> None:
    def gate(day: int, timed: TimedOutcome | None, *, drift: bool = False, anchor: bool = True) -> Path:
        path = gate_of_day(tmp_path, day, (), rows=(BREAKS, TIMED), timed=timed)
        raw = json.loads(path.read_text())
        found = Finding(Decision.HOLD, "CREEP", "seconds", "", (TIMED,), ("1 at its anchor",), ("+4 %",))
        raw["findings"] = [asdict(found) | {"decision": "HOLD"}] if drift else []
        raw["decision"] = "HOLD" if drift else "ADOPT"
        raw["anchor"] = {"readings": {TIMED: 1.04 if drift else 1.0}} if anchor else None
        path.write_text(json.dumps(raw))
        return path

    assert states(archive, gate(1, TimedOutcome.SAME, drift=True)) == [NEW]
    assert states(archive, gate(2, TimedOutcome.SAME, anchor=False)) == [UNMEASURED]
    assert states(archive, gate(3, None, anchor=False)) == [UNMEASURED]
    assert states(archive, gate(4, TimedOutcome.SAME)) == [GONE]


def test_failed_test_is_gone_only_after_a_whole_run(tmp_path: Path, archive: Archive) -> None:
    problem = ("suites/a/test_b.py::test_c: ValueError: 3 of 4",)
    (found,) = archive.add(gate_of_day(tmp_path, 1, (), problems=problem)).findings
    assert (found.label, found.module) == ("PROBLEM", "suites/a/test_b.py")
    again = ("suites/a/test_b.py::test_c: ValueError: 2 of 4",)
    assert states(archive, gate_of_day(tmp_path, 2, (), problems=again)) == [STILL], (
        "a number is not part of the cause"
    )
    assert states(archive, gate_of_day(tmp_path, 3, (), selection=("suites/x",))) == [UNMEASURED]
    assert states(archive, gate_of_day(tmp_path, 4, ())) == [GONE]


def test_findings_that_differ_in_a_number_stay_two(tmp_path: Path, archive: Archive) -> None:
    problems = tuple(f"suites/a/test_b.py::test_{n}: line {n} failed" for n in (1, 2))
    assert states(archive, gate_of_day(tmp_path, 1, (), problems=problems[:1])) == [NEW]
    found = archive.add(gate_of_day(tmp_path, 2, (), problems=problems)).findings
    assert sorted(f.state for f in found) == [NEW, STILL]


def test_link_and_owner_are_kept(tmp_path: Path, archive: Archive) -> None:
    (found,) = archive.add(gate_of_day(tmp_path, 1)).findings
    done("findings", "link", found.key[:6], ISSUE)
    done("findings", "owner", found.key, "ada")
    added = done("history", "add", gate_of_day(tmp_path, 2))
    assert added[1].endswith(f"; since 2026-11-01 (2 gates); ada; {ISSUE}")
    assert done("findings", "list")[-1] == "1 open, 0 gone"
    done("findings", "link", found.key, "")
    archive.add(gate_of_day(tmp_path, 3, ()))
    assert done("findings", "list", "--lane", "cpu") == ["0 open, 1 gone"]
    line = done("findings", "list", "--gone")[0]
    assert line.startswith("gone ")
    assert line.endswith("; ada")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("link", "beef", ISSUE), "'beef' is not a finding in "),
        (("link", "", ISSUE), "'' is not a finding in "),
        (("owner", "%", "ada"), "'%' is not a finding in "),
        (("link", "beef", "pytorch#1"), "'pytorch#1' is not the URL of an issue such as https://github.com/"),
        (("link", "beef", "https://u:secret@h/1"), "'https://h/1' is not the URL of an issue"),
        (("owner", "beef", "a\nb"), "is not a name: use printable characters on one line"),
        (("list", "--store", "nonsense"), "--store 'nonsense': not a database URL"),
    ],
)
def test_bad_findings_input_is_one_line(args: tuple[str, ...], words: str) -> None:
    ran = in_process(Path(), "findings", *args)
    assert ran.code == 4
    (line,) = ran.err.splitlines()
    assert words in line
    assert "secret" not in line


def test_ambiguous_finding_key_is_refused(tmp_path: Path, archive: Archive) -> None:
    for day in range(1, 18):  # 17 keys of hexadecimal digits: two start alike
        archive.add(gate_of_day(tmp_path, day, candidate=f"package{day}==1"))
    first = [found.key[0] for found in archive.findings()]
    shared = next(c for c in first if first.count(c) > 1)
    with pytest.raises(FindingError, match=f"'{shared}' is the start of {first.count(shared)} findings"):
        archive.mark(shared, owner="ada")
    assert {found.owner for found in archive.findings()} == {None}


def test_gate_resumed_after_its_budget_stores_its_new_findings(tmp_path: Path) -> None:
    """It has the same start and the same records, and a row that was undecided is slower now."""
    archive, rows = Archive(default_store()), (BREAKS, TIMED)
    paths = []
    for name in ("INCONCLUSIVE", "SLOWER"):
        (tmp_path / name).mkdir()
        paths.append(gate_of_day(tmp_path / name, 1, rows=rows, timed=TimedOutcome[name]))
    before, after = paths
    assert {known.label for known in archive.add(before).findings} == {"CHANGED", "INCONCLUSIVE"}
    archive.add(after)
    assert {known.label for known in archive.findings() if not known.gone} >= {"CHANGED", "SLOWER"}
    assert not archive.add(after).new
