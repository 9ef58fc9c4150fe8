"""Fake builds of torch and triton for the tests of a bisect, and the command run among them.

torch 2.n.0 of week n requires triton 3.n.0 exactly. `FAULT` of each is whether it has an injected fault; a test of
torch reads `torch.graph_breaks()`: 13, plus one for a fault in torch or in the installed triton.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.local_index import LocalIndex, fake_wheel
from tests.support.project import COMMAND, PLUGINS, in_process, spawn
from tests.support.project import Result as Ran
from tests.support.tree import ROOT

WEEKS = 12
FIRST_DAY = datetime(2026, 1, 5, tzinfo=timezone.utc)
TORCH = """
import triton
FAULT, manual_seed = {fault}, int
def graph_breaks():
    return 13 + FAULT + triton.FAULT
"""
RAISES = "raise ImportError('libcudart.so.13: cannot open shared object file')"
CRASHES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
# A test of torch as a user writes it.
PROGRAM = 'import torch; n = torch.graph_breaks(); print(n, "breaks"); raise SystemExit(n > 13)'
JUDGE = f"{{python}} -c '{PROGRAM}'"


def commit(week: int) -> str:
    return f"{week:x}" * 40


def torch(week: int) -> str:
    return f"2.{week}.0"


def triton(week: int) -> str:
    return f"3.{week}.0"


@dataclass
class Builds:
    """Wheels of WEEKS weeks in `folder`, served by `index`."""

    folder: Path
    index: LocalIndex

    def wheel(self, name: str, week: int, text: str) -> Path:
        version = (torch if name == "torch" else triton)(week)
        body = {
            f"{name}/__init__.py": f"__version__ = {version!r}\n{text}",
            f"{name}/version.py": f"__version__ = {version!r}\ngit_version = {commit(week)!r}\n",
        }
        requires = [f"triton=={triton(week)}"] if name == "torch" else []
        source = (
            "https://github.com/pytorch/pytorch"
            if name == "torch"
            else "https://github.com/triton-lang/triton"
        )
        return fake_wheel(self.folder, name, version, body, requires, source=source)


def make_builds(
    folder: Path,
    index: LocalIndex,
    *,
    torch_fault: int = WEEKS,
    triton_fault: int = WEEKS,
    import_text: Mapping[int, str] = {},
    missing: Iterable[int] = (),
) -> Builds:
    """torch_fault, triton_fault: first week with a fault. import_text: week -> text that replaces its torch module."""
    builds = Builds(folder, index)
    for name in ("numpy", "setuptools"):
        index.add(fake_wheel(folder, name, "1.0"))
    for week in range(WEEKS):
        text = import_text.get(week) or TORCH.format(fault=int(week >= torch_fault))
        if week not in missing:
            index.add(builds.wheel("torch", week, text))
        index.add(builds.wheel("triton", week, f"FAULT = {int(week >= triton_fault)}\n"))
        index.dates |= {v: FIRST_DAY + timedelta(weeks=week) for v in (torch(week), triton(week))}
    return builds


def host_pytest(folder: Path) -> Path:
    """Build a wheel named pytest that exposes this interpreter's pytest: no download.

    An environment of it also reads this interpreter's bytecode, and loads only the plugins that pyproject.toml needs:
    compiling every source in each new environment takes a second, and importing the other plugins a half.
    """
    sites = [path for path in sys.path if path.endswith("site-packages")]
    quick = f"import os, sys; sys.dont_write_bytecode, sys.pycache_prefix = True, None; os.environ.update({PLUGINS})"
    return fake_wheel(folder, "pytest", "99.0", {"host.pth": "\n".join([*sites, quick]) + "\n"})


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `bumpgate bisect` as a separate process."""
    return spawn(folder, os.environ | {"PYTHONPATH": str(ROOT)}, "-c", COMMAND, "bisect", *arguments)


Bisect = Callable[..., Ran]


def answer_of(out: Path) -> dict[str, Any]:
    """Read the bisect.json of a folder."""
    answer = json.loads((out / "bisect.json").read_text())
    assert isinstance(answer, dict)
    return answer


@contextmanager
def bisecting(folder: Path) -> Iterator[Bisect]:
    """Yield a function that runs `bumpgate bisect` in this process, with `folder` as working directory."""
    yield partial(in_process, folder, "bisect")
