"""Every op is complete: reference, op, spec, suite, golden arrays, reviewed rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from suites.ops import op_names
from tests.support.tree import ROOT

# Files of suites/ops/ that describe no op.
SHARED = {"__init__", "spec"}


def folders(root: Path) -> list[str]:
    """Return every folder under kernels/ with Python files: a finished or unfinished op, but no shared code (_*)."""
    found = {path.parent.name for path in (root / "kernels").glob("*/*.py")}
    return sorted(name for name in found if not name.startswith("_"))


def lacking(root: Path, op: str) -> list[str]:
    """Return the missing parts of an op."""
    files = [
        *(f"kernels/{op}/{name}.py" for name in ("__init__", "naive", "eager", "op")),
        f"suites/ops/{op}.py",
        f"fixtures/{op}.safetensors",
    ]
    missing = [file for file in files if not (root / file).is_file()]
    rows = json.loads((root / "baselines/cpu.json").read_text())["rows"]
    if not any(row.startswith(f"kernels/{op}-cpu") for row in rows):
        missing.append(f"a row kernels/{op}-cpu-* in baselines/cpu.json")
    return missing


@pytest.mark.parametrize("op", folders(ROOT))
def test_op_is_complete(op: str) -> None:
    missing = lacking(ROOT, op)
    assert not missing, f"{op} lacks " + ", ".join(missing)


def test_every_spec_belongs_to_an_op() -> None:
    assert {path.stem for path in (ROOT / "suites/ops").glob("*.py")} - SHARED == set(op_names())
    assert len(op_names()) >= 8


def test_specs_are_found_without_torch_and_read_without_triton() -> None:
    program = (
        "import sys; from suites.ops import op_names, specs; op_names(); assert 'torch' not in sys.modules; "
        "assert [spec.name for spec in specs().values()] == op_names(); assert 'triton.language' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
