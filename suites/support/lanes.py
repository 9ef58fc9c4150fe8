"""Lanes: where a test runs, and whether this machine is such a place."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

import pytest

from bumpgate.processes.host import read_or_empty

PROBE_SECONDS = 180


@dataclass(frozen=True)
class Lane:
    """name: the pytest marker. device: the torch device type."""

    name: str
    device: str


LANES = {lane.name: lane for lane in (Lane("cpu", "cpu"), Lane("h200", "cuda"), Lane("v6e", "xla"))}


def lanes(*names: str) -> pytest.MarkDecorator:
    """Parametrises the fixture `lane` over the named lanes, each parameter carrying its lane's marker.

    The scope is the session's, so that a module's fixture may ask for `lane` too. Raises ValueError on a name
    that is no lane.
    """
    unknown = [name for name in names if name not in LANES]
    if unknown or not names:
        raise ValueError(f"unknown lane {unknown or ''}; lanes: {', '.join(LANES)}")
    params = [pytest.param(LANES[name], id=name, marks=getattr(pytest.mark, name)) for name in names]
    return pytest.mark.parametrize("lane", params, scope="session")


def lane_of(item: pytest.Item) -> str | None:
    """The lane whose marker an item carries."""
    return next((name for name in LANES if item.get_closest_marker(name)), None)


@dataclass(frozen=True)
class Found:
    """device: what the lane would run on here. missing: why it cannot run, in one line with the remedy."""

    device: str
    missing: str | None = None


def detect(name: str) -> str | None:
    """None where the lane can run on this machine, else the reason in one line."""
    return find(name).missing


@cache
def find(name: str) -> Found:
    """Looks for the lane's device.

    Torch is imported in a process of its own: one that crashes on import, or takes device memory for a
    context, must not do so in the process that judges.
    """
    if name == "cpu":
        return Found("cpu", _no_compiler() or _no_avx2(read_or_empty("/proc/cpuinfo")))
    device, fault = _probe(PROBES[name])
    if name == "h200" and not fault and "H200" not in device:
        fault = f"the device is {device!r}"
    if name == "v6e" and not fault and device != PJRT_CPU:
        device, fault = TPU_KINDS.get(device, device), unknown_tpu(device)
    return Found(device, fault and f"no {WANTED[name]}: {fault}")


def unknown_tpu(kind: str) -> str | None:
    """Why the lane does not run on a PJRT device of this kind; its name is the lane's promise."""
    return None if kind in TPU_KINDS else f"the device is {kind!r}, known are {', '.join(TPU_KINDS)}"


WANTED = {
    "h200": "NVIDIA H200 seen by torch.cuda (needs the GPU, its driver and a CUDA build of torch)",
    "v6e": "torch_xla (run `tox -e v6e`, or: uv pip install --override xla/overrides.txt -e '.[v6e]' && "
    "python xla/make_cuda_stubs.py)",
}
PROBES = {
    "h200": "import torch; print(torch.cuda.get_device_name(0))",
    "v6e": "import torch_xla.runtime as r\n"
    "if r.device_type() == 'TPU':\n"
    "    from torch_xla.core.xla_model import xla_device_kind\n"
    "print(xla_device_kind() if r.device_type() == 'TPU' else f'pjrt-{r.device_type().lower()}')",
}
# What a row of the v6e lane was measured on: a stand-in's programs, the TPU's own compiler without a TPU, a TPU.
PJRT_CPU, V6E_AOT, V6E = "pjrt-cpu", "v6e-aot", "v6e"
# Chips as PJRT names their kind; libtpu's compiler says the same of a topology that is not there.
TPU_KINDS = {"TPU v6 lite": V6E, "TPU v6e": V6E}


def needs_tpu(reason: str, *rows: str) -> pytest.MarkDecorator:
    """Only a v6e can show these rows. Elsewhere the test is not run and they are listed so, neither red nor green."""
    return pytest.mark.needs_tpu(reason, rows)


def _probe(program: str) -> tuple[str, str | None]:
    """Runs a program that prints a device -> device, fault in one line."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer in {PROBE_SECONDS} s"
    if done.returncode == 0 and done.stdout.strip():
        return done.stdout.strip().splitlines()[-1], None
    lines = done.stderr.strip().splitlines()
    return "", lines[-1] if lines else f"the probe ended with {done.returncode}"


def _no_compiler() -> str | None:
    """Inductor compiles with $CXX, else with g++; another compiler on PATH does not help it."""
    chosen = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    path = shutil.which(chosen[0])
    if path is None:
        return f"no C++ compiler ({chosen[0]} is not on PATH): install g++ or set CXX"
    try:
        done = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True)
        fault = f"--version ended with {done.returncode}" if done.returncode else None
    except OSError as error:
        fault = error.strerror
    return fault and f"no working C++ compiler ({chosen[0]}: {fault}): install g++ or set CXX"


def _no_avx2(cpuinfo: str) -> str | None:
    """The lane generates AVX2 code everywhere. Nothing is said of a machine that does not list its instructions."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags is None or "avx2" in flags[1].split():
        return None
    return "this CPU has no AVX2, which the reviewed code is generated for: run the lane on one that has"
