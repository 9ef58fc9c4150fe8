"""`bumpgate rebaseline`: what it accepts and refuses, and that every error of a command is one line."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

import bumpgate
from bumpgate.core import accepted
from bumpgate.core.accepted import today
from bumpgate.core.baseline import Baseline, Reviewed, judge, load, save
from bumpgate.core.rows import Judgement, Record, Row, Verdict, digest_of, read_record, write_record
from bumpgate.process.tree_digest import measured_tree
from bumpgate.review.rebaseline import plan, plan_times
from bumpgate.table import summary, verdict_table
from suites.support.planted import planted
from tests.review.conftest import Call
from tests.support.lane_files import declare_lanes

MADE = {"torch": "2.13.0", "triton": None}
HERE = {"lane": "cpu", "device": "cpu", "full_run": True, **MADE}
ACCEPT = ("rebaseline", "--lane", "cpu")
LEFT = "nothing written: what is named above stays as it is\n"
NOTHING = "nothing to accept: every measured row is within its tolerance\n"


@dataclass
class Repository:
    """A working directory for rebaseline; `call` runs a command there."""

    root: Path
    call: Call

    @property
    def path(self) -> Path:
        return self.root / "baselines" / "cpu.json"

    @property
    def rows(self) -> dict[str, Reviewed]:
        return {id.split("/")[1]: row for id, row in load(self.path, "cpu").rows.items()}

    @property
    def values(self) -> dict[str, object]:
        return {case: row.value for case, row in self.rows.items()}

    @property
    def tests(self) -> list[str] | None:
        """The reviewed set of the lane's tests; None without one."""
        path = self.path.with_suffix(".tests")
        return path.read_text().split() if path.exists() else None

    def review(self, made_with: Mapping[str, str | None] = MADE, **rows: Reviewed) -> None:
        """Write the baseline; rows by case."""
        save(self.path, Baseline("cpu", dict(made_with), {f"a/{case}/n": row for case, row in rows.items()}))

    def measure(
        self,
        *rows: Row | Judgement,
        complete: bool = True,
        tests: Mapping[str, str] | None = None,
        **provenance: object,
    ) -> None:
        """Write the record of a run that measured these rows, judged as in a session. tests: its census."""
        old = load(self.path, "cpu", missing_ok=True)
        judged = [r if isinstance(r, Judgement) else judge(r, old, failed_instruments={}) for r in rows]
        here = HERE | {"tree": measured_tree(self.root, self.root / "record.json")} | provenance
        write_record(self.root / "record.json", here, judged, complete=complete, tests=tests)

    def accept(self, *args: str) -> str:
        """Run rebaseline, which must succeed; return its output."""
        code, out, err = self.call(*ACCEPT, *args)
        assert (code, err) == (0, "")
        return out

    def refuse(self, *args: str) -> str:
        """Run rebaseline, which must refuse and write nothing; return the reasons."""
        before = self.path.read_bytes()
        code, out, err = self.call(*ACCEPT, *args)
        assert (code, out, self.path.read_bytes()) == (1, "", before)
        assert all(line.startswith("refused: ") for line in err.splitlines())
        return err


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> Repository:
    declare_lanes(tmp_path)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    return Repository(tmp_path, call)


def count(case: str, value: object, **changes: object) -> Row:
    fields: dict[str, object] = {"unit": "n", "witness": 1, "rule": "C1", "test": f"t.py::{case}"}
    return Row(f"a/{case}/n", value, **fields | changes)  # type: ignore[arg-type]


def timed(case: str, value: float, **changes: object) -> Row:
    return count(case, value, **{"better": "lower", "tolerance": 0.1} | changes)


def old(case: str, value: object, better: str = "exact", tolerance: float = 0.0, note: str = "") -> Reviewed:
    return Reviewed(value, "n", better, tolerance, note, f"t.py::{case}")  # type: ignore[arg-type]


