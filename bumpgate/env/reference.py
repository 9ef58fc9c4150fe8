"""The set of packages that an environment is compared with.

By default the adopted row of its lane. Within a gate or a bisection each environment is compared with the lock that it
was itself resolved to, so that a candidate is not at fault for differing from the adopted set. An interpreter that was
passed in has no lock: then the requirements of its torch are all that can be checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from bumpgate.env.inventory import Inventory
from bumpgate.env.locks import read_lock
from bumpgate.env.manifest import ManifestRow

# Set by the gate and by bisect for the processes of one environment: the path of its lock, or NO_LOCK.
VARIABLE = "BUMPGATE_LOCK"
NO_LOCK = "none"
ANY = SpecifierSet("")


@dataclass(frozen=True)
class Reference:
    """Expected packages. source: where they are stated, for messages."""

    row: ManifestRow
    source: str

    @property
    def facts(self) -> int:
        """Return the number of facts about the environment to check."""
        row = self.row
        return bool(row.python) + bool(row.torch) + len(row.packages) + len(row.wheels)


def variables(lock: Path | None) -> dict[str, str]:
    """Return the env_vars for the processes of an environment with this lock."""
    return {VARIABLE: str(lock) if lock else NO_LOCK}


def of_lane(adopted: ManifestRow) -> Reference:
    """Return the adopted row of a lane as the reference."""
    return Reference(adopted, f"the adopted row of lane {adopted.lane}")


def reference(adopted: ManifestRow, found: Inventory, env_vars: Mapping[str, str]) -> Reference:
    """Return the set that an environment is compared with, by VARIABLE in env_vars.

    adopted: the row of its lane. found: what is installed there. Raises LockError on a lock that cannot be read.
    """
    lock = env_vars.get(VARIABLE, "")
    if not lock:
        return of_lane(adopted)
    if lock == NO_LOCK:
        required = required_by_torch(found)
        row = replace(adopted, python=ANY, torch=ANY, packages=required, wheels=())
        return Reference(row, "the requirements of its own torch (the interpreter has no lock)")
    made = read_lock(Path(lock))
    pins = {name: SpecifierSet(f"=={version}", prereleases=True) for name, version in made.versions.items()}
    row = replace(
        adopted,
        python=SpecifierSet(f"=={made.python}.*") if made.python else ANY,
        torch=pins.pop("torch", ANY),
        packages=pins,
        wheels=(),
    )
    return Reference(row, "its own lock")


def required_by_torch(found: Inventory) -> dict[str, SpecifierSet]:
    """Return canonical name -> versions, from the metadata of the installed torch; extras and other platforms left out.

    Markers are evaluated for the interpreter that runs this.
    """
    torch = found.installed("torch")
    required = [Requirement(text) for text in torch.requires] if torch else []
    return {
        canonicalize_name(r.name): SpecifierSet(str(r.specifier), prereleases=True)
        for r in required
        if r.marker is None or r.marker.evaluate({"extra": ""})
    }
