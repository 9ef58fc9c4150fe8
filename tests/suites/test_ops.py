"""Every op is complete: reference, op, suite, golden arrays, reviewed rows, mutants."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.support.tree import ROOT


def ops(root: Path) -> list[str]:
    """Return every folder under kernels/ with Python files: a finished or unfinished op, but no shared code (_*)."""
    folders = {path.parent.name for path in (root / "kernels").glob("*/*.py")}
    return sorted(name for name in folders if not name.startswith("_"))


def lacking(root: Path, op: str) -> list[str]:
    """Return the missing parts of an op."""
    files = [
        f"kernels/{op}/__init__.py",
        f"kernels/{op}/naive.py",
        f"kernels/{op}/eager.py",
        f"kernels/{op}/op.py",
        f"suites/kernels/test_{op}.py",
        f"fixtures/{op}.safetensors",
    ]
    if (root / f"kernels/{op}/kernel.py").exists():
        files.append(f"suites/kernels/interpret/ops/{op}.py")
    missing = [file for file in files if not (root / file).is_file()]
    rows = json.loads((root / "baselines/cpu.json").read_text())["rows"]
    if not any(row.startswith(f"kernels/{op}-cpu") for row in rows):
        missing.append(f"a row kernels/{op}-cpu-* in baselines/cpu.json")
    if op not in subjects(root / "suites/kernels/mutants.py"):
        missing.append(f"mutants: {op!r} in SUBJECTS of suites/kernels/mutants.py")
    return missing


def subjects(path: Path) -> set[str]:
    """Return the keys of the dict SUBJECTS of a file, parsed without an import, so torch is not needed."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUBJECTS":
            return set(map(ast.literal_eval, node.value.keys))
    raise AssertionError(f"{path} assigns no SUBJECTS")


@pytest.mark.parametrize("op", ops(ROOT))
def test_op_is_complete(op: str) -> None:
    missing = lacking(ROOT, op)
    assert not missing, f"{op} lacks " + ", ".join(missing)


def test_ops_are_found() -> None:
    assert len(ops(ROOT)) >= 8


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two complete ops: `fold` with a kernel, and `unfold` without."""
    for op in ("fold", "unfold"):
        for file in ("__init__", "naive", "eager", "op"):
            _write(tmp_path / f"kernels/{op}/{file}.py")
        _write(tmp_path / f"suites/kernels/test_{op}.py")
        _write(tmp_path / f"fixtures/{op}.safetensors")
    _write(tmp_path / "kernels/fold/kernel.py")
    _write(tmp_path / "suites/kernels/interpret/ops/fold.py")
    rows = {f"kernels/{op}-cpu-fp32/forward_error_ratio": {} for op in ("fold", "unfold")}
    _write(tmp_path / "baselines/cpu.json", json.dumps({"rows": rows}))
    _write(tmp_path / "suites/kernels/mutants.py", 'SUBJECTS = {"fold": 1, "unfold": 2}\n')
    return tmp_path


def _write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_complete_op_lacks_nothing(tree: Path) -> None:
    assert ops(tree) == ["fold", "unfold"]
    assert [lacking(tree, op) for op in ops(tree)] == [[], []]


@pytest.mark.parametrize(
    "part",
    [
        "kernels/fold/__init__.py",
        "kernels/fold/naive.py",
        "kernels/fold/eager.py",
        "kernels/fold/op.py",
        "suites/kernels/test_fold.py",
        "suites/kernels/interpret/ops/fold.py",
        "fixtures/fold.safetensors",
    ],
)
def test_lacking_names_a_deleted_file(tree: Path, part: str) -> None:
    (tree / part).unlink()
    assert lacking(tree, "fold") == [part]
    assert lacking(tree, "unfold") == []


def test_lacking_names_a_deleted_row_and_subject(tree: Path) -> None:
    """The other op's row and subject, whose names contain this one's, do not count for it."""
    (tree / "baselines/cpu.json").write_text(json.dumps({"rows": {"kernels/unfold-cpu-fp32/error": {}}}))
    (tree / "suites/kernels/mutants.py").write_text('SUBJECTS = {"unfold": 2}\n')
    row, mutants = lacking(tree, "fold")
    assert "kernels/fold-cpu-*" in row
    assert "SUBJECTS" in mutants
    assert lacking(tree, "unfold") == []


def test_lacking_names_all_missing_parts_of_a_new_folder(tree: Path) -> None:
    _write(tree / "kernels/refold/op.py")
    assert "refold" in ops(tree)
    assert len(lacking(tree, "refold")) == 7