def unreported(case: str, *, gone: bool) -> Judgement:
    return Judgement(Row(f"a/{case}/n", None, "n", 0, ""), Verdict.MISSING, "its test is gone", gone=gone)


def test_rebaseline_writes_only_rows_outside_tolerance(repository: Repository) -> None:
    noted = {
        "near": old("near", 100.0, "lower", 0.1, "hand-made"),
        "slow": old("slow", 100.0, "lower", 0.05, "mine"),
    }
    plain = {case: old(case, value) for case, value in (("same", 4), ("other", 5), ("unrun", 6))}
    repository.review(**noted, fast=old("fast", 100.0, "lower", 0.1), **plain)
    times = [timed("near", 109.0), timed("slow", 109.0), timed("fast", 50.0)]
    repository.measure(*times, count("same", 4), count("other", 7), count("new", 8))
    before = repository.rows
    out = repository.accept()
    after = repository.rows
    moved = {case: r.value for case, r in after.items() if before.get(case) != r}
    assert moved == {"slow": 109.0, "fast": 50.0, "other": 7, "new": 8}
    assert (after["slow"].tolerance, after["slow"].note) == (0.05, "mine"), "hand-edited"
    assert "a/fast/n   100 -> 50   -50.0 %  changed" in out
    assert "a/other/n  5 -> 7      +40.0 %  changed" in out
    assert "a/new/n    - -> 8               new" in out


def test_second_rebaseline_changes_nothing(repository: Repository) -> None:
    rows = [
        count("exact", "abc", per_build=True),
        count("flag", True),
        count("derived", 13, expected=13),
        timed("noisy", 5.0, interval=(4.9, 5.1), tolerance=0.05),
        timed("zero", 0),
        timed("rate", -3.0, better="higher"),
    ]
    repository.measure(*rows)
    repository.accept()
    text = repository.path.read_bytes()
    assert repository.accept() == NOTHING
    assert repository.path.read_bytes() == text
    repository.measure(*rows)
    assert {j.verdict for j in read_record(repository.root / "record.json").judgements} == {Verdict.PASS}


def test_only_takes_globs_and_dry_run_writes_nothing(repository: Repository) -> None:
    repository.review(**{name: old(name, 1) for name in "xyz"})
    repository.measure(*(count(name, 2) for name in "xyz"))
    text = repository.path.read_bytes()
    assert "a/x/n  1 -> 2" in repository.accept("--dry-run")
    assert repository.path.read_bytes() == text
    code, _, err = repository.call(*ACCEPT, "--only", "a/x/*", "--only", "b/*")
    assert (code, len(err.splitlines())) == (4, 1), "each must match"
    repository.accept("--only", "a/x/*", "--only", "a/z/*")
    assert repository.values == {"x": 2, "y": 1, "z": 2}


def test_refresh_takes_changes_within_tolerance(repository: Repository) -> None:
    repository.review(near=old("near", 100.0, "lower", 0.1, "mine"), other=old("other", 100.0, "lower", 0.1))
    repository.measure(timed("near", 109.0), timed("other", 109.0))
    assert repository.call(*ACCEPT, "--refresh")[0] == 4, "--refresh requires --only"
    near = ("--refresh", "--only", "a/near/*")
    assert "a/near/n  100 -> 109  +9.0 %  refreshed" in repository.accept(*near)
    assert (repository.values, repository.rows["near"].note) == ({"near": 109.0, "other": 100.0}, "mine")
    assert repository.accept(*near) == NOTHING


def test_rebaseline_follows_moved_test_and_changed_row_kind(repository: Repository) -> None:
    x, near = old("x", 1, note="keep"), old("near", 100, "lower", 0.1)
    repository.review(x=x, near=near, kind=old("kind", 100))
    moved = {"test": "t.py::moved"}
    repository.measure(count("x", 1, **moved), timed("near", 105, **moved), timed("kind", 100))
    assert "test moved" in repository.accept()
    # The values stay; the tolerance changes with the kind of row.
    expected = {
        "x": replace(x, **moved),
        "near": replace(near, **moved),
        "kind": old("kind", 100, "lower", 0.1),
    }
    assert repository.rows == expected


