"""Detects whether this machine has a lane's device, in a subprocess."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from bumpgate.core.errors import text_lines
from bumpgate.core.lanes import Lane, how_to_declare
from bumpgate.process.host import read_or_empty

PROBE_SECONDS = 180
PJRT_CPU, V6E = "pjrt-cpu", "v6e"
# PJRT's names of the chips; libtpu's compiler uses the same names for a topology without hardware.
TPU_KINDS = {"TPU v6 lite": V6E, "TPU v6e": V6E}
TPU = (
    "import json, torch_xla.runtime as r\n"
    "if r.device_type() == 'TPU':\n"
    "    from torch_xla.core.xla_model import xla_device_kind\n"
    "print(json.dumps([xla_device_kind() if r.device_type() == 'TPU' else f'pjrt-{r.device_type().lower()}']))"
)
INSTALL_XLA = "torch_xla (run `tox -e {0}`, or: bumpgate lanes install {0})"


@dataclass(frozen=True)
class DetectedDevice:
    """Result of the device search. device: what the lane would run on. missing: why it cannot run, and the fix."""

    device: str
    missing: str | None = None


def detect(lane: Lane) -> str | None:
    """Return why the lane cannot run on this machine, in one line, or None if it can."""
    return find(lane).missing


@cache
def find(lane: Lane) -> DetectedDevice:
    """Look for the lane's device.

    torch is imported in a subprocess: a crash on import, or device memory taken for a context, must not affect the
    process that judges.
    """
    missing = _no_compiler() if "c++" in lane.needs else None
    if not missing and "avx2" in lane.needs:
        missing = _no_avx2(read_or_empty("/proc/cpuinfo"))
    if lane.device == "cpu" or missing:
        return DetectedDevice("cpu" if lane.device == "cpu" else "", missing)
    if lane.device == "xla":
        found, fault = _probe(TPU)
        device = found[0] if found else ""
        if not fault and device != PJRT_CPU:
            device, fault = TPU_KINDS.get(device, device), unknown_tpu(device)
        return DetectedDevice(device, fault and f"no {INSTALL_XLA.format(lane.name)}: {fault}")
    found, fault = _probe(_cuda_program(lane))
    name, count, capability = found or ("", 1, "")
    fault = fault or _other_gpu(lane, name, count, capability)
    gpu = f"NVIDIA {lane.gpu or 'GPU'}"
    required = f"{gpu} seen by torch.cuda (needs the GPU, its driver and a CUDA build of torch)"
    return DetectedDevice(name, fault and f"no {required}: {fault}")


def _cuda_program(lane: Lane) -> str:
    """Return a program that prints the name of the first GPU, and the number and capability if the lane states them."""
    count = "c.device_count()" if lane.count > 1 else "1"
    capability = "'.'.join(map(str, c.get_device_capability(0)))" if lane.capability else "''"
    return f"import json, torch; c = torch.cuda; print(json.dumps([c.get_device_name(0), {count}, {capability}]))"


def _other_gpu(lane: Lane, name: str, count: int, capability: str) -> str | None:
    if not re.search(lane.gpu, name):
        model = re.sub(r"NVIDIA |GeForce |Tesla ", "", name).split(" ")[0]
        return f"the device is {name!r}; {how_to_declare(model.lower(), model)}"
    if count < lane.count:
        return f"the lane needs {lane.count} GPUs and torch sees {count}: set CUDA_VISIBLE_DEVICES, or lower count"
    if capability != lane.capability:
        return f"the lane declares capability {lane.capability} and the device has {capability}"
    return None


def unknown_tpu(kind: str) -> str | None:
    """Return why the lane does not run on a PJRT device of this kind, or None: a lane is named after its device."""
    return None if kind in TPU_KINDS else f"the device is {kind!r} (expected one of {', '.join(TPU_KINDS)})"


def _probe(program: str) -> tuple[list[Any], str | None]:
    """Run a program that prints a JSON list. Return the list (empty on a fault), and the fault in one line."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return [], f"no answer in {PROBE_SECONDS} s"
    if done.returncode == 0 and done.stdout.strip():
        return list(json.loads(done.stdout.strip().splitlines()[-1])), None
    lines = text_lines(done.stderr)
    return [], lines[-1] if lines else f"the probe ended with {done.returncode}"


def _no_compiler() -> str | None:
    """Return why Inductor has no compiler, or None. It uses $CXX, else g++; no other compiler on PATH."""
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
    """Return why this CPU cannot run AVX2 code; None also if it does not list its instruction sets."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags is None or "avx2" in flags[1].split():
        return None
    return "this CPU has no AVX2, which the reviewed code is generated for: run the lane on one that has"
