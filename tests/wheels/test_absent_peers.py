"""If an upstream package has no wheel, only its own rows are listed as NOT RUN; all other rows are measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bumpgate.core.baseline import Baseline, Reviewed, save
from bumpgate.core.findings import Decision
from bumpgate.core.rows import Judgement, Record, Row, Verdict
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.process.host import OWN_VARIABLES, PARENT
from suites.kernels import model_shapes, peer_tuning
from suites.ops import specs, timed_cases
from suites.ops.spec import Timed, Work, Workload
from suites.support import absent
from suites.support.gpu_timing import Timing
from suites.support.planted import planted
from tests.support.lane_files import write_lane
from tests.support.project import Project

BODY = """
from suites.support.absent import not_run

@lanes("cpu")
def test_speed(lane, row):
    missing = not_run(row, lane, ["kernels/a/over_peer"], ["no_such_peer"])
    row.count("kernels/a/milliseconds", 1, expected=1, **COUNT)
    if not missing:
        row.count("kernels/a/over_peer", 1, expected=1, **COUNT)
"""
TEST = "suites/compile/test_a.py::test_speed[cpu]"
REASON = "no wheel for this torch; nvcc is not on PATH"


@pytest.fixture
def reviewed(project: Project) -> Project:
    rows = {
        f"kernels/a/{metric}": Reviewed(1, "breaks", "derived", test=TEST)
        for metric in ("milliseconds", "over_peer")
    }
    project.tests(BODY)
    save(project.root / "baselines/cpu.json", Baseline("cpu", {"torch": "9.9.0"}, rows))
    return project


def test_folder_of_an_uninstalled_peer_is_absent(tmp_path: Path, monkeypatch) -> None:
    """pip leaves a folder with files that it did not write; Python then imports it as an empty namespace."""
    (tmp_path / "left_over/cache").mkdir(parents=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert absent.absent(["left_over", "broken"]) == ["left_over"]


NOT_INSTALLED = "NOT RUN       kernels/a/over_peer: no_such_peer is not installed"
GIVEN_UP = "NOT RUN       kernels/a/over_peer: lane cpu has given no-such-peer up (lanes/cpu/lane.toml)"


@planted("C39", "an adopted environment that lacks a kernel wheel")
@planted("C39", "a wheel that another lane has given up")
@pytest.mark.parametrize(
    ("found", "given_up", "gate", "code", "words"),
    [
        ("", "", False, 0, [NOT_INSTALLED, "1 row: 1 PASS; 1 NOT RUN; device cpu"]),
        ("", "", True, 1, [f"{TEST}: not run under --gate: kernels/a/over_peer"]),
        (REASON, "", True, 0, [f"NOT RUN       kernels/a/over_peer: {REASON}"]),
        ("", "cpu", True, 0, [GIVEN_UP]),
        ("", "h200", True, 1, [NOT_INSTALLED]),
    ],
    ids=["run", "adopted set", "found absent", "given up", "given up elsewhere"],
)
def test_absent_peer_skips_only_its_own_rows(
    found: str, given_up: str, gate: bool, code: int, words: list[str], reviewed: Project
) -> None:
    """A gate requires the peers of the adopted set, unless it found them absent or the lane has given them up."""
    if found:
        reviewed.env |= {absent.VARIABLE: f'{{"no-such-peer": "{found}"}}', PARENT: str(os.getpid())}
    if given_up:
        write_lane(reviewed.root, given_up, without=["No_Such.Peer"])
    done = reviewed.pytest("-m", "cpu", "-n", "0", *(["--gate"] if gate else []))
    assert done.code == code, done.out
    assert all(each in done.out for each in words), done.out


@pytest.mark.parametrize("name", OWN_VARIABLES)
def test_own_variables_set_by_a_shell_are_refused(reviewed: Project, name: str) -> None:
    reviewed.env |= {name: "none", PARENT: "999999999"}
    done = reviewed.pytest("-m", "cpu", "-n", "0")
    assert done.code == 4
    assert f"ERROR: {name} in the environment: only bumpgate sets them" in done.out + done.err


@planted("C39", "a row of an own kernel that vanishes together with the peer's")
def test_other_row_lost_with_the_peer_is_missing(reviewed: Project) -> None:
    own = 'row.count("kernels/a/milliseconds"'
    reviewed.tests(BODY.replace(own, f"missing or {own}"))
    done = reviewed.pytest("-m", "cpu", "-n", "0")
    assert done.code == 1
    assert "MISSING       kernels/a/milliseconds" in done.out


def refuse(*_: Any, **__: Any) -> Any:
    raise ImportError("flash_attn is not installed")


@pytest.fixture
def attention_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a small CPU case with the name of one in the lane, whose peer raises."""

    def case(B: int) -> Workload:
        inputs = (torch.randn(B, 8, dtype=torch.bfloat16),)
        return Workload(torch.tanh, torch.tanh, refuse, inputs, Work(1.0, 1.0))

    monkeypatch.setitem(timed_cases(), "attention-P64", Timed(case))
    monkeypatch.setitem(sys.modules, "flash_attn", None)


