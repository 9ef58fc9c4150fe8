"""Whether this machine is one of a lane's, looked for in a process of its own."""

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

from bumpgate.lanes import Lane, how_to_declare
from bumpgate.processes.host import read_or_empty

PROBE_SECONDS = 180
PJRT_CPU, V6E = "pjrt-cpu", "v6e"
# Chips as PJRT names their kind; libtpu's compiler says the same of a topology that is not there.
TPU_KINDS = {"TPU v6 lite": V6E, "TPU v6e": V6E}
TPU = (
    "import json, torch_xla.runtime as r\n"
    "if r.device_type() == 'TPU':\n"
    "    from torch_xla.core.xla_model import xla_device_kind\n"
    "print(json.dumps([xla_device_kind() if r.device_type() == 'TPU' else f'pjrt-{r.device_type().lower()}']))"
)
INSTALL_XLA = (
    "torch_xla (run `tox -e v6e`, or: uv pip install --override xla/overrides.txt -e '.[v6e]' && "
    "python xla/make_cuda_stubs.py)"
)


@dataclass(frozen=True)
class Found:
    """device: what the lane would run on here. missing: why it cannot run, in one line with the remedy."""

    device: str
    missing: str | None = None


def detect(lane: Lane) -> str | None:
    """None where the lane can run on this machine, else the reason in one line."""
    return find(lane).missing


@cache
def find(lane: Lane) -> Found:
    """Looks for the lane's device.

    Torch is imported in a process of its own: one that crashes on import, or takes device memory for a
    context, must not do so in the process that judges.
    """
    missing = _no_compiler() if "c++" in lane.needs else None
    if not missing and "avx2" in lane.needs:
        missing = _no_avx2(read_or_empty("/proc/cpuinfo"))
    if lane.device == "cpu" or missing:
        return Found("cpu" if lane.device == "cpu" else "", missing)
    if lane.device == "xla":
        found, fault = _probe(TPU)
        device = found[0] if found else ""
        if not fault and device != PJRT_CPU:
            device, fault = TPU_KINDS.get(device, device), unknown_tpu(device)
        return Found(device, fault and f"no {INSTALL_XLA}: {fault}")
    found, fault = _probe(_cuda_program(lane))
    name, count, capability = found or ("", 1, "")
    fault = fault or _other_gpu(lane, name, count, capability)
    gpu = f"NVIDIA {lane.gpu or 'GPU'}"
    required = f"{gpu} seen by torch.cuda (needs the GPU, its driver and a CUDA build of torch)"
    return Found(name, fault and f"no {required}: {fault}")


def _cuda_program(lane: Lane) -> str:
    """Prints the name of the first GPU, then the number of GPUs and the capability where the lane states them."""
    count = "c.device_count()" if lane.count > 1 else "1"
    capability = "'.'.join(map(str, c.get_device_capability(0)))" if lane.capability else "''"
    return f"import json, torch; c = torch.cuda; print(json.dumps([c.get_device_name(0), {count}, {capability}]))"


def _other_gpu(lane: Lane, name: str, count: int, capability: str) -> str | None:
    """How the GPU differs from the lane's; None where it does not."""
    if not re.search(lane.gpu, name):
        model = re.sub(r"NVIDIA |GeForce |Tesla ", "", name).split(" ")[0]
        return f"the device is {name!r}; {how_to_declare(model.lower(), model)}"
    if count < lane.count:
        return f"the lane needs {lane.count} GPUs and torch sees {count}: set CUDA_VISIBLE_DEVICES, or lower count"
    if capability != lane.capability:
        return f"the lane declares capability {lane.capability} and the device has {capability}"
    return None


def unknown_tpu(kind: str) -> str | None:
    """Why the lane does not run on a PJRT device of this kind; its name is the lane's promise."""
    return None if kind in TPU_KINDS else f"the device is {kind!r}, known are {', '.join(TPU_KINDS)}"


def _probe(program: str) -> tuple[list[Any], str | None]:
    """Runs a program that prints a JSON list -> the list, empty on a fault; the fault in one line."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return [], f"no answer in {PROBE_SECONDS} s"
    if done.returncode == 0 and done.stdout.strip():
        return list(json.loads(done.stdout.strip().splitlines()[-1])), None
    lines = done.stderr.strip().splitlines()
    return [], lines[-1] if lines else f"the probe ended with {done.returncode}"


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
    """Why this CPU cannot run AVX2 code. Nothing is said of a machine that does not list its instructions."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags is None or "avx2" in flags[1].split():
        return None
    return "this CPU has no AVX2, which the reviewed code is generated for: run the lane on one that has"
