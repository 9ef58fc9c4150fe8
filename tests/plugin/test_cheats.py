"""An environment that cannot measure must not look green: Dynamo off, or a renamed counter."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.support.planted import planted
from tests.support.tree import copy_tree, edit, run_lane

pytestmark = pytest.mark.long(50)

TEST = "suites/compile/test_policies.py::test_counts[nam52-regional-cpu]"
ROW = "compile/nam52-regional/graph_breaks"
OFF = "import pytest\nimport torch\nimport torch._dynamo\n\ntorch._dynamo.config.disable = True\n"
DYNAMO = "bumpgate/plugin/instruments/dynamo.py"


@pytest.mark.parametrize(
    ("edits", "environment", "reason"),
    [
        ([("suites/conftest.py", "import pytest\n\n", OFF)], {}, ""),
        ([], {"TORCHDYNAMO_DISABLE": "1"}, ""),
        pytest.param(
            [(DYNAMO, 'trace_artifacts("dynamo_graph_break_reason"', 'trace_artifacts("renamed"')],
            {},
            "graph_breaks",
            marks=planted("I1", "torch renames the trace artifact with graph breaks"),
        ),
    ],
    ids=["dynamo disabled", "dynamo disabled by a variable", "a renamed counter"],
)
def test_broken_instrument_is_not_green(
    tmp_path: Path, edits: list[tuple[str, str, str]], environment: dict[str, str], reason: str
) -> None:
    root = copy_tree(tmp_path / "tree")
    for change in edits:
        edit(root, *change)
    run = run_lane(root, TEST, environment={"TMPDIR": str(tmp_path), **environment})
    assert run.verdict(ROW) == "INSTRUMENT", run.output[-3000:]
    assert (run.code, reason in run.rows[ROW]["reason"]) == (1, True)
