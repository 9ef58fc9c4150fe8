"""Doctor's second part: the installed packages, read from metadata and ELF files. Nothing here imports torch."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from bumpgate.core import lanes
from bumpgate.core.toml import tomllib
from bumpgate.doctor import abi
from bumpgate.doctor.findings import Check, Defect, NotRun, Part, Site
from bumpgate.env import store
from bumpgate.env.inventory import Inventory
from bumpgate.env.lane import lane_lock
from bumpgate.env.locks import read_lock
from bumpgate.env.packages import Mismatch, mismatches, release
from bumpgate.process.child import ChildFault, run

DRIVER_SECONDS = 60
DRIVER_FILE = Path("/proc/driver/nvidia/version")
# Builds from source, against the installed torch.
REBUILD = "pip install --no-build-isolation --no-binary :all: --force-reinstall --no-deps {}"
Found = Iterator[Defect | NotRun | str]


def torch_installed(site: Site) -> Found:
    """BG201: torch is installed. BG203: its metadata and its files are of the same build."""
    found, install = site.inventory, f"{site.interpreter.python} -m pip install 'torch{site.row.torch}'"
    distributions = found.distributions.get("torch", ())
    if found.torch is None or not found.torch_version:
        yield Defect("BG201", "torch is not installed", install)
        return
    if len(distributions) > 1:
        places = ", ".join(f"{d.version} in {d.place}" for d in distributions)
        yield Defect(
            "BG203",
            f"two torch distributions: {places}",
            f"pip uninstall torch until none is left, then {install}",
        )
    elif distributions and not _one_build(distributions[0].version, found.torch_version):
        yield Defect(
            "BG203",
            f"the metadata states torch {distributions[0].version}, {found.torch} states {found.torch_version}",
            f"pip uninstall torch, clear PYTHONPATH, then {install}",
        )
    yield f"{found.torch_version} in {found.torch}"


def _one_build(metadata: str, files: str) -> bool:
    """PyPI's metadata leaves out the local label that the files have."""
    try:
        a, b = Version(metadata), Version(files)
    except InvalidVersion:
        return metadata == files
    return a.public == b.public and a.local in (None, b.local)


def versions(site: Site) -> Found:
    """BG202: torch against the reference set; BG204: triton and other packages; BG205: kernel wheels."""
    found = site.inventory
    wheels = {wheel.name for wheel in site.row.wheels}
    wrong = {m.package for m in mismatches(site.row, found)}
    for m in mismatches(site.row, found):
        if m.package == "torch":
            yield Defect("BG202", _differs(site, m), f"pip install 'torch{m.expected}'")
        elif m.package in wheels:
            yield Defect("BG205", _differs(site, m), _install_wheels(site, wrong))
        elif m.package != "python":  # BG102
            yield Defect("BG204", _differs(site, m), f"pip install '{m.package}{m.expected}'")
    yield f"as in {site.reference.source}: torch {site.row.torch or 'of any version'}" + "".join(
        f", {name} {spec}" for name, spec in site.row.packages.items()
    )


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
    stored = [path.parent for p in locked for wheel in p.wheels if (path := store.find(wheel))]
    flags = ["--no-build-isolation", *(part for folder in stored for part in ("--find-links", str(folder)))]
    pins = [f"{name}=={version}" if version else name for name, version in wheels.items()]
    return shlex.join([python, "-m", "pip", "install", *flags, *pins])


def _differs(site: Site, m: Mismatch) -> str:
    installed = f"{m.found} is installed" if m.found else "is not installed"
    if not site.own_lock:
        return f"{m.package} {installed}, lane {site.lane} was adopted with {m.expected}"
    return f"{m.package} {installed}, {site.reference.source} has {m.expected or 'it'}"


def requirements(site: Site) -> Found:
    """BG206: the packages that the suites import in addition to torch."""
    found = site.inventory
    markers = {"python_version": ".".join(found.python.split(".")[:2]), "python_full_version": found.python}
    every = map(Requirement, _suite_requirements(site.root))
    required = [r for r in every if r.marker is None or r.marker.evaluate(markers)]
    lacking: dict[str, str] = {}
    for r in required:
        installed = found.installed(r.name)
        if installed is None or not r.specifier.contains(installed.version, prereleases=True):
            lacking[f"{r.name}{r.specifier}"] = installed.version if installed else "absent"
    if lacking:
        needed = ", ".join(f"{text} ({has})" for text, has in lacking.items())
        command = shlex.join([str(site.interpreter.python), "-m", "pip", "install", *lacking])
        yield Defect("BG206", f"the suites need {needed}", command)
    yield f"{len(required)} packages of the extra `suite`"


