"""An environment that cannot measure must not look green: Dynamo off, a renamed counter, a lost row, nothing run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from suites.support.planted import planted
from tests.support.tree import copy_tree, edit, run_lane

pytestmark = pytest.mark.long(50)

TEST = "suites/compile/test_policies.py::test_counts[nam52-regional-cpu]"
ROW = "compile/nam52-regional/graph_breaks"


def test_dynamo_disabled_in_config_is_an_instrument_failure(tmp_path: Path) -> None:
    root = copy_tree(tmp_path / "tree")
    edit(
        root,
        "suites/conftest.py",
        "import pytest\n\n",
        "import pytest\nimport torch\nimport torch._dynamo\n\ntorch._dynamo.config.disable = True\n",
    )
    run = run_lane(root, TEST)
    assert run.verdict(ROW) == "INSTRUMENT", run.output[-3000:]
    assert run.code == 1


def test_dynamo_disabled_by_env_var_is_an_instrument_failure(tmp_path: Path) -> None:
    run = run_lane(copy_tree(tmp_path / "tree"), TEST, environment={"TORCHDYNAMO_DISABLE": "1"})
    assert run.verdict(ROW) == "INSTRUMENT", run.output[-3000:]
    assert run.code == 1


@planted("I1", "torch renames the trace artifact with graph breaks")
def test_renamed_counter_is_an_instrument_failure(tmp_path: Path) -> None:
    """Simulates a torch that renames the trace artifact with graph breaks."""
    root = copy_tree(tmp_path / "tree")
    device = root / "bumpgate/plugin/instruments/dynamo.py"
    device.write_text(
        device.read_text().replace('"dynamo_graph_break_reason"', '"dynamo_graph_break_reason_v2"')
    )
    run = run_lane(root, TEST)
    assert run.verdict(ROW) == "INSTRUMENT", run.output[-3000:]
    assert "graph_breaks" in run.rows[ROW]["reason"]
    assert run.code == 1


def test_deleted_baseline_row_is_missing(tmp_path: Path) -> None:
    root = copy_tree(tmp_path / "tree")
    path = root / "baselines/cpu.json"
    baseline = json.loads(path.read_text())
    del baseline["rows"][ROW]
    path.write_text(json.dumps(baseline))
    run = run_lane(root, TEST)
    assert run.verdict(ROW) == "MISSING", run.output[-3000:]
    assert run.code == 1


def test_empty_selection_is_not_green(tmp_path: Path) -> None:
    run = run_lane(copy_tree(tmp_path / "tree"), "-k", "no_such_test_anywhere")
    assert run.code not in (0, 1), run.output[-3000:]
    assert "nothing was selected" in run.output