def test_prune_drops_removed_rows_and_keeps_crashed_ones(repository: Repository) -> None:
    repository.review(x=old("x", 1), gone=old("gone", 1), crashed=old("crashed", 1))
    repository.measure(count("x", 1), unreported("gone", gone=True), unreported("crashed", gone=False))
    crashed = "kept, not measured in this run: a/crashed/n (its test is gone)\n"
    kept = f"kept although nothing measures it: a/gone/n; drop with --prune\n{crashed}"
    assert repository.accept() == f"{kept}{LEFT}"
    assert "a/gone/n  1 -> -" in repository.accept("--prune")
    assert repository.rows.keys() == {"x", "crashed"}
    assert repository.accept("--prune") == f"{crashed}{LEFT}"
    repository.measure(count("x", 1), unreported("crashed", gone=False), full_run=False)
    part = f"{crashed[:-1]}; only a whole run can drop a row: pytest -m cpu\n"
    assert repository.accept() == f"{part}{LEFT}", "never just that there is nothing to accept"


def test_new_rows_are_accepted_by_the_command_that_the_run_prints(repository: Repository) -> None:
    """One line for all of them. The command works next to red rows, and next to a time that is not decided."""
    repository.review(x=old("x", 1))
    wide = timed("wide", 1.0, interval=(0.5, 1.5))
    for red in (
        [],
        [count("x", 2)],
        [count("x", 2, witness=0)],
        [unreported("x", gone=True)],
        [count("blind", 1, witness=0)],
    ):
        repository.measure(*red, wide, count("new", 3), *([] if red else [count("x", 1)]))
        shown = verdict_table(read_record(repository.root / "record.json"), "record.json")
        assert "NEW           2 rows measured and never reviewed\n" in shown
        printed = next(line for line in shown.splitlines() if "rebaseline" in line and "--only" not in line)
        before = repository.path.read_bytes()
        out = repository.accept(*printed.partition("--lane cpu")[2].split())
        assert "still new: a/wide/n (INCONCLUSIVE whatever the baseline holds" in out
        assert repository.values == {"x": 1, "new": 3}, red
        repository.path.write_bytes(before)
    repository.measure(count("new", 3), complete=False)
    assert "-> pytest -m cpu\n" in verdict_table(read_record(repository.root / "record.json"), "record.json")


def test_a_renamed_row_is_accepted_in_one_step(repository: Repository) -> None:
    """Its test reports one new row of the same value and kind; a row that may also be another one is kept."""
    tests = {"test": "t.py::one"}
    repository.review(
        was=old("was", 7),
        other=old("other", 3),
        one=replace(old("one", 5), **tests),
        two=replace(old("two", 5), **tests),
    )
    gone = [unreported(name, gone=True) for name in ("was", "other", "one", "two")]
    repository.measure(
        count("now", 7, test="t.py::was"),
        count("more", 4, test="t.py::other"),
        count("new", 5, **tests),
        *gone,
    )
    shown = repository.accept()
    assert "a/was/n   7 -> -    renamed to a/now/n" in shown
    assert "kept although nothing measures it: " in shown
    assert repository.rows.keys() == {"now", "more", "new", "other", "one", "two"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Judgement(count("x", 2), Verdict.INSTRUMENT, "canary read 0"), "INSTRUMENT: canary read 0"),
        (Judgement(count("x", 2), Verdict.INFRA, "disk full"), "INFRA: disk full"),
        (count("x", 2, witness=0), "the check saw nothing"),
        (count("x", None), "the instrument returned no value"),
        (count("x", 0, expected=13), "expected 13 (derived), measured 0"),
        (Judgement(count("x", 0, expected=13), Verdict.PASS, "doctored"), "expected 13 (derived)"),
        (count("x", 3.0, at_most=2.0), "expected at most 2.0"),
        (timed("x", math.nan), "not a finite number"),
        (timed("x", 1.08, interval=(0.8, 1.3)), "INCONCLUSIVE"),
        (timed("x", 1.12, interval=(1.08, 1.16)), "INCONCLUSIVE"),
    ],
    ids=lambda part: part if isinstance(part, str) else "row",
)
def test_rebaseline_refuses_unacceptable_rows(
    repository: Repository, row: Row | Judgement, words: str
) -> None:
    repository.review(x=old("x", 1, "lower", 0.1), y=old("y", 1))
    repository.measure(row, count("y", 2))
    assert words in repository.refuse()
    repository.accept("--only", "a/y/n")  # the other rows can be accepted alone


