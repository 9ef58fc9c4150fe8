"""`bumpgate rebaseline`: what it accepts and refuses, and that every error of a command is one line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from bumpgate import cli
from bumpgate.core import accepted
from bumpgate.core.accepted import today
from bumpgate.core.baseline import Baseline, Reviewed, judge, load, save
from bumpgate.core.rows import Judgement, Record, Row, Verdict, digest_of, read_record, write_record
from bumpgate.process.tree_digest import measured_tree
from bumpgate.review.rebaseline import plan
from bumpgate.table import summary, verdict_table
from suites.support.planted import planted
from tests.support.lane_files import declare_lanes

HERE = {"lane": "cpu", "torch": "2.13.0", "triton": None, "device": "cpu", "full_run": True}


@dataclass
class Repository:
    """A working directory for rebaseline. `run` calls the command there -> exit code, stdout, stderr."""

    root: Path
    run: Callable[..., tuple[int, str, str]]

    @property
    def path(self) -> Path:
        return self.root / "baselines" / "cpu.json"

    @property
    def rows(self) -> dict[str, Reviewed]:
        return dict(load(self.path, "cpu").rows)

    def review(self, made_with: dict[str, str | None] | None = None, **rows: Reviewed) -> None:
        """Write the baseline; rows by case."""
        made_with = made_with or {"torch": "2.13.0", "triton": None}
        save(self.path, Baseline("cpu", made_with, {f"a/{case}/n": row for case, row in rows.items()}))

    @property
    def tests(self) -> list[str] | None:
        """The reviewed set of the lane's tests; None without one."""
        path = self.path.with_suffix(".tests")
        return path.read_text().split() if path.exists() else None

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


@pytest.fixture
def repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Repository:
    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bumpgate", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    declare_lanes(tmp_path)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    monkeypatch.delenv("BUMPGATE_GATE", raising=False)
    return Repository(tmp_path, run)


def count(case: str, value: object, **changes: object) -> Row:
    fields: dict[str, object] = {"unit": "n", "witness": 1, "rule": "C1", "test": f"t.py::{case}"}
    return Row(f"a/{case}/n", value, **fields | changes)  # type: ignore[arg-type]


def timed(case: str, value: float, **changes: object) -> Row:
    return count(case, value, **{"better": "lower", "tolerance": 0.1} | changes)


def old(case: str, value: object, better: str = "exact", tolerance: float = 0.0, note: str = "") -> Reviewed:
    return Reviewed(value, "n", better, tolerance, note, f"t.py::{case}")  # type: ignore[arg-type]


ACCEPT = ("rebaseline", "--lane", "cpu")


def test_rebaseline_writes_only_rows_outside_tolerance(repository: Repository) -> None:
    repository.review(
        near=old("near", 100.0, "lower", 0.1, "hand-made"),
        slow=old("slow", 100.0, "lower", 0.05, "mine"),
        fast=old("fast", 100.0, "lower", 0.1),
        same=old("same", 4),
        other=old("other", 5),
        unrun=old("unrun", 6),
    )
    repository.measure(
        timed("near", 109.0),
        timed("slow", 109.0),
        timed("fast", 50.0),
        count("same", 4),
        count("other", 7),
        count("new", 8),
    )
    before = repository.rows
    code, out, err = repository.run(*ACCEPT)
    assert (code, err) == (0, "")
    after = repository.rows
    assert {id: r.value for id, r in after.items() if before.get(id) != r} == {
        "a/slow/n": 109.0,
        "a/fast/n": 50.0,
        "a/other/n": 7,
        "a/new/n": 8,
    }
    assert (after["a/slow/n"].tolerance, after["a/slow/n"].note) == (0.05, "mine"), "hand-edited"
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
    assert repository.run(*ACCEPT)[0] == 0
    text = repository.path.read_bytes()
    code, out, _ = repository.run(*ACCEPT)
    assert (code, repository.path.read_bytes()) == (0, text)
    assert "nothing to accept" in out
    repository.measure(*rows)
    assert {j.verdict for j in read_record(repository.root / "record.json").judgements} == {Verdict.PASS}


