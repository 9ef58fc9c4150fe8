"""`bumpgate accept`: its output file, what cannot be accepted, and that every refusal is one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from bumpgate import cli
from bumpgate.core import accepted
from bumpgate.core.baseline import Baseline, Reviewed, judge, save
from bumpgate.core.errors import RefusedError
from bumpgate.core.findings import TimedOutcome
from bumpgate.core.gate_file import Paired
from bumpgate.core.rows import Record, write_record
from bumpgate.gate.verdict import Side
from bumpgate.process.tree_digest import bind, measured_tree
from bumpgate.review import accept
from tests.support.gate_files import gate_of
from tests.support.lane_files import declare_lanes
from tests.support.reports import HERE, paired, row, write_gate

SECONDS = "throughput/nam52-regional/seconds"


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """A repository whose record has a changed count, a correct row, a broken instrument and an unreviewed row."""

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bumpgate", "accept", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    monkeypatch.delenv("BUMPGATE_GATE", raising=False)
    declare_lanes(tmp_path)
    monkeypatch.chdir(tmp_path)
    reviewed = Baseline(
        "cpu", {}, {f"a/{n}/n": Reviewed(13, "count", "derived" if n == "e" else "exact") for n in "bcde"}
    )
    save(tmp_path / "baselines" / "cpu.json", reviewed)
    measured = {"b": 17, "c": 13, "d": 17, "f": 17}
    failed = {"graphs": "read 2, knows 1"}
    found = [
        judge(
            row(f"a/{n}/n", v, instruments=("graphs",) if n == "d" else ()),
            reviewed,
            failed_instruments=failed,
        )
        for n, v in measured.items()
    ]
    found.append(judge(row("a/e/n", 17, expected=13, better="derived"), reviewed, failed_instruments={}))
    here = HERE | {"tree": measured_tree(tmp_path, tmp_path / "record.json")}
    write_record(tmp_path / "record.json", here, found)
    return call


WHO = ("--lane", "cpu", "--owner", "ada", "--reason", "fixed in 2.14.1")
SOON = ("--expires", str(accepted.today() + timedelta(30)))


def test_accept_writes_one_entry_per_row_and_value(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("a/b/n", *WHO, *SOON)
    assert code == 0
    assert out == (
        f"accepted a/b/n 17 for ada, until {SOON[1]}: fixed in 2.14.1\n"
        "wrote baselines/accepted.toml; review it with: git diff baselines/accepted.toml\n"
    )
    path = Path("baselines/accepted.toml")
    (made,) = accepted.load(path)
    assert (made.value, made.since) == (17, accepted.today())
    assert run("a/b/n", *WHO[:3], "bob", *WHO[4:], *SOON)[0] == 0
    (again,) = accepted.load(path)
    assert again.owner == "bob", "a later entry for the same row and value replaces the earlier one"
    assert run("a/b/n", "--lane", "cpu", "--remove")[0] == 0
    assert accepted.load(path) == ()
    code, _, err = run("a/b/n", "--lane", "cpu", "--remove")
    assert (code, err) == (
        4,
        "bumpgate: no acceptance of a/b/n on lane cpu; baselines/accepted.toml lists them\n",
    )


def test_accept_takes_candidate_values_and_ratios_of_a_gate(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    folder = tmp_path / "gate"
    folder.mkdir()
    reviewed = Baseline("cpu", {}, {"a/b/n": Reviewed(13, "count", "exact")})
    sides = [
        Side(f"torch 2.{n}.0", Record(HERE, (judge(row("a/b/n", v), reviewed, failed_instruments={}),)))
        for n, v in ((13, 13), (14, 19))
    ]
    timed = {SECONDS: paired(TimedOutcome.SLOWER, 1.061), "t/b/s": paired(TimedOutcome.SAME, 1.0)}
    path, _ = write_gate(folder, *sides, timed, binding=bind(tmp_path, folder))
    where = ("--record", str(path))
    assert run("a/b/n", *WHO, *SOON, *where)[0] == 0
    assert run(SECONDS, *WHO, *SOON, *where)[0] == 0
    first, second = accepted.load(Path("baselines/accepted.toml"))
    assert first.value == 19
    assert (second.row, second.ratio) == (SECONDS, pytest.approx(1.061))
    code, _, err = run("t/b/s", *WHO, *SOON, *where)
    assert (code, err) == (1, "refused: t/b/s: the paired sessions read SAME: nothing to accept\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "notes.txt").write_text("a document is not measured")
    assert run("a/b/n", *WHO, *SOON, *where)[0] == 0
    (tmp_path / "helper.py").write_text("X = 1\n")
    code, _, err = run("a/b/n", *WHO, *SOON, *where)
    assert (code, err) == (
        1,
        f"refused: {path} was measured from other sources (tree: helper.py) than these: gate again, or take it as it"
        " is with --other-tree\n",
    )
    assert run("a/b/n", *WHO, *SOON, *where, "--other-tree")[0] == 0
    raw = json.loads(path.read_text())
    raw["timed"][SECONDS]["ratio"] = 1.9
    path.write_text(json.dumps(raw))
    code, _, err = run(SECONDS, *WHO, *SOON, *where, "--other-tree")
    assert (code, len(err.splitlines()), "(other timed): gate again" in err) == (4, 1, True), err


@pytest.mark.parametrize(
    ("outcome", "drift", "ratio"),
    [("SLOWER", None, 1.06), ("SLOWER", 1.08, 1.08), ("SLOWER", 1.02, 1.06), ("SAME", 1.08, 1.08)],
)
def test_larger_of_slowdown_and_drift_is_accepted(outcome: str, drift: float | None, ratio: float) -> None:
    made = accepted.Acceptance("cpu", SECONDS, None, "ada", "x", accepted.today(), accepted.today())
    timed = Paired(outcome, 1.06, (1.05, 1.07), 16)
    assert accept._timed_entry(made, timed, drift).ratio == ratio


def test_accept_refuses_a_record_of_other_sources(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "helper.py").write_text("X = 1\n")
    code, _, err = run("a/b/n", *WHO, *SOON)
    assert (code, err) == (
        1,
        f"refused: the record was measured from other sources (commit {'f' * 12}) than these: run pytest -m cpu again,"
        " or take it as it is with --other-tree\n",
    )
    assert not Path("baselines/accepted.toml").exists()
    assert run("a/b/n", *WHO, *SOON, "--other-tree")[0] == 0


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("a/c/n", *WHO, *SOON), 1, "refused: a/c/n: PASS: nothing to accept"),
        (
            ("a/d/n", *WHO, *SOON),
            1,
            "INSTRUMENT: instrument graphs: read 2, knows 1; only a measured difference",
        ),
        (("a/f/n", *WHO, *SOON), 1, "MISSING: not reviewed: measured 17 count; only a measured difference"),
        (("a/e/n", *WHO, *SOON), 1, "REGRESSION whatever is accepted: expected 13 (derived), measured 17"),
        (("a/x/n", *WHO, *SOON), 4, "record.json holds no row 'a/x/n'"),
        (
            ("a/b/n", "--lane", "gpu", *WHO[2:], *SOON),
            4,
            "unknown lane 'gpu'; lanes: cpu, h100, h200, h200x2, v6e",
        ),
        (("a/b/n", "--lane", "h200", *WHO[2:], *SOON), 1, "record.json is of lane 'cpu', not 'h200'"),
        (("a/b/n", *WHO), 4, "--expires '': not a day such as 2026-12-31"),
        (("a/b/n", *WHO, "--expires", "soon"), 4, "--expires 'soon': not a day"),
        (("a/b/n", *WHO, "--expires", "2020-01-01"), 4, "from today on, and at most 366 days away"),
        (("a/b/n", *WHO, "--expires", "2999-01-01"), 4, "from today on, and at most 366 days away"),
        (
            ("a/b/n", "--lane", "cpu", "--owner", "ada", *SOON),
            4,
            "--reason must be one line of text in UTF-8, got ''",
        ),
        (("a/b/n", *WHO[:2], *WHO[4:], *SOON), 4, "--owner must be one line of text"),
        (("a/b/n", *WHO, *SOON, "--record", "none.json"), 4, "none.json: cannot be read"),
    ],
)
def test_refused_accept_is_one_line_and_writes_nothing(
    run: Callable[..., tuple[int, str, str]], args: tuple[str, ...], code: int, words: str
) -> None:
    got, _, err = run(*args)
    assert got == code
    (line,) = err.splitlines()
    assert words in line
    assert not Path("baselines/accepted.toml").exists()


def test_accept_refuses_to_run_inside_a_gate(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUMPGATE_GATE", "1")
    code, _, err = run("a/b/n", *WHO, *SOON)
    assert (code, err) == (4, "bumpgate: accept never runs inside a gate (BUMPGATE_GATE=1)\n")


def test_gate_of_another_lane_without_its_records_is_refused(tmp_path: Path) -> None:
    """Only gate.json was copied, so that no record states the lane."""
    gate = replace(gate_of(), timed={SECONDS: Paired("SLOWER", 1.4, (1.3, 1.5), 16)})
    tomorrow = accepted.today() + timedelta(1)
    with pytest.raises(RefusedError, match=r"gate.json is of lane 'h200', not 'cpu'"):
        accept._entry(tmp_path, tmp_path / "gate.json", gate, SECONDS, "cpu", "ann", "why", tomorrow)
