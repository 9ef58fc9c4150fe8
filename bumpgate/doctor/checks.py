"""Doctor's checks in their order: the environment, the installed packages, torch in subprocesses, the accelerator.

A run that would fail at its cache directory must not occupy a GPU first. torch is imported in subprocesses only, so
that a missing or crashing torch is a line of the report.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from bumpgate.core import lanes
from bumpgate.core.errors import one_fault, one_line
from bumpgate.core.toml import tomllib
from bumpgate.doctor import abi
from bumpgate.doctor.examination import Check, Defect, Examine, Found, NotRun, Part, Site
from bumpgate.env import store
from bumpgate.env.lane import lane_lock
from bumpgate.env.locks import read_lock
from bumpgate.env.packages import Mismatch, mismatches, release, satisfies
from bumpgate.process.child import ChildFault, run

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a quota, a limit on file sizes
COMPILE_SECONDS = 120
# OpenMP and a vector header, as every kernel that Inductor writes for a CPU.
CPP = "#include <omp.h>\n#include <vector>\nint f(std::vector<int> v) { return v.size() + omp_get_max_threads(); }\n"
DRIVER_SECONDS = 60
DRIVER_FILE = Path("/proc/driver/nvidia/version")
# Builds from source, against the installed torch.
REBUILD = "pip install --no-build-isolation --no-binary :all: --force-reinstall --no-deps {}"
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

CHECKS: list[Check] = []


def check(code: str, title: str, *needs: str) -> Callable[[Examine], Examine]:
    """Add a function to CHECKS; the first digit of the code is its part."""

    def add(examine: Examine) -> Examine:
        CHECKS.append(Check(code, list(Part)[int(code[2]) - 1], title, examine, needs))
        return examine

    return add


@check("BG101", "interpreter")
def interpreter(site: Site) -> Found:
    """BG101: the interpreter runs a program."""
    try:
        yield f"{site.inventory.implementation} {site.inventory.python}, {site.interpreter.python}"
    except ChildFault as fault:
        reason = f"{site.interpreter.python} does not answer: {fault}"
        yield Defect(reason, "name another interpreter with --python")


@check("BG102", "python", "BG101")
def python(site: Site) -> Found:
    """BG102: the interpreter's version is one that the lane was adopted with."""
    found, expected = site.inventory, site.row.python
    if not satisfies(found.python, expected) or found.implementation != "CPython":
        reason = f"{found.implementation} {found.python}, lane {site.lane} requires CPython {expected}"
        yield Defect(reason, f"uv venv --python '{expected}' .venv, then --python .venv/bin/python")
    yield f"{found.python} is one of {expected}"


@check("BG103", "python variables")
def python_variables(site: Site) -> Found:
    """BG103: no variable of Python itself breaks the assumptions of the suites."""
    for name, rule in site.contract["wheels"]["python"].items():
        if site.env_vars.get(name):
            yield Defect(f"{name}={site.env_vars[name]}: {rule['reason']}", f"unset {name}")
    yield "none that the contract rejects"


@check("BG104", "package `kernels`", "BG101")
def kernels(site: Site) -> Found:
    """BG104: `import kernels` finds this repository's package. PyPI has another one of this name."""
    found, ours = site.inventory, (site.root / "kernels").resolve()
    export = f"export PYTHONPATH={shlex.quote(str(site.root))}"
    if found.kernels is None or found.kernels.resolve() != ours:
        reason = f"`import kernels` is {found.kernels or 'nothing'}, not {site.root / 'kernels'}"
        yield Defect(reason, f"{site.interpreter.python} -m pip uninstall kernels, or {export}")
    other = found.kernels_of_scripts
    if other is None or other.resolve() == ours:
        yield "ours"
        return
    on_path = [Path(p).resolve() for p in site.env_vars.get("PYTHONPATH", "").split(os.pathsep) if p]
    if other.parent.resolve() in on_path:
        reason = f"PYTHONPATH puts {other} before ours for programs that are started by their file"
        yield Defect(reason, export)
    yield f"ours; {other} is installed as well, later on the path"


@check("BG105", "contract document")
def contract_document(site: Site) -> Found:
    """BG105: contract.toml is the reviewed one."""
    lock = site.root / "launch/contract.lock"
    command = "sha256sum launch/contract.toml > launch/contract.lock"
    try:
        pinned = (lock.read_text().split() or [""])[0]
    except OSError as error:
        yield Defect(f"contract.lock cannot be read ({error.strerror})", f"after review: {command}")
        return
    digest = hashlib.sha256((site.root / "launch/contract.toml").read_bytes()).hexdigest()
    if digest != pinned:
        reason = f"contract.toml has sha256 {digest[:12]}, reviewed was {pinned[:12] or 'none'}"
        yield Defect(reason, f"git checkout launch/contract.toml; after review: {command}")
    yield f"sha256 {digest[:12]}, as reviewed"


