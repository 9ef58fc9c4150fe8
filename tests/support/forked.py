"""Runs of pytest in forks of one process that has imported what pytest loads: the imports take most of a small run."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# It reads a run a line: the folder, the arguments, the environment and the files of the output. It ends with its input.
SERVER = """
import importlib, json, os, runpy, signal, sys
import execnet, packaging.requirements, psutil, rich.console, rich.table
from _pytest.config import default_plugins
for name in default_plugins:
    importlib.import_module(f"_pytest.{name}")
for line in sys.stdin:
    folder, arguments, variables, outputs = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        for descriptor, path in enumerate((os.devnull, *outputs)):
            os.dup2(os.open(path, os.O_RDWR), descriptor)
        sys.argv, sys.path[0] = ["pytest", *arguments], folder
        sys.path[1:1] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-B", "-c", SERVER], text=True, start_new_session=True, **pipes)


def run_pytest(folder: Path, arguments: tuple[str, ...], env: Mapping[str, str]) -> tuple[int, str, str]:
    """Return exit code, output and errors. Of the variables that Python reads at its start only PYTHONPATH counts."""
    server = _server()
    assert server.stdin
    assert server.stdout
    with (
        tempfile.NamedTemporaryFile("r", errors="replace") as out,
        tempfile.NamedTemporaryFile("r", errors="replace") as err,
    ):
        server.stdin.write(json.dumps([str(folder), arguments, dict(env), [out.name, err.name]]) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline()), out.read(), err.read()
