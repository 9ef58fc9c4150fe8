"""The installed plugin: what it imports, and when; what a record states about its run."""

from __future__ import annotations

import importlib.util
import py_compile
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from bumpgate.plugin.provenance import command_line, missing_bytecode
from tests.support.foreign import LANE, Foreign
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
    ran = foreign.pytest(PYTHONDONTWRITEBYTECODE="1")
    assert ran.code == 0, ran.out + ran.err
    assert "imported: []" in ran.out or "imported: ['packaging']" in ran.out


def test_marker_that_reads_like_the_lane_is_named(tmp_path: Path) -> None:
    foreign = Foreign(tmp_path)
    foreign.write("bumpgate.toml", LANE)
    foreign.write("test_a.py", "import pytest\n@pytest.mark.mien\ndef test_a(): pass\n")
    ran = foreign.pytest("-m", "mine")
    assert ran.code == 5, ran.out + ran.err
    assert "nothing was selected: not green; the marker 'mien' is no lane: did you mean mine?" in ran.out


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
    assert foreign.verdicts() == {"a/b/c": "NEW"}, "other tests run"


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


def test_a_new_parameter_of_an_existing_test_renames_no_other_row(tmp_path: Path) -> None:
    text = """
    import pytest
    @pytest.mark.parametrize("shape, name, size", [{}((1, 2), "a", 1), ([3], "b", 2), ({{4: 5}}, dict, 3)])
    def test_it(shape, name, size): pass
    """
    found = []
    for more in ("", "((0,), 'new', 0), "):
        foreign = Foreign(tmp_path)
        foreign.write("bumpgate.toml", f"{LANE}tests = ['tests']\n")
        foreign.write("tests/test_it.py", textwrap.dedent(text.format(more)))
        assert foreign.pytest("-m", "mine").code == 0
        found.append(foreign.verdicts().keys())
        shutil.rmtree(tmp_path / ".tmp")
    assert len(found[0]) == 3
    assert found[0] < found[1]
    assert not [id for id in found[0] if "shape0" in id]