@check("BG106", "contract variables")
def contract_variables(site: Site) -> Found:
    """BG106: no variable contradicts the contract. An absent one is not a defect: the launcher adds it."""
    given = site.env_vars
    for kind, rules in site.contract["environment"].items():
        for name, rule in rules.items():
            value, reason = given.get(name, ""), rule["reason"]
            unset = f"unset {name}"
            if kind == "always" and given.get(name, rule["value"]) != rule["value"]:
                yield Defect(f"{name}={value}, the contract requires {rule['value']}: {reason}", unset)
            elif kind == "rank" and name in given and not given.get("LOCAL_RANK"):
                yield Defect(f"{name} is set without LOCAL_RANK: {reason}", unset)
            elif kind == "refused" and value:
                yield Defect(f"{name}={value}: {reason}", unset)
            elif kind == "inert" and value:
                yield Defect(f"{name} does nothing: {reason}", unset, warning=True)
    yield "none contradicts the contract"


@check("BG107", "cache directories")
def caches(site: Site) -> Found:
    """BG107: a cache directory does not exist; BG108: cannot be written; BG109: its disk is full."""
    minimum = site.contract["caches"]["minimum_free_bytes"]
    home = Path(site.env_vars.get("HOME") or Path.home()) / ".cache"
    default = Path(site.env_vars.get("XDG_CACHE_HOME") or home) / "bumpgate"
    shown = []
    for name, rule in site.contract["caches"]["directory"].items():
        if value := site.env_vars.get(name):
            yield from _directory(Path(value), f"{name}={value}", name, minimum)
            shown.append(value)
        else:  # the launcher creates it, in the first existing parent
            place = default / rule["folder"]
            parent = next(p for p in place.parents if p.exists())
            yield from _directory(parent, f"{name} is not set, and its default {place}", name, minimum)
            shown.append(f"{place} (default)")
    yield ", ".join(shown)


@check("BG110", "temporary directory")
def temporary(site: Site) -> Found:
    """BG110: the temporary directory, where compilers write before anything reaches a cache."""
    place = Path(site.env_vars.get("TMPDIR") or tempfile.gettempdir())
    if fault := _write_fault(place):
        yield Defect(f"TMPDIR={place}: {fault[1]}", "export TMPDIR to a writable directory with space")
    yield str(place)


@check("BG111", "C++ compiler", "BG110")
def compiler(site: Site) -> Found:
    """BG111: Inductor compiles with $CXX, else with g++; the one that it will use compiles a program here."""
    chosen = shlex.split(site.env_vars.get("CXX", "")) or ["g++"]
    path = shutil.which(chosen[0], path=site.env_vars.get("PATH"))
    fix = "apt-get install g++, or export CXX to a C++ compiler"
    if path is None:
        yield Defect(f"no C++ compiler: {chosen[0]} is not on PATH", fix)
        return
    try:
        with tempfile.TemporaryDirectory() as directory:
            (source := Path(directory) / "probe.cpp").write_text(CPP)
            flags = ["-fopenmp", "-fPIC", "-shared", str(source), "-o", str(source.with_suffix(".so"))]
            run([path, *chosen[1:], *flags], site.root, site.env_vars, COMPILE_SECONDS)
    except ChildFault as fault:
        yield Defect(f"{chosen[0]} does not compile a small OpenMP library: {fault}", fix)
    yield path


def _directory(place: Path, what: str, name: str, minimum: int) -> Iterator[Defect]:
    """Yield the defects of one directory: missing, not writable, full."""
    elsewhere = f"export {name} to a writable directory on a volume that outlives the run"
    if not place.exists():
        make = f"mkdir -p {shlex.quote(str(place))}, or {elsewhere}"
        yield Defect(f"{what} does not exist", make, code="BG107")
        return
    if not place.is_dir():
        yield Defect(f"{what}: {place} is a file", elsewhere, code="BG107")
        return
    fault = _write_fault(place)
    if fault and fault[0] not in FULL:
        yield Defect(f"{what} cannot be written: {fault[1]}", elsewhere, code="BG108")
        return
    free = 0 if fault else shutil.disk_usage(place).free
    if fault or free < minimum:
        why = fault[1] if fault else f"{free >> 20} MiB free"
        reason = f"{what}: {why}, the contract requires {minimum >> 20} MiB"
        yield Defect(reason, f"free space, or {elsewhere}", code="BG109")


