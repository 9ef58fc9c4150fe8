"""Doctor's checks in their order, and what each needs to be run at all.

The environment comes first, then what is installed, then torch's instruments, and only then the device: a run that
would fail at its cache directory must not take a GPU first. Torch is met in children only, so that one which is
missing, raises or crashes at import is a line of the report. Imports no more than a lane's own environment holds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bumpgate.doctor import environment as doctor_environment
from bumpgate.doctor import torch_checks as doctor_torch
from bumpgate.doctor import version_checks as doctor_versions
from bumpgate.doctor.findings import Check, Finding, Part, Site, Status
from bumpgate.environments import manifest
from bumpgate.environments.interpreter import Interpreter
from bumpgate.rows import BumpgateError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
# A part is run where no code with one of these beginnings was found. A torch that the lane was not adopted with still
# has instruments to try; a device is touched only where everything before it is in order.
NEEDS: Mapping[Part, tuple[str, ...]] = {
    Part.ENVIRONMENT: (),
    Part.VERSIONS: ("BG1",),
    Part.INSTRUMENTS: ("BG1", "BG201"),
    Part.ACCELERATOR: ("BG1", "BG2", "BG3"),
}


def make_site(
    root: Path, lane: str, python: Path, environment: Mapping[str, str], *, own_lock: bool = False
) -> Site:
    """What doctor looks at. own_lock: as in Site.

    Raises BumpgateError with one line: no such interpreter, a contract or manifest that cannot be read.
    """
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise BumpgateError(f"--python {python}: no such interpreter")
    # Do not resolve: the python of a virtual environment is a link, and finds its packages relative to the link.
    python = python if python.is_absolute() else Path.cwd() / python
    contract = read_contract(root / "contract.toml")
    rows = manifest.load(root / "wheels" / "manifest.toml")
    rows.adopted(lane)
    return Site(lane, Interpreter(python, root, environment), contract, rows, own_lock)


def read_contract(path: Path) -> dict[str, Any]:
    """The tables of contract.toml, those that doctor reads seen to be whole. Raises BumpgateError with one line."""
    restore = f"restore it: git checkout {path.name}"
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


def examine(site: Site, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Runs the checks in order; one whose ground does not hold is not run, and says why."""
    findings: list[Finding] = []
    for check in checks:
        ground = (*NEEDS[check.part], *check.needs)
        defects = [f for f in findings if f.status is Status.DEFECT and f.code.startswith(ground)]
        if defects:
            findings.append(check.not_run(f"{defects[0].code} ({defects[0].check}) comes first"))
        else:
            findings += check.run(site)
    return findings


def healthy(findings: Iterable[Finding]) -> bool:
    return not any(f.status is Status.DEFECT for f in findings)