def test_rebaseline_refuses_unsuitable_record(repository: Repository) -> None:
    repository.review(x=old("x", 1))
    repository.measure(count("x", 2), lane="h200")
    assert "the record is of lane 'h200', not 'cpu'" in repository.refuse()
    repository.measure(count("x", 2), tree=None)
    assert "the record was measured from other sources" in repository.refuse()
    repository.measure(count("x", 2), full_run=False)
    assert "--prune needs the record of a whole run" in repository.refuse("--prune")
    repository.measure(count("x", 2), torch="2.14.0", full_run=False)
    assert "another build is adopted from a whole run" in repository.refuse()
    repository.measure(count("x", 2), complete=False)
    assert "NOT COMPLETE and measured 1 rows" in repository.refuse("--new")
    repository.accept("--only", "a/x/n", "--dry-run")
    repository.measure(count("x", 2), torch="2.14.0")
    assert "without --only" in repository.refuse("--only", "a/x/n")
    assert "made_with torch" in repository.accept()
    assert load(repository.path, "cpu").made_with["torch"] == "2.14.0"


def test_rebaseline_takes_new_build_but_not_new_machine(repository: Repository) -> None:
    repository.review({**MADE, "cpu": "EPYC"}, x=old("x", 1))
    repository.measure(count("x", 1), cpu="Xeon")
    assert repository.accept() == NOTHING
    repository.measure(count("x", 1), cpu="Xeon", triton="3.8.0")
    repository.accept()
    unknown = dict.fromkeys(("torch_git", "python", "wheel_set", "driver", "cores"))
    known = {"torch": "2.13.0", "triton": "3.8.0", "device": "cpu", "cpu": "Xeon"}
    assert load(repository.path, "cpu").made_with == unknown | known


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "name a command"),
        (("bisecct",), "bisecct"),
        (("rebaseline",), "--lane"),
        (("rebaseline", "--lane", "tpu"), "unknown lane 'tpu'; lanes: cpu, h100, h100x4"),
        ((*ACCEPT, "--record", "none.json"), "none.json: cannot be read"),
        ((*ACCEPT, "--frob"), "--frob"),
    ],
    ids=str,
)
def test_bad_arguments_are_one_line_and_exit_4(
    repository: Repository, args: tuple[str, ...], words: str
) -> None:
    code, out, err = repository.call(*args)
    assert (code, out, len(err.splitlines()), words in err) == (4, "", 1, True), err