def _write_fault(place: Path) -> tuple[int, str] | None:
    """Return errno and message of a failed 4 KiB write, or None. Root ignores mode bits, so a file is written."""
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return error.errno or 0, error.strerror or str(error)
    return None


@check("BG201", "torch")
def torch_installed(site: Site) -> Found:
    """BG201: torch is installed. BG203: its metadata and its files are of the same build."""
    found, install = site.inventory, f"{site.interpreter.python} -m pip install 'torch{site.row.torch}'"
    distributions = found.distributions.get("torch", ())
    if found.torch is None or not found.torch_version:
        yield Defect("torch is not installed", install)
        return
    if len(distributions) > 1:
        places = ", ".join(f"{d.version} in {d.place}" for d in distributions)
        fix = f"pip uninstall torch until none is left, then {install}"
        yield Defect(f"two torch distributions: {places}", fix, code="BG203")
    elif distributions and not _one_build(distributions[0].version, found.torch_version):
        stated = f"{distributions[0].version}, {found.torch} states {found.torch_version}"
        fix = f"pip uninstall torch, clear PYTHONPATH, then {install}"
        yield Defect(f"the metadata states torch {stated}", fix, code="BG203")
    yield f"{found.torch_version} in {found.torch}"


def _one_build(metadata: str, files: str) -> bool:
    """PyPI's metadata leaves out the local label that the files have."""
    try:
        a, b = Version(metadata), Version(files)
    except ValueError:
        return metadata == files
    return a.public == b.public and a.local in (None, b.local)


@check("BG202", "versions", "BG201")
def versions(site: Site) -> Found:
    """BG202: torch against the reference set; BG204: triton and other packages; BG205: kernel wheels."""
    found = site.inventory
    wheels = {wheel.name for wheel in site.row.wheels}
    wrong = {m.package for m in mismatches(site.row, found)}
    for m in mismatches(site.row, found):
        if m.package in wheels:
            yield Defect(_differs(site, m), _install_wheels(site, wrong), code="BG205")
        elif m.package != "python":  # BG102
            code = "BG202" if m.package == "torch" else "BG204"
            yield Defect(_differs(site, m), f"pip install '{m.package}{m.expected}'", code=code)
    others = "".join(f", {name} {spec}" for name, spec in site.row.packages.items())
    yield f"as in {site.reference.source}: torch {site.row.torch or 'of any version'}{others}"


def _install_wheels(site: Site, wrong: Container[str]) -> str:
    """Return the command that installs the kernel wheels among `wrong`: the adopted files, where the store has them.

    An adopted wheel fits the adopted torch only; for another one the command shows what does.
    """
    python = str(site.interpreter.python)
    if "torch" in wrong:
        return shlex.join(["bumpgate", "wheels", "plan", "--lane", site.lane, "--python", python])
    wheels = {w.name: w.version for w in site.row.wheels if w.name in wrong}
    lock = lane_lock(site.root, site.lane)
    locked = [p for p in read_lock(lock).packages if p.name in wheels] if lock.exists() else []
    flags = ["--no-build-isolation", *store.find_links(locked)]
    pins = [f"{name}=={version}" if version else name for name, version in wheels.items()]
    return shlex.join([python, "-m", "pip", "install", *flags, *pins])


def _differs(site: Site, m: Mismatch) -> str:
    installed = f"{m.found} is installed" if m.found else "is not installed"
    if not site.own_lock:
        return f"{m.package} {installed}, lane {site.lane} was adopted with {m.expected}"
    return f"{m.package} {installed}, {site.reference.source} has {m.expected or 'it'}"


@check("BG206", "suite packages")
def requirements(site: Site) -> Found:
    """BG206: the packages that the suites import in addition to torch."""
    found = site.inventory
    markers = {"python_version": ".".join(found.python.split(".")[:2]), "python_full_version": found.python}
    with one_fault("pyproject.toml has no group `suite`", fix="restore it: git checkout pyproject.toml"):
        groups = tomllib.loads((site.root / "pyproject.toml").read_text(encoding="utf-8"))[
            "dependency-groups"
        ]
        every = [Requirement(text) for text in groups["suite"]]
    required = [r for r in every if r.marker is None or r.marker.evaluate(markers)]
    lacking: dict[str, str] = {}
    for r in required:
        installed = found.installed(r.name)
        if installed is None or not r.specifier.contains(installed.version, prereleases=True):
            lacking[f"{r.name}{r.specifier}"] = installed.version if installed else "absent"
    if lacking:
        needed = ", ".join(f"{text} ({has})" for text, has in lacking.items())
        command = shlex.join([str(site.interpreter.python), "-m", "pip", "install", *lacking])
        yield Defect(f"the suites need {needed}", command)
    yield f"{len(required)} packages of the group `suite`"


