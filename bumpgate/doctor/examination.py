"""Doctor's checks in order, and their prerequisites.

The environment comes first, then the installed packages, torch's instruments, and finally the device: a run that
would fail at its cache directory must not occupy a GPU first. torch is only imported in subprocesses, so that a
missing or crashing torch is a line of the report. Only packages of a lane's own environment are imported here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bumpgate.core.errors import BumpgateError
from bumpgate.core.toml import tomllib
from bumpgate.doctor import environment as doctor_environment
from bumpgate.doctor import torch_checks as doctor_torch
from bumpgate.doctor import version_checks as doctor_versions
from bumpgate.doctor.findings import Check, CheckResult, Part, Site, Status
from bumpgate.env.lane import LaneContext, smoke_tests
from bumpgate.process.child import Interpreter

CHECKS = (*doctor_environment.CHECKS, *doctor_versions.CHECKS, *doctor_torch.CHECKS)
# Tables of the contract that doctor reads -> the fields of each of their rules, apart from its reason.
RULES = {
    "environment.always": ("value",),
    "environment.rank": (),
    "environment.refused": (),
    "environment.inert": (),
    "caches.directory": ("folder",),
    "wheels.python": (),
    "wheels.cuda": ("published", "driver"),
}
# A part runs if no code with one of these prefixes was found. The instruments of a torch that the lane was not adopted
# with are still checked; a device is used only if all earlier parts are without defects.
NEEDS: Mapping[Part, tuple[str, ...]] = {
    Part.ENVIRONMENT: (),
    Part.VERSIONS: ("BG1",),
    Part.INSTRUMENTS: ("BG1", "BG201"),
    Part.ACCELERATOR: ("BG1", "BG2", "BG3"),
}


def make_site(
    root: Path, lane: str, python: Path, environment: Mapping[str, str], *, own_lock: bool = False
) -> Site:
    """Create the site to examine. own_lock: as in Site.

    Raises BumpgateError (one line) on a missing interpreter, or an unreadable contract, lane or lock.
    """
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise BumpgateError(f"--python {python}: no such interpreter")
    # Do not resolve: the python of a virtual environment is a link, and finds its packages relative to the link.
    python = python if python.is_absolute() else Path.cwd() / python
    contract = read_contract(root / "launch/contract.toml")
    adopted = LaneContext(root, lane).adopted
    return Site(lane, Interpreter(python, root, environment), contract, adopted, smoke_tests(root), own_lock)


def read_contract(path: Path) -> dict[str, Any]:
    """Read contract.toml and check the tables that doctor uses. Raises BumpgateError (one line)."""
    restore = f"restore it: git checkout launch/{path.name}"
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        minimum = raw["caches"]["minimum_free_bytes"]
        for name, fields in RULES.items():
            table = raw
            for part in name.split("."):
                table = table[part]
            for rule in table.values():
                missing = [f for f in ("reason", *fields) if f not in rule]
                if missing:
                    raise KeyError(f"{name}: {missing[0]}")
        if not isinstance(minimum, int):
            raise KeyError("caches.minimum_free_bytes")
    except OSError as error:
        raise BumpgateError(f"{path.name}: cannot be read ({error.strerror}); {restore}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BumpgateError(f"{path.name}: not TOML ({error}); {restore}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise BumpgateError(f"{path.name}: {error} is missing or misshapen; {restore}") from None
    return raw


def examine(site: Site, checks: Sequence[Check] = CHECKS) -> list[CheckResult]:
    """Run the checks in order; a check whose prerequisites failed is reported as not run, with the reason."""
    findings: list[CheckResult] = []
    for check in checks:
        ground = (*NEEDS[check.part], *check.needs)
        defects = [f for f in findings if f.status is Status.DEFECT and f.code.startswith(ground)]
        if defects:
            findings.append(check.not_run(f"{defects[0].code} ({defects[0].check}) comes first"))
        else:
            findings += check.run(site)
    return findings


def healthy(findings: Iterable[CheckResult]) -> bool:
    return not any(f.status is Status.DEFECT for f in findings)
