"""Doctor's last parts: torch imported in subprocesses without a device, its instruments, then the accelerator."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from bumpgate.core import lanes
from bumpgate.core.errors import one_line
from bumpgate.doctor import abi
from bumpgate.doctor.findings import Check, Defect, NotRun, Part, Site
from bumpgate.doctor.version_checks import REBUILD
from bumpgate.process.child import ChildFault

IMPORT_SECONDS = 180
CANARY_SECONDS = 600
# No device may be used before all other checks pass: a context that a broken torch opens stays on the GPU.
BLIND = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
IMPORT = "import json, torch; print(json.dumps([torch.__version__, str(torch.ones(2).sum().item())]))"
CANARIES = (
    "import json; from bumpgate.plugin.instruments.canaries import prove; "
    "from suites.support.canaries import CANARIES; print(json.dumps(prove(CANARIES)))"
)
CONFIGURATION = """
import json, pkgutil, sys
def read(name):
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
print(json.dumps({name: read(name) for name in sys.argv[1:]}))
"""
DEVICE = (
    "import dataclasses, json, pathlib, sys; from bumpgate.core import lanes; "
    "from bumpgate.plugin.devices import find; "
    "print(json.dumps(dataclasses.asdict(find(lanes.require(pathlib.Path.cwd(), sys.argv[1])))))"
)
Found = Iterator[Defect | NotRun | str]


def torch_imports(site: Site) -> Found:
    """BG301: torch imports and adds two numbers, in a subprocess that may crash."""
    python = site.interpreter.python
    try:
        version, total = site.interpreter.json("-c", IMPORT, timeout=IMPORT_SECONDS, extra=BLIND)
    except ChildFault as fault:
        yield Defect(
            "BG301",
            f"`import torch` fails: {fault}",
            f"{python} -X faulthandler -c 'import torch', then pip install --force-reinstall 'torch{site.row.torch}'",
        )
        return
    if total != "2.0":
        yield Defect("BG301", f"torch {version} adds 1 and 1 to {total}", "reinstall torch")
    yield version


def instruments(site: Site) -> Found:
    """BG302: every canary reads its known count; a counter stuck at 0 would make all of its rows look good."""
    with tempfile.TemporaryDirectory() as cache:
        extra = {**BLIND, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        try:
            reasons = site.interpreter.json("-c", CANARIES, timeout=CANARY_SECONDS, extra=extra)
        except ChildFault as fault:
            yield Defect(
                "BG302", f"the canaries do not run: {fault}", f"pytest -m {site.lane} suites/canaries"
            )
            return
    for name, reason in reasons.items():
        if reason:
            yield Defect(
                "BG302",
                f"canary {name}: {one_line(reason, 200)}",
                f"pytest -m {site.lane} suites/canaries; its instrument, in bumpgate/plugin/instruments or "
                "suites/support/instruments, reads a name that torch may have changed",
            )
    if not reasons:
        yield Defect("BG302", "no canary ran", f"pytest -m {site.lane} suites/canaries")
    yield f"{len(reasons)} canaries agree"


def variables_have_effect(site: Site) -> Found:
    """BG303: the contract's variables change the torch settings that they are meant for.

    One of them is the autotuning timeout, without which a hanging candidate blocks the compilation forever.
    """
    tables = site.contract["environment"]
    rules = {n: r for n, r in {**tables["always"], **tables["inert"]}.items() if "shows" in r}
    expected_vars = {n: r["value"] for n, r in tables["always"].items()}
    fields = sorted({r["shows"] for r in rules.values()})
    try:
        read = site.interpreter.json(
            "-c", CONFIGURATION, *fields, timeout=IMPORT_SECONDS, extra={**BLIND, **expected_vars}
        )
    except ChildFault as fault:
        yield Defect(
            "BG303", f"torch's configuration cannot be read: {fault}", f"pytest -m {site.lane} suites/launch"
        )
        return
    for name, rule in rules.items():
        if read[rule["shows"]] != rule["holds"]:
            yield Defect(
                "BG303",
                f"{rule['shows']} is {one_line(read[rule['shows']], 80)} where {name} should leave it {rule['holds']}",
                "clear the sitecustomize or .pth that sets it; if torch renamed it: the contract's line, after review",
            )
    yield f"{len(rules)} configuration fields read back"


def device(site: Site) -> Found:
    """BG401: the lane's device is present."""
    try:
        found = site.interpreter.json("-c", DEVICE, site.lane, timeout=IMPORT_SECONDS + 60)
    except ChildFault as fault:
        yield Defect(
            "BG401", f"the device cannot be detected: {fault}", f"pytest -m {site.lane} --collect-only"
        )
        return
    if found["missing"]:
        yield Defect("BG401", found["missing"], f"run on a machine of lane {site.lane}")
    yield found["device"]


def kernel_wheels_run(site: Site) -> Found:
    """BG402: each installed kernel wheel computes what its reference does, on shapes of the model."""
    installed = {n: s for n, s in site.smoke.items() if site.inventory.installed(n)}
    reachable = {"cpu", lanes.require(site.root, site.lane).device}
    for name, smoke in installed.items():
        if smoke.device not in reachable:
            yield NotRun(f"{name}: needs {smoke.device}, which lane {site.lane} does not have")
    runnable = {name: smoke for name, smoke in installed.items() if smoke.device in reachable}
    for fault in abi.run_cases(runnable, site.interpreter):
        yield Defect("BG402", fault.reason, REBUILD.format(fault.wheel))
    yield (
        ", ".join(f"{n}: {len(s.cases)} cases" for n, s in installed.items())
        or "no kernel wheel is installed"
    )


CHECKS = (
    Check("BG301", Part.INSTRUMENTS, "torch imports", torch_imports),
    Check("BG302", Part.INSTRUMENTS, "instruments", instruments, needs=("BG301",)),
    Check("BG303", Part.INSTRUMENTS, "variables and timeouts", variables_have_effect, needs=("BG301",)),
    Check("BG401", Part.ACCELERATOR, "device", device),
    Check("BG402", Part.ACCELERATOR, "kernel wheels run", kernel_wheels_run),
)