@check("BG207", "kernel wheels", "BG201")
def kernel_wheels(site: Site) -> Found:
    """BG207: a label names another torch. BG208: an extension needs symbols that this torch does not have.

    Of the kernel wheels, and of everything else that is linked against torch.
    """
    found = site.inventory
    names = {canonicalize_name(n) for n in (*site.smoke, *(w.name for w in site.row.wheels))}
    wheels = [w for name in sorted(names) if (w := found.installed(name))]
    if tool := abi.missing_tool():
        if wheels:
            reason = f"{tool} is not on PATH: extensions cannot be audited"
            yield Defect(reason, "apt-get install binutils", code="BG208")
        else:
            yield NotRun(f"{tool} is not on PATH: no package is audited; apt-get install binutils")
        return
    wheels += [w for w in abi.built_on_torch(found) if canonicalize_name(w.name) not in names]
    for wheel in wheels:
        rebuild = REBUILD.format(wheel.name)
        try:
            for fault in abi.audit(wheel, found):
                yield Defect(fault.reason, rebuild, code="BG207" if fault.kind == "label" else "BG208")
        except abi.ToolError as error:
            yield Defect(f"{wheel.name} cannot be audited: {error}", rebuild, code="BG208")
    extensions = sum(len(wheel.extensions) for wheel in wheels)
    yield f"{len(wheels)} wheels, {extensions} extensions need nothing that this torch lacks"


@check("BG209", "CUDA build", "BG201")
def cuda_build(site: Site) -> Found:
    """BG209: the release of torch has this CUDA build (experimental and legacy ones give a warning)."""
    found, fix = site.inventory, f"pip install 'torch{site.row.torch}'"
    cuda, torch = found.cuda, found.torch_version
    if cuda is None or not torch:
        yield "no CUDA build"
        return
    rule = site.contract["wheels"]["cuda"].get(cuda)
    if rule is None:
        yield Defect(f"torch {torch}: the contract lists no build for CUDA {cuda}", fix, warning=True)
    elif not _holds(rule["published"], torch):
        yield Defect(f"torch {torch}: CUDA {cuda} is {rule['reason']}", fix)
    else:
        for kind in ("experimental", "legacy"):
            if kind in rule and _holds(rule[kind], torch):
                yield Defect(f"CUDA {cuda} is {kind}: {rule['reason']}", fix, warning=True)
    yield f"CUDA {cuda}"


@check("BG210", "driver")
def driver(site: Site) -> Found:
    """BG210: a lane with a GPU has a driver, new enough for torch's CUDA and for the lane's row."""
    if lanes.require(site.root, site.lane).device != "cuda":
        yield "the lane needs none"
        return
    cuda, found = site.inventory.cuda, driver_version(site.env_vars, site.root)
    rule: Mapping[str, str] = site.contract["wheels"]["cuda"].get(cuda or "", {})
    bounds = [text for text in (rule.get("driver"), str(site.row.driver or "")) if text]
    oldest = max(bounds, key=Version, default="0")
    if found is None or Version(found) < Version(oldest):
        has = f"driver {found}" if found else "no NVIDIA driver answers"
        fix = f"install an NVIDIA driver of at least {oldest}: https://www.nvidia.com/drivers"
        yield Defect(f"{has}, {f'CUDA {cuda}' if cuda else f'lane {site.lane}'} needs {oldest}", fix)
    yield f"{found}, at least {oldest} is needed"


def driver_version(env_vars: Mapping[str, str], root: Path) -> str | None:
    """Return the driver version from nvidia-smi, else from the loaded kernel module; None if neither reports it."""
    smi = shutil.which("nvidia-smi", path=env_vars.get("PATH"))
    output = ""
    if smi:
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        # nvidia-smi may find no driver, or the driver hangs: the module's file may still report it.
        with suppress(ChildFault):
            output = run(query, root, env_vars, DRIVER_SECONDS)
    if not output.strip() and DRIVER_FILE.is_file():
        output = (re.search(r"Module\s+(?:for \S+\s+)?(\d[\d.]+)", DRIVER_FILE.read_text()) or [""])[-1]
    version = re.match(r"\d+(\.\d+)*", output.strip())
    return version[0] if version else None


