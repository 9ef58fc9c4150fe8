"""The faults injected on an H200: their edits match the current sources, and which runs count as a kill.

No GPU or lane run is needed: the runs are simulated.
"""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from bumpgate.core.baseline import load
from tests.support.mutants import ON_DEVICE, Mutant, measured_right, slower_step
from tests.support.tree import ROOT, LaneRun
from tools import on_device
from tools.on_device import LIMIT, SLOWDOWN, outcome, step_milliseconds

EVERY = {**ON_DEVICE, "slowdown": slower_step(20.5)}
NO_DEVICE = "no NVIDIA H200 seen by torch.cuda"


def copy_of(mutant: Mutant, target: Path) -> Path:
    for file in {file for file, _, _ in mutant.edits}:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, target / file)
    return target


def judged(row: str, verdict: str, value: float | None = 2e4, message: str = "") -> dict:
    """Return a judgement in the format of a record."""
    fields = {"id": row, "value": value, "unit": "x", "better": "higher", "interval": [1.9e4, 2.1e4]}
    row_of = fields | {"rule": message, "evidence": [], "test": "t", "tolerance": 0.06}
    return {"verdict": verdict, "reason": "", "row": row_of}


@pytest.mark.parametrize("mutant", EVERY.values(), ids=EVERY)
def test_mutant_applies_and_its_test_belongs_to_lane_h200(mutant: Mutant, tmp_path: Path) -> None:
    mutant.plant(copy_of(mutant, tmp_path))
    for file, _, new in mutant.edits:
        text = (tmp_path / file).read_text()
        assert new in text
        compile(text, file, "exec")
    file, _, case = mutant.test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    name = case.partition("[")[0]
    (function,) = (f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == name)
    marks = [ast.unparse(mark) for mark in function.decorator_list]
    assert any("lanes(" in mark and "'h200'" in mark for mark in marks)
    assert case.endswith("h200]")


def run_with(verdict: str, message: str = "C6 model/attention.py print", other: str = "PASS") -> LaneRun:
    row, other_row = ON_DEVICE["graph_break"].row, "compile/other/graphs"
    rows = {row: judged(row, verdict, message=message), other_row: judged(other_row, other)}
    return LaneRun(1, "", rows)


@pytest.mark.parametrize(
    ("faulty", "unchanged", "survived"),
    [
        (run_with("REGRESSION"), run_with("PASS"), ""),
        (run_with("REGRESSION"), run_with("NEW"), ""),
        (run_with("PASS"), run_with("PASS"), "no fault found"),
        (run_with("INCONCLUSIVE"), run_with("PASS"), "no fault found"),
        (run_with("INFRA"), run_with("PASS"), "no fault found"),
        (run_with("REGRESSION"), run_with("REGRESSION"), "without it REGRESSION"),
        (run_with("REGRESSION"), LaneRun(1, "E  no such test", {}), "without it (row absent): E no such test"),
        (LaneRun(2, "E  the worker crashed", {}), run_with("PASS"), "E the worker crashed"),
        (run_with("REGRESSION", message="C6 model/moe.py print"), run_with("PASS"), "does not name model/attention.py"),
    ],
)  # fmt: skip
def test_outcome_requires_a_row_red_only_with_the_fault(
    faulty: LaneRun, unchanged: LaneRun, survived: str
) -> None:
    found = outcome("graph_break", ON_DEVICE["graph_break"], faulty, unchanged, 3.0)
    assert survived in found.survived if survived else not found.survived, found
    assert ("SURVIVED" in str(found)) == bool(survived)


def test_measured_right_and_slowdown_limit() -> None:
    """An unmeasured row is not right; half an interval on either side of the slowdown does not reach the limit."""
    row = ON_DEVICE["cache"].row
    assert measured_right(LaneRun(1, "", {row: judged(row, "NEW")}), row)
    assert not measured_right(LaneRun(1, "", {row: judged(row, "MISSING", None)}), row)
    assert step_milliseconds("throughput/nam52-full-eager-2x4096/tokens_per_second", 16384.0) == 500.0
    lost = 1 - 1 / (1 + SLOWDOWN)
    assert 0.018 / 2 < LIMIT < lost - 0.018 / 2


class Device:
    """Fake H200: every fault except `missed` is red, and the unchanged tree is not."""

    def __init__(self) -> None:
        self.missed, self.runs, self.slept = "", list[str](), list[bool]()

    def copy_tree(self, target: Path) -> Path:
        for mutant in EVERY.values():
            copy_of(mutant, target)
        (target / "baselines").mkdir()
        shutil.copy2(ROOT / "baselines/h200.json", target / "baselines")
        return target

    def run_lane(self, root: Path, *arguments: str, lane: str) -> LaneRun:
        assert lane == "h200"
        self.runs.append(root.name)
        rows = {}
        for name, mutant in EVERY.items():
            if mutant.test in arguments:
                missed = root.name.startswith("unchanged") or name == self.missed
                verdict = "NEW" if missed else "REGRESSION"
                rows[mutant.row] = judged(mutant.row, verdict, message=" ".join(mutant.words))
        if root.name.endswith("_step"):
            self.limit = load(root / "baselines/h200.json", "h200").rows.get(EVERY["slowdown"].row)
            self.slept.append("Asleep" in (root / "launch/step.py").read_text())
        return LaneRun(1, "", rows)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    for name in ("copy_tree", "run_lane"):
        monkeypatch.setattr(on_device, name, getattr(made, name))
    monkeypatch.setattr(on_device, "detect", lambda lane: None)
    return made


def test_each_fault_has_its_own_line_and_tree(device: Device, capsys) -> None:
    assert on_device.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in EVERY)
    assert out.endswith("every fault was killed\n")
    assert device.runs[: 1 + len(ON_DEVICE)] == ["unchanged", *ON_DEVICE]
    assert device.runs[-3:] == ["unchanged_step", "slower_step", "unchanged_step"]
    device.runs.clear()
    assert on_device.main(["--only", "cache"]) == 0
    assert device.runs == ["unchanged", "cache"]


def test_slower_step_is_judged_by_the_unchanged_rate(device: Device, capsys) -> None:
    assert on_device.main(["--only", "slowdown"]) == 0
    assert device.slept == [False, True, False]
    assert (device.limit.value, device.limit.tolerance) == (2e4, LIMIT)
    assert "[20000.0, 20000.0, 20000.0]" in capsys.readouterr().out


@pytest.mark.parametrize("missed", EVERY)
def test_surviving_fault_exits_1(device: Device, capsys, missed: str) -> None:
    device.missed = missed
    assert on_device.main([]) == 1
    out = capsys.readouterr().out
    assert (out.count("SURVIVED"), out.endswith("1 survived\n")) == (1, True)


def test_bad_usage_exits_2(device: Device, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="2"):
        on_device.main(["--only", "nothing"])
    monkeypatch.setattr(on_device, "detect", lambda lane: NO_DEVICE)
    with pytest.raises(SystemExit, match="2"):
        on_device.main([])
    assert NO_DEVICE in capsys.readouterr().err
    assert not device.runs
