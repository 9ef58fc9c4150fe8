"""The `bumpgate` command loads what it runs, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bumpgate import cli
from tests.support.tree import ROOT


def test_command_is_imported_when_it_is_used() -> None:
    program = """
import sys
import typer
from bumpgate.cli import app
group = typer.main.get_command(app)
def loaded():
    return sorted(m for m in sys.modules if m.startswith("bumpgate.") and m.endswith(".command"))
print(loaded())
assert group.get_command(None, "notify").name == "notify"
assert group.get_command(None, "wheels").name == "wheels"
print(loaded())
assert group.get_command(None, "nope") is None
print(len([group.get_command(None, name).help for name in group.list_commands(None)]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    none, two, every = done.stdout.splitlines()
    assert (none, int(every)) == ("[]", len(cli.COMMANDS)), done.stderr
    assert two == "['bumpgate.notify.command', 'bumpgate.wheels.command']"


def test_controller_imports_neither_torch_nor_suites() -> None:
    program = "import sys; from bumpgate import cli; [cli.load(name) for name in cli.COMMANDS];"
    program += "print({'torch', 'numpy', 'pytest', 'suites'} & sys.modules.keys())"
    root = Path(cli.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
    program = "import sys, bumpgate.plugin.fixtures; print({'uv', 'requests', 'typer'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n", "a lane's environment has packaging, psutil and rich only"
    program = "import sys, bumpgate.core.rows, bumpgate.core.baseline; print({'rich', 'typer'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
