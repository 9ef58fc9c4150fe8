"""Lane runs in forks of one process that has imported what pytest loads: the imports take most of such a run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.support.project import Project, Result

# It reads a run a line: the folder, the arguments, the environment and the files of the output.
SERVER = """
import importlib, json, os, runpy, sys
import execnet, packaging.requirements, psutil, rich.console, rich.table
from _pytest.config import default_plugins
for name in default_plugins:
    importlib.import_module(f"_pytest.{name}")
for line in sys.stdin:
    folder, arguments, variables, outputs = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        for descriptor, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.argv, sys.path[0] = ["pytest", *arguments], folder
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
Run = Callable[..., Result]


@pytest.fixture(scope="session")
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-B", "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        yield made
        made.terminate()


@pytest.fixture
def forked(project: Project, server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function like Project.pytest. A variable that Python reads when it starts needs a process of its own."""

    def run(*arguments: str, **variables: str) -> Result:
        if any(name.startswith("PYTHON") for name in variables):
            return project.pytest(*arguments, **variables)
        outputs = [tmp_path_factory.getbasetemp() / name for name in ("attack.out", "attack.err")]
        call = [str(project.root), arguments, project.env | variables, [str(path) for path in outputs]]
        assert server.stdin
        assert server.stdout
        server.stdin.write(json.dumps(call) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out, err = (path.read_text(errors="replace") for path in outputs)
        return Result(code, out, err)

    return run
