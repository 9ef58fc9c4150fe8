"""`bumpgate rebaseline`: what it accepts and refuses, and that every error of a command is one line."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from bumpgate import cli
from bumpgate.core.baseline import Baseline, Reviewed, judge, load, save
from bumpgate.core.rows import Judgement, Row, Verdict, read_record, write_record
from bumpgate.process.tree_digest import measured_tree
from bumpgate.table import summary, verdict_table
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

    def measure(self, *rows: Row | Judgement, complete: bool = True, **provenance: object) -> None:
        """Write the record of a run that measured these rows, judged as in a session."""
        old = load(self.path, "cpu", missing_ok=True)
        judged = [r if isinstance(r, Judgement) else judge(r, old, failed_instruments={}) for r in rows]
        here = HERE | {"tree": measured_tree(self.root, self.root / "record.json")} | provenance
        write_record(self.root / "record.json", here, judged, complete=complete)


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
    assert "a/fast/n   100 -> 50   -50.0 %  win" in out
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
    repository.review(x=old("x", 1, note="keep"), kind=old("kind", 100))
    repository.measure(count("x", 1, test="t.py::moved"), timed("kind", 100))
    code, out, _ = repository.run(*ACCEPT)
    assert (code, "test moved" in out) == (0, True)
    assert repository.rows["a/x/n"] == replace(old("x", 1, note="keep"), test="t.py::moved")
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
        (("rebaseline", "--lane", "tpu"), "unknown lane 'tpu'; lanes: cpu, h200, h200x2, v6e"),
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
