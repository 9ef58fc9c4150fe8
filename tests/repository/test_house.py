"""Repository rules that are checked automatically."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.support.tree import ROOT

INSTRUMENTS = [ROOT / "bumpgate/plugin/instruments", ROOT / "suites/support/instruments"]
# Documented by torch as compiler configuration; only instruments may read other private names.
LAUNCHER_MAY = {
    "torch._dynamo",
    "torch._dynamo.config",
    "torch._dynamo.lookup_backend",
    "torch._dynamo.maybe_mark_dynamic",
}


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def private_names(path: Path) -> set[str]:
    """Return dotted private torch names that a file imports or reads."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {name for name in names if re.match(r"torch(\.\w+)*\._[a-z]", name)}


def test_private_torch_names_are_used_by_instruments_only() -> None:
    assert private_names(INSTRUMENTS[0] / "dynamo.py"), "nothing is read from the syntax tree"
    found = {}
    for path in python_files("kernels", "model", "suites", "bumpgate"):
        names = private_names(path)
        if names and path.parent not in INSTRUMENTS:
            found[str(path.relative_to(ROOT))] = names
    for path in python_files("launch"):
        if names := private_names(path) - LAUNCHER_MAY:
            found[str(path.relative_to(ROOT))] = names
    assert not found, found


def test_imports_obey_the_import_linter_contracts() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