def test_only_takes_a_glob_and_dry_run_writes_nothing(repository: Repository) -> None:
    repository.review(x=old("x", 1), y=old("y", 1))
    repository.measure(count("x", 2), count("y", 2))
    text = repository.path.read_bytes()
    code, out, _ = repository.run(*ACCEPT, "--dry-run")
    assert (code, repository.path.read_bytes()) == (0, text)
    assert "a/x/n  1 -> 2" in out
    assert repository.run(*ACCEPT, "--only", "a/x/*")[0] == 0
    assert [r.value for r in repository.rows.values()] == [2, 1]
    code, _, err = repository.run(*ACCEPT, "--only", "b/*")
    assert (code, len(err.splitlines())) == (4, 1)


def test_only_may_be_repeated(repository: Repository) -> None:
    repository.review(**{name: old(name, 1) for name in "xyz"})
    repository.measure(*(count(name, 2) for name in "xyz"))
    code, _, err = repository.run(*ACCEPT, "--only", "a/x/*", "--only", "b/*")
    assert (code, len(err.splitlines())) == (4, 1), "each must match"
    assert repository.run(*ACCEPT, "--only", "a/x/*", "--only", "a/z/*")[0] == 0
    assert [r.value for r in repository.rows.values()] == [2, 1, 2]


def test_refresh_takes_changes_within_tolerance(repository: Repository) -> None:
    repository.review(near=old("near", 100.0, "lower", 0.1, "mine"), other=old("other", 100.0, "lower", 0.1))
    repository.measure(timed("near", 109.0), timed("other", 109.0))
    assert repository.run(*ACCEPT, "--refresh")[0] == 4, "--refresh requires --only"
    code, out, _ = repository.run(*ACCEPT, "--refresh", "--only", "a/near/*")
    assert (code, "a/near/n  100 -> 109  +9.0 %  refreshed" in out) == (0, True), out
    assert {id: (r.value, r.note) for id, r in repository.rows.items()} == {
        "a/near/n": (109.0, "mine"),
        "a/other/n": (100.0, ""),
    }
    assert "nothing to accept" in repository.run(*ACCEPT, "--refresh", "--only", "a/near/*")[1]


def test_rebaseline_follows_moved_test_and_changed_row_kind(repository: Repository) -> None:
    repository.review(x=old("x", 1, note="keep"), near=old("near", 100, "lower", 0.1), kind=old("kind", 100))
    moved = {"test": "t.py::moved"}
    repository.measure(count("x", 1, **moved), timed("near", 105, **moved), timed("kind", 100))
    code, out, _ = repository.run(*ACCEPT)
    assert (code, "test moved" in out) == (0, True)
    assert repository.rows["a/x/n"] == replace(old("x", 1, note="keep"), test="t.py::moved")
    assert repository.rows["a/near/n"] == replace(old("near", 100, "lower", 0.1), **moved), "a value stays"
    assert repository.rows["a/kind/n"] == old("kind", 100, "lower", 0.1), (
        "the tolerance changes with the kind of row"
    )


def unreported(case: str, *, gone: bool) -> Judgement:
    return Judgement(Row(f"a/{case}/n", None, "n", 0, ""), Verdict.MISSING, "its test is gone", gone=gone)


def test_prune_drops_removed_rows_and_keeps_crashed_ones(repository: Repository) -> None:
    repository.review(x=old("x", 1), gone=old("gone", 1), crashed=old("crashed", 1))
    found = (count("x", 1), unreported("gone", gone=True), unreported("crashed", gone=False))
    repository.measure(*found)
    assert "nothing to accept" in repository.run(*ACCEPT)[1]
    code, out, _ = repository.run(*ACCEPT, "--prune")
    assert (code, "a/gone/n  1 -> -" in out) == (0, True)
    assert repository.rows.keys() == {"a/x/n", "a/crashed/n"}
    assert "nothing to accept" in repository.run(*ACCEPT, "--prune")[1]