def _holds(rule: str, torch: str) -> bool:
    try:
        return SpecifierSet(rule).contains(release(torch))
    except ValueError:
        return False


@check("BG301", "torch imports")
def torch_imports(site: Site) -> Found:
    """BG301: torch imports and adds two numbers, in a subprocess that may crash."""
    try:
        version, total = site.interpreter.json("-c", IMPORT, timeout=IMPORT_SECONDS, extra=BLIND)
    except ChildFault as fault:
        show = f"{site.interpreter.python} -X faulthandler -c 'import torch'"
        fix = f"{show}, then pip install --force-reinstall 'torch{site.row.torch}'"
        yield Defect(f"`import torch` fails: {fault}", fix)
        return
    if total != "2.0":
        yield Defect(f"torch {version} adds 1 and 1 to {total}", "reinstall torch")
    yield version


@check("BG302", "instruments", "BG301")
def instruments(site: Site) -> Found:
    """BG302: every canary reads its known count; a counter stuck at 0 would make all of its rows look good."""
    command = f"pytest -m {site.lane} suites/canaries"
    with tempfile.TemporaryDirectory() as cache:
        extra = {**BLIND, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        try:
            reasons = site.interpreter.json("-c", CANARIES, timeout=CANARY_SECONDS, extra=extra)
        except ChildFault as fault:
            yield Defect(f"the canaries do not run: {fault}", command)
            return
    instrument = (
        "its instrument, in bumpgate/plugin/instruments or suites/support/instruments, reads a name that"
    )
    for name, reason in reasons.items():
        if reason:
            fix = f"{command}; {instrument} torch may have changed"
            yield Defect(f"canary {name}: {one_line(reason, 200)}", fix)
    if not reasons:
        yield Defect("no canary ran", command)
    yield f"{len(reasons)} canaries agree"


@check("BG303", "variables and timeouts", "BG301")
def variables_have_effect(site: Site) -> Found:
    """BG303: the contract's variables change the torch settings that they are meant for.

    One of them is the autotuning timeout, without which a hanging candidate blocks the compilation forever.
    """
    tables = site.contract["environment"]
    rules = {n: r for n, r in {**tables["always"], **tables["inert"]}.items() if "shows" in r}
    extra = BLIND | {n: r["value"] for n, r in tables["always"].items()}
    fields = sorted({r["shows"] for r in rules.values()})
    try:
        read = site.interpreter.json("-c", CONFIGURATION, *fields, timeout=IMPORT_SECONDS, extra=extra)
    except ChildFault as fault:
        yield Defect(f"torch's configuration cannot be read: {fault}", f"pytest -m {site.lane} suites/launch")
        return
    fix = (
        "clear the sitecustomize or .pth that sets it; if torch renamed it: the contract's line, after review"
    )
    for name, rule in rules.items():
        shown, holds = rule["shows"], rule["holds"]
        if read[shown] != holds:
            reason = f"{shown} is {one_line(read[shown], 80)} where {name} should leave it {holds}"
            yield Defect(reason, fix)
    yield f"{len(rules)} configuration fields read back"


@check("BG401", "device")
def device(site: Site) -> Found:
    """BG401: the lane's device is present."""
    try:
        found = site.interpreter.json("-c", DEVICE, site.lane, timeout=IMPORT_SECONDS + 60)
    except ChildFault as fault:
        yield Defect(f"the device cannot be detected: {fault}", f"pytest -m {site.lane} --collect-only")
        return
    if found["missing"]:
        yield Defect(found["missing"], f"run on a machine of lane {site.lane}")
    yield found["device"]


@check("BG402", "kernel wheels run")
def kernel_wheels_run(site: Site) -> Found:
    """BG402: each installed kernel wheel computes what its reference does, on shapes of the model."""
    installed = {n: s for n, s in site.smoke.items() if site.inventory.installed(n)}
    reachable = {"cpu", lanes.require(site.root, site.lane).device}
    for name, smoke in installed.items():
        if smoke.device not in reachable:
            yield NotRun(f"{name}: needs {smoke.device}, which lane {site.lane} does not have")
    runnable = {name: smoke for name, smoke in installed.items() if smoke.device in reachable}
    for fault in abi.run_cases(runnable, site.interpreter):
        yield Defect(fault.reason, REBUILD.format(fault.wheel))
    cases = ", ".join(f"{name}: {len(smoke.cases)} cases" for name, smoke in installed.items())
    yield cases or "no kernel wheel is installed"