def test_broken_files_and_folders_are_one_line_and_exit_4(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(words: str) -> str:
        """The command ends with 4 and one line; return its output."""
        code, out, err = repository.call(*ACCEPT)
        assert (code, len(err.splitlines()), words in err) == (4, 1, True), err
        return out

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device", str(target))

    repository.measure(count("x", 2))
    repository.path.parent.write_text("a file where the folder belongs")
    assert fails("baselines/cpu.json: cannot be read") == ""
    repository.path.parent.unlink()
    repository.review(x=old("x", 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        fails("No space left on device")
        # A fault of bumpgate itself is no verdict: Python would end with 1, the exit code of a refusal.
        patch.setattr(os, "replace", lambda source, target: {}[source])
        code, _, err = repository.call(*ACCEPT)
        assert (code, "Traceback" in err) == (125, True)
        assert "a bug in bumpgate, and there is no verdict: report it" in err
        patch.setenv("BUMPGATE_GATE", "1")
        assert fails("never runs inside a gate") == ""
    repository.path.write_text("{")
    assert fails("git checkout baselines/cpu.json") == ""
    monkeypatch.chdir("/")
    assert fails("run inside the repository") == ""


def test_times_of_a_host_leave_unreviewed_paired_rows_out() -> None:
    """Sessions compare a paired row on each host: its value there is no review."""
    old = Baseline("cpu", dict(MADE), {"a/x/n": Reviewed(1.0, "s", "lower", 0.1, test="t.py::x")})
    rows = timed("x", 2.0, unit="s"), timed("y", 3.0, unit="s", paired=True)
    found = tuple(judge(made, old, failed_instruments={}) for made in rows)
    new, _ = plan_times(Record(HERE, found, sealed=True), old)
    assert {id: row.value for id, row in new.rows.items()} == {"a/x/n": 2.0}


def test_help_and_version_are_printed(call: Call) -> None:
    code, out, _ = call("rebaseline", "--help")
    assert (code, "Exit codes: 0 done" in out) == (0, True)
    assert call("--version")[:2] == (0, f"bumpgate {bumpgate.__version__}\n")


def test_terminal_table_has_colour_and_complete_text(repository: Repository) -> None:
    repository.review(x=old("x", 1))
    long = "z" * 150
    repository.measure(count("x", long), count("y", 1, expected=2))
    record = read_record(repository.root / "record.json")
    shown, plain = verdict_table(record, "record.json", terminal=True), verdict_table(record, "record.json")
    assert ("\x1b[" in shown, "\x1b[" in plain) == (True, False)
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == plain, "no command is broken"
    assert long in plain
    assert max(map(cell_len, plain.splitlines())) > 150
    assert shown.endswith(summary(record))
    assert plain.endswith("cpu: 2 rows: 1 CHANGED, 1 REGRESSION; device cpu; torch 2.13.0; 0 s")


@planted("C39", "a run that could not import torch becomes a baseline without rows")
def test_run_that_measured_nothing_is_refused(repository: Repository) -> None:
    calibration = replace(timed("x", 5e9), id="calibration/memory/bytes_per_second", unit="bytes/s")
    for rows in ([], [calibration]):
        repository.measure(*rows, complete=False)
        code, out, err = repository.call(*ACCEPT)
        assert (code, out) == (1, "")
        assert err.startswith("refused: the run is NOT COMPLETE and measured no row: correct what ended it,")
        assert not repository.path.exists()


ACCEPTANCE = ("--lane", "cpu", "--owner", "me", "--reason", "x", "--expires", f"{today() + timedelta(9)}")


@planted("C39", "a record is edited, and then accepted")
@pytest.mark.parametrize("command", [ACCEPT, ("accept", "a/x/n", *ACCEPTANCE)], ids=lambda words: words[0])
def test_edited_record_is_neither_baseline_nor_acceptance(
    repository: Repository, command: tuple[str, ...]
) -> None:
    repository.review(x=old("x", 100, "lower", 0.1))
    before = repository.path.read_bytes()
    repository.measure(timed("x", 200))
    path = repository.root / "record.json"
    raw = json.loads(path.read_text())
    unsealed = {name: value for name, value in raw.items() if name != "digest"}
    incomplete = raw | {"complete": "no"}
    edits: dict[str, dict[str, Any]] = {
        "was edited after the run wrote it": raw | {"rows": [{**raw["rows"][0], "reason": "fine"}]},
        "has no digest of itself, so it may have been edited": unsealed,
        "complete must be true or false, got 'no'": incomplete | {"digest": digest_of(incomplete)},
    }
    for words, made in edits.items():
        path.write_text(json.dumps(made))
        code, out, err = repository.call(*command, "--other-tree")
        assert (code in (1, 4), out, len(err.splitlines()), words in err) == (True, "", 1, True), err
    assert repository.path.read_bytes() == before
    assert not (repository.root / "baselines/accepted.toml").exists()


def test_tests_of_a_whole_run_become_the_reviewed_set(repository: Repository) -> None:
    """Without rows, too; a part of the lane adds to the set, and only --prune drops what a whole run lacks."""
    first = {"t.py::x": "passed", "t.py::plain": "passed", "t.py::old": "skipped", "t.py::no": "deselected"}
    repository.measure(count("x", 1), tests=first, full_run=False)
    repository.accept()
    assert repository.tests is None, "the first set is that of a whole run"
    repository.measure(count("x", 1), tests=first)
    out = repository.accept()
    assert "tests       3 new: t.py::old, t.py::plain, t.py::x\n" in out
    assert out.endswith("wrote baselines/cpu.tests; review it with: git diff baselines/cpu.tests\n")
    assert repository.tests == ["t.py::old", "t.py::plain", "t.py::x"]
    repository.measure(count("x", 1), tests={"t.py::x": "passed", "t.py::new": "passed"})
    kept = "kept although nothing measures it: t.py::old, t.py::plain; drop with --prune\n"
    assert repository.accept().startswith(f"tests       1 new: t.py::new\n{kept}")
    every = ["t.py::new", "t.py::old", "t.py::plain", "t.py::x"]
    assert repository.tests == every
    assert repository.accept() == f"{kept}{LEFT}"
    repository.accept("--only", "a/x/n", "--dry-run")
    assert repository.tests == every
    assert "tests       2 gone: t.py::old, t.py::plain\n" in repository.accept("--prune")
    assert repository.tests == ["t.py::new", "t.py::x"]


@planted("C39", "two commands rewrite one baseline, or one list of acceptances, at once")
def test_commands_at_once_lose_nothing(repository: Repository) -> None:
    names = ("x", "y", "z")
    repository.review(**{name: old(name, 1) for name in names})
    repository.measure(*(count(name, 2) for name in names))
    program = (sys.executable, "-c", "from bumpgate.cli import main; main()")
    lines = [("accept", f"a/{name}/n", *ACCEPTANCE) for name in names]
    lines += [(*ACCEPT, "--only", f"a/{name}/n") for name in names]
    started = [
        subprocess.Popen([*program, *line, "--other-tree"], stdout=subprocess.DEVNULL) for line in lines
    ]
    assert [each.wait(120) for each in started] == [0] * 6
    assert repository.values == dict.fromkeys(names, 2)
    assert len(accepted.load(repository.root / "baselines/accepted.toml")) == 3


def test_compiled_code_keeps_the_counts_of_other_tritons() -> None:
    """Also a kernel that this triton compiles in another way, or does not launch."""
    values = {"3.6.0": "registers=1 spills=0", "3.7.1": "registers=2 spills=0"}
    reviewed = Reviewed(None, "counts", "code", test="t.py::k", values=values)
    made_with = {"torch": "2.13.0", "triton": "3.7.1"}
    lost = Row("a/k/code", None, "counts", 0, "", better="code", test="t.py::k")
    missing = Judgement(lost, Verdict.MISSING, "no longer", gone=True)
    record = Record(HERE | made_with, (missing,), sealed=True)
    old = Baseline("cpu", made_with, {"a/k/code": reviewed})
    new, _ = plan(record, old, prune=True)
    assert dict(new.rows["a/k/code"].values) == {"3.6.0": "registers=1 spills=0"}
    moved = replace(lost, value="registers=3 spills=0", witness=1, rule="C1")
    found = judge(moved, old, failed_instruments={}, build=made_with)
    new, _ = plan(replace(record, judgements=(found,)), old)
    assert dict(new.rows["a/k/code"].values) == values | {"3.7.1": "registers=3 spills=0"}
