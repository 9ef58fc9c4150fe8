"""The installed plugin: what it imports, and when; what a record states about its run."""

from __future__ import annotations

import importlib.util
import py_compile
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bumpgate.plugin.provenance import command_line, missing_bytecode
from tests.support.foreign import Foreign
from tests.support.tree import ROOT

# All modules except the instruments and reports, imported without torch.
IMPORTS = """
import importlib, pkgutil, sys
sys.modules["torch"] = None
import bumpgate, bumpgate.cli
names = [m.name for m in pkgutil.walk_packages(bumpgate.__path__, "bumpgate.")]
for name in names:
    if not name.startswith(("bumpgate.plugin.instruments.", "bumpgate.report.")) and not name.endswith("instruments"):
        importlib.import_module(name)
print(len(names))
"""


def test_only_instruments_import_torch() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80


def test_plugin_without_fixtures_imports_no_heavy_modules(tmp_path: Path) -> None:
    foreign = Foreign(tmp_path)
    foreign.write("torch.py", "raise SystemExit('torch was imported')\n")
    foreign.write(
        "conftest.py",
        "import sys\n"
        "def pytest_unconfigure():\n"
        "    names = {'torch', 'tomllib', 'psutil', 'packaging', 'suites', 'rich', 'typer',\n"
        "             'bumpgate.core.rows', 'bumpgate.plugin.session'}\n"
        "    print('imported:', sorted(names & set(sys.modules)))\n",
    )
    foreign.write("test_a.py", "def test_a(): pass\n")
    ran = foreign.pytest()
    assert ran.code == 0, ran.out + ran.err
    assert "imported: []" in ran.out or "imported: ['packaging']" in ran.out


@pytest.mark.parametrize("fixture", ["dynamo_watch", "inductor_watch"])
def test_broken_torch_fails_only_the_test_that_uses_it(tmp_path: Path, fixture: str) -> None:
    foreign = Foreign(tmp_path)
    foreign.write("torch.py", "raise ImportError('libtorch is broken')\n")
    foreign.write("bumpgate.toml", "[lanes.mine]\n")
    foreign.write("pytest.ini", "[pytest]\n")
    head = "import pytest\npytestmark = pytest.mark.mine\n"
    body = (
        f"def test_a({fixture}): pass\ndef test_b(row): row.count('a/b/c', 1, unit='n', seen=1, expected=1)\n"
    )
    foreign.write("test_a.py", head + body)
    ran = foreign.pytest("-m", "mine")
    assert ran.code == 1
    assert "libtorch is broken" in ran.out
    assert foreign.verdicts() == {"a/b/c": "MISSING"}, "other tests run"


def test_command_line_omits_the_installation_path() -> None:
    assert command_line(["/opt/env/lib/pytest/__main__.py", "-m", "cpu"]) == "python -m pytest -m cpu"
    assert command_line(["/opt/env/bin/pytest", "-k", "a b"]) == "pytest -k 'a b'"


def test_missing_bytecode_of_torch_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "torch" / "__init__.py"
    source.parent.mkdir()
    source.touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(source)))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert missing_bytecode().endswith(f"python -m compileall -q -j 0 {source.parent}")
    py_compile.compile(str(source))
    assert missing_bytecode() == ""
    monkeypatch.setattr(sys, "pycache_prefix", "/nowhere")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert missing_bytecode() == "", "the next process writes it"