def refused(repository: Repository, *args: str) -> str:
    """Assert exit 1 and that nothing is written; return the reasons on stderr."""
    before = repository.path.read_bytes()
    code, out, err = repository.run(*ACCEPT, *args)
    assert (code, out, repository.path.read_bytes()) == (1, "", before)
    assert all(line.startswith("refused: ") for line in err.splitlines())
    return err


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
        (timed("new", 1.0, interval=(0.5, 1.5)), "INCONCLUSIVE whatever the baseline holds"),
    ],
    ids=lambda part: part if isinstance(part, str) else "row",
)
def test_rebaseline_refuses_unacceptable_rows(
    repository: Repository, row: Row | Judgement, words: str
) -> None:
    repository.review(x=old("x", 1, "lower", 0.1), y=old("y", 1))
    repository.measure(row, count("y", 2))
    assert words in refused(repository)
    assert repository.run(*ACCEPT, "--only", "a/y/n")[0] == 0, "the other rows can be accepted alone"


def test_rebaseline_refuses_unsuitable_record(repository: Repository) -> None:
    repository.review(x=old("x", 1))
    repository.measure(count("x", 2), lane="h200")
    assert "the record is of lane 'h200', not 'cpu'" in refused(repository)
    for part in ({"full_run": False}, {"complete": False}):
        repository.measure(count("x", 2), **part)  # type: ignore[arg-type]
        assert "--prune needs the record of a whole run" in refused(repository, "--prune")
        repository.measure(count("x", 2), torch="2.14.0", **part)  # type: ignore[arg-type]
        assert "another build is adopted from a whole run" in refused(repository)
    repository.measure(count("x", 2), torch="2.14.0")
    assert "without --only" in refused(repository, "--only", "a/x/n")
    code, out, _ = repository.run(*ACCEPT)
    assert (code, "made_with torch" in out) == (0, True)
    assert load(repository.path, "cpu").made_with["torch"] == "2.14.0"


def test_rebaseline_takes_new_build_but_not_new_machine(repository: Repository) -> None:
    repository.review({"torch": "2.13.0", "triton": None, "cpu": "EPYC"}, x=old("x", 1))
    repository.measure(count("x", 1), cpu="Xeon")
    assert "nothing to accept" in repository.run(*ACCEPT)[1]
    repository.measure(count("x", 1), cpu="Xeon", triton="3.8.0")
    assert repository.run(*ACCEPT)[0] == 0
    assert load(repository.path, "cpu").made_with == dict.fromkeys(
        ("torch_git", "python", "wheel_set", "driver", "cores")
    ) | {"torch": "2.13.0", "triton": "3.8.0", "device": "cpu", "cpu": "Xeon"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "name a command"),
        (("bisecct",), "bisecct"),
        (("rebaseline",), "--lane"),
        (("rebaseline", "--lane", "tpu"), "unknown lane 'tpu'; lanes: cpu, h100, h200, h200x2, v6e"),
        ((*ACCEPT, "--record", "none.json"), "none.json: cannot be read"),
        ((*ACCEPT, "--frob"), "--frob"),
    ],
    ids=str,
)
def test_bad_arguments_are_one_line_and_exit_4(
    repository: Repository, args: tuple[str, ...], words: str
) -> None:
    code, out, err = repository.run(*args)
    assert (code, out, len(err.splitlines())) == (4, "", 1)
    assert words in err