def test_errors_are_measured_without_the_peer(attention_on_cpu: None) -> None:
    ours, peer, numbers = model_shapes.compared("attention-P64")
    assert ours.keys() == numbers.keys() == {"forward", "gradient"}
    assert [len(ratios) for ratios in ours.values()] == [1, 1]
    assert peer == {"forward": [], "gradient": []}


def test_speeds_are_measured_without_the_peer(
    attention_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("floor_milliseconds", 1.0), ("copy_rate", 1e12), ("matmul_rate", 1e12)):
        monkeypatch.setattr(model_shapes, name, lambda *_, value=value: value)
    monkeypatch.setattr(model_shapes, "milliseconds", lambda call: Timing(1.0, 0.9, 1.1))
    rows: list[str] = []
    recorder = mock.Mock()
    for verb in (recorder.timed, recorder.cost, recorder.bound):
        verb.side_effect = lambda id, *_, **__: rows.append(id)
    model_shapes.report_speed(recorder, "attention-P64", peer_tuning.tuned_case("attention-P64", 1))
    metrics = ("milliseconds", "roofline_fraction")
    assert rows == [
        f"kernels/attention-P64/{way}_{metric}" for way in model_shapes.WAYS for metric in metrics
    ]


def test_installed_but_broken_peer_raises(attention_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_tuning, "absent", lambda packages: [])
    with pytest.raises(ImportError):
        model_shapes.compared("attention-P64")


def test_every_peer_package_is_listed() -> None:
    """An op with a timed case and a peer that is imported from a package names the package."""
    root = Path(peer_tuning.__file__).parents[2] / "kernels"
    with_package = {
        path.parent.name
        for path in root.glob("*/upstream.py")
        if "INSTALL = " in path.read_text(encoding="utf-8")
    }
    named = {name for name, spec in specs().items() if spec.packages}
    assert named == {name for name in with_package if specs()[name].timed}


def judgement(id: str) -> Judgement:
    return Judgement(Row(id, 1, "ratio", 1, "C36", expected=1, better="derived", test=TEST), Verdict.PASS, "")


@pytest.mark.parametrize(("spared", "decision"), [(True, Decision.ADOPT), (False, Decision.UNKNOWN)])
def test_gate_lists_rows_of_absent_peers_as_not_run(spared: bool, decision: Decision) -> None:
    own, peers = judgement("kernels/a/milliseconds"), judgement("kernels/a/over_peer")
    lines = {"not_run": [f"{peers.row.id}: {REASON}"]} if spared else {}
    good = Side("adopted", Record({"lane": "h200"}, (own, peers)))
    bad = Side("candidate", Record({"lane": "h200", **lines}, (own,)))
    found = judge_gate("h200", good, bad)
    assert found.decision is decision
    if spared:
        (finding,) = found.findings
        assert (finding.label, finding.head, finding.rows) == ("NOT RUN", REASON, (peers.row.id,))