def _suite_requirements(root: Path) -> list[str]:
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project.get("optional-dependencies", {}).get("suite", ()))


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
            yield Defect("BG208", reason, "apt-get install binutils")
        else:
            yield NotRun(f"{tool} is not on PATH: no package is audited; apt-get install binutils")
        return
    wheels += [w for w in abi.built_on_torch(found) if canonicalize_name(w.name) not in names]
    for wheel in wheels:
        rebuild = REBUILD.format(wheel.name)
        try:
            for fault in abi.audit(wheel, found):
                yield Defect("BG207" if fault.kind == "label" else "BG208", fault.reason, rebuild)
        except abi.ToolError as error:
            yield Defect("BG208", f"{wheel.name} cannot be audited: {error}", rebuild)
    extensions = sum(len(wheel.extensions) for wheel in wheels)
    yield f"{len(wheels)} wheels, {extensions} extensions need nothing that this torch lacks"


def cuda_build(site: Site) -> Found:
    """BG209: the release of torch has this CUDA build (experimental and legacy ones give a warning)."""
    found, fix = site.inventory, f"pip install 'torch{site.row.torch}'"
    cuda, torch = _cuda(found), found.torch_version
    if cuda is None or not torch:
        yield "no CUDA build"
        return
    rule = site.contract["wheels"]["cuda"].get(cuda)
    if rule is None:
        yield Defect(
            "BG209", f"torch {torch}: the contract lists no build for CUDA {cuda}", fix, warning=True
        )
    elif not _holds(rule["published"], torch):
        yield Defect("BG209", f"torch {torch}: CUDA {cuda} is {rule['reason']}", fix)
    else:
        for kind in ("experimental", "legacy"):
            if kind in rule and _holds(rule[kind], torch):
                yield Defect("BG209", f"CUDA {cuda} is {kind}: {rule['reason']}", fix, warning=True)
    yield f"CUDA {cuda}"


def driver(site: Site) -> Found:
    """BG210: a lane with a GPU has a driver, new enough for torch's CUDA and for the lane's row."""
    if lanes.require(site.root, site.lane).device != "cuda":
        yield "the lane needs none"
        return
    cuda, found = _cuda(site.inventory), driver_version(site.env_vars, site.root)
    rule: Mapping[str, str] = site.contract["wheels"]["cuda"].get(cuda or "", {})
    bounds = [text for text in (rule.get("driver"), str(site.row.driver or "")) if text]
    oldest = max(bounds, key=Version, default="0")
    if found is None or Version(found) < Version(oldest):
        has = f"driver {found}" if found else "no NVIDIA driver answers"
        fix = f"install an NVIDIA driver of at least {oldest}: https://www.nvidia.com/drivers"
        yield Defect("BG210", f"{has}, {f'CUDA {cuda}' if cuda else f'lane {site.lane}'} needs {oldest}", fix)
    yield f"{found}, at least {oldest} is needed"


def driver_version(env_vars: Mapping[str, str], root: Path) -> str | None:
    """Return the driver version from nvidia-smi, else from the loaded kernel module; None if neither reports it."""
    smi = shutil.which("nvidia-smi", path=env_vars.get("PATH"))
    output = ""
    if smi:
        try:
            output = run(
                [smi, "--query-gpu=driver_version", "--format=csv,noheader"], root, env_vars, DRIVER_SECONDS
            )
        except ChildFault:
            output = (
                ""  # nvidia-smi finds no driver, or the driver hangs: the module's file may still report it
            )
    if not output.strip() and DRIVER_FILE.is_file():
        output = (re.search(r"Module\s+(?:for \S+\s+)?(\d[\d.]+)", DRIVER_FILE.read_text()) or [""])[-1]
    version = re.match(r"\d+(\.\d+)*", output.strip())
    return version[0] if version else None


def _cuda(found: Inventory) -> str | None:
    cuda = found.version.get("cuda")
    return str(cuda) if cuda else None


def _holds(rule: str, torch: str) -> bool:
    try:
        return SpecifierSet(rule).contains(release(torch))
    except InvalidVersion:
        return False


CHECKS = (
    Check("BG201", Part.VERSIONS, "torch", torch_installed),
    Check("BG202", Part.VERSIONS, "versions", versions, needs=("BG201",)),
    Check("BG206", Part.VERSIONS, "suite packages", requirements),
    Check("BG207", Part.VERSIONS, "kernel wheels", kernel_wheels, needs=("BG201",)),
    Check("BG209", Part.VERSIONS, "CUDA build", cuda_build, needs=("BG201",)),
    Check("BG210", Part.VERSIONS, "driver", driver),
)