def test_broken_files_and_folders_are_one_line_and_exit_4(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(words: str) -> None:
        code, out, err = repository.run(*ACCEPT)
        assert (code, out, len(err.splitlines())) == (4, "", 1), err
        assert words in err

    repository.measure(count("x", 1))
    repository.path.parent.write_text("a file where the folder belongs")
    fails("baselines/cpu.json: cannot be read")
    repository.path.parent.unlink()
    repository.review(x=old("x", 1))
    repository.path.write_text("{")
    fails("git checkout baselines/cpu.json")
    monkeypatch.setenv("BUMPGATE_GATE", "1")
    fails("never runs inside a gate")
    monkeypatch.delenv("BUMPGATE_GATE")
    monkeypatch.chdir("/")
    fails("run inside the repository")


def test_help_and_version_are_printed(repository: Repository) -> None:
    code, out, _ = repository.run("rebaseline", "--help")
    assert code == 0
    assert "Exit codes: 0 done" in out
    assert repository.run("--version")[:2] == (0, f"bumpgate {cli._version()}\n")


def test_terminal_table_has_colour_and_complete_text(repository: Repository) -> None:
    repository.review(x=old("x", 1))
    long = "z" * 150
    repository.measure(count("x", long), count("y", 1, expected=2))
    record = read_record(repository.root / "record.json")
    shown = verdict_table(record, "record.json", terminal=60)
    assert "\x1b[" in shown
    assert shown.replace("\n", "").count("z") >= 150
    plain = verdict_table(record, "record.json")
    assert "\x1b[" not in plain
    assert long in plain
    assert max(map(cell_len, plain.splitlines())) > 150
    assert shown.endswith(summary(record))
    assert plain.endswith("cpu: 2 rows: 1 CHANGED, 1 REGRESSION; device cpu; torch 2.13.0; 0 s")


def test_unwritable_baseline_is_one_line(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.review(x=old("x", 1))
    repository.measure(count("x", 2))

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(os, "replace", full)
    code, _, err = repository.run(*ACCEPT)
    assert (code, len(err.splitlines())) == (4, 1)
    assert "No space left on device" in err


def test_fault_of_bumpgate_itself_is_no_verdict(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would end with 1, the exit code of HOLD and of a refusal."""
    repository.review(x=old("x", 1))
    repository.measure(count("x", 2))
    monkeypatch.setattr(os, "replace", lambda source, target: {}[source])
    code, _, err = repository.run(*ACCEPT)
    assert code == 125
    assert "Traceback" in err
    assert "a bug in bumpgate, and there is no verdict: report it" in err


@planted("C39", "a run that could not import torch becomes a baseline without rows")
def test_run_that_measured_nothing_is_refused(repository: Repository) -> None:
    calibration = replace(timed("x", 5e9), id="calibration/memory/bytes_per_second", unit="bytes/s")
    for rows in ([], [calibration]):
        repository.measure(*rows, complete=False)
        code, out, err = repository.run(*ACCEPT)
        assert (code, out) == (1, "")
        assert err.startswith("refused: the run is NOT COMPLETE and measured no row: correct what ended it,")
        assert not repository.path.exists()


@planted("C39", "a record is edited, and then accepted")
@pytest.mark.parametrize(
    "command", [ACCEPT, ("accept", "a/x/n", "--lane", "cpu", "--owner", "me", "--reason", "x")]
)
def test_edited_record_is_neither_baseline_nor_acceptance(
    repository: Repository, command: tuple[str, ...]
) -> None:
    more = (
        ("--expires", f"{today() + timedelta(9)}", "--other-tree") if command != ACCEPT else ("--other-tree",)
    )
    repository.review(x=old("x", 100, "lower", 0.1))
    before = repository.path.read_bytes()
    repository.measure(timed("x", 200))
    path = repository.root / "record.json"
    raw = json.loads(path.read_text())
    edits: dict[str, dict[str, Any]] = {
        "was edited after the run wrote it": raw | {"rows": [{**raw["rows"][0], "reason": "fine"}]},
        "has no digest of itself, so it may have been edited": {
            k: v for k, v in raw.items() if k != "digest"
        },
        "complete must be true or false, got 'no'": {**raw, "complete": "no", "digest": None},
    }
    for words, made in edits.items():
        made = made | {"digest": digest_of(made)} if made.get("digest", "") is None else made
        path.write_text(json.dumps(made))
        code, out, err = repository.run(*command, *more)
        assert (code in (1, 4), out, len(err.splitlines())) == (True, "", 1), err
        assert words in err
    assert repository.path.read_bytes() == before
    assert not (repository.root / "baselines/accepted.toml").exists()


def test_tests_of_a_whole_run_become_the_reviewed_set(repository: Repository) -> None:
    """Without rows, too; a part of the lane adds to the set, and only --prune drops what a whole run lacks."""
    first = {"t.py::x": "passed", "t.py::plain": "passed", "t.py::old": "skipped", "t.py::no": "deselected"}
    repository.measure(count("x", 1), tests=first, full_run=False)
    assert repository.run(*ACCEPT)[0] == 0
    assert repository.tests is None, "the first set is that of a whole run"
    repository.measure(count("x", 1), tests=first)
    code, out, _ = repository.run(*ACCEPT)
    assert "tests       3 new: t.py::old, t.py::plain, t.py::x\n" in out
    assert out.endswith("wrote baselines/cpu.tests; review it with: git diff baselines/cpu.tests\n")
    assert (code, repository.tests) == (0, ["t.py::old", "t.py::plain", "t.py::x"])
    repository.measure(count("x", 1), tests={"t.py::x": "passed", "t.py::new": "passed"})
    _, out, _ = repository.run(*ACCEPT)
    words = "kept although nothing measures it: t.py::old, t.py::plain; drop with --prune\n"
    assert ("tests       1 new: t.py::new\n" in out, words in out) == (True, True), out
    assert repository.tests == ["t.py::new", "t.py::old", "t.py::plain", "t.py::x"]
    _, out, _ = repository.run(*ACCEPT)
    assert out == f"{words}nothing to accept: every measured row is within its tolerance\n"
    before = repository.tests
    assert repository.run(*ACCEPT, "--only", "a/x/n", "--dry-run")[0] == 0
    _, out, _ = repository.run(*ACCEPT, "--prune")
    assert "tests       2 gone: t.py::old, t.py::plain\n" in out
    assert (before, repository.tests) == (
        ["t.py::new", "t.py::old", "t.py::plain", "t.py::x"],
        ["t.py::new", "t.py::x"],
    )


def test_row_that_nothing_measures_is_named_with_the_way_out(repository: Repository) -> None:
    repository.review(x=old("x", 1), y=old("y", 1))
    gone = Judgement(
        Row("a/y/n", None, "n", 0, "", test="t.py::y"), Verdict.MISSING, "not reported", gone=True
    )
    repository.measure(count("x", 1), gone)
    _, out, _ = repository.run(*ACCEPT)
    assert out.startswith("kept although nothing measures it: a/y/n; drop with --prune\n")
    assert repository.run(*ACCEPT, "--prune")[0] == 0
    assert repository.rows.keys() == {"a/x/n"}


@planted("C39", "two commands rewrite one baseline, or one list of acceptances, at once")
def test_commands_at_once_lose_nothing(repository: Repository) -> None:
    names = ("x", "y", "z")
    repository.review(**{name: old(name, 1) for name in names})
    repository.measure(*(count(name, 2) for name in names))
    accept = ("--lane", "cpu", "--owner", "me", "--reason", "x", "--expires", str(today()), "--other-tree")
    for commands, written in (
        ([("accept", f"a/{name}/n", *accept) for name in names], lambda: len(load_accepted(repository))),
        (
            [("rebaseline", "--lane", "cpu", "--only", f"a/{name}/n", "--other-tree") for name in names],
            lambda: sum(row.value == 2 for row in repository.rows.values()),
        ),
    ):
        program = "from bumpgate.cli import main; main()"
        started = [
            subprocess.Popen([sys.executable, "-c", program, *line], stdout=subprocess.DEVNULL)
            for line in commands
        ]
        assert [each.wait(120) for each in started] == [0, 0, 0]
        assert written() == 3


def load_accepted(repository: Repository) -> tuple[accepted.Acceptance, ...]:
    return accepted.load(repository.root / "baselines/accepted.toml")


def test_prune_of_compiled_code_keeps_other_tritons() -> None:
    """A kernel that this triton does not launch has its counts for the others."""
    values = {"3.6.0": "registers=1 spills=0", "3.7.1": "registers=2 spills=0"}
    reviewed = Reviewed(None, "counts", "code", test="t.py::k", values=values)
    made_with = {"torch": "2.13.0", "triton": "3.7.1"}
    lost = Row("a/k/code", None, "counts", 0, "", better="code", test="t.py::k")
    record = Record(
        HERE | made_with, (Judgement(lost, Verdict.MISSING, "no longer", gone=True),), sealed=True
    )
    new, _ = plan(record, Baseline("cpu", made_with, {"a/k/code": reviewed}), prune=True)
    assert dict(new.rows["a/k/code"].values) == {"3.6.0": "registers=1 spills=0"}
