"""The requirements of a lane in an adoption: refused if they contradict the new set, or the lock of another lane."""

from __future__ import annotations

from collections.abc import Collection

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bumpgate.core import lanes
from bumpgate.core.toml import tomllib
from bumpgate.env.lane import LaneContext
from bumpgate.env.locks import Lock
from bumpgate.env.requirements import Pins, keeps, pinned, places, requirements_file, with_more
from bumpgate.process.file_transaction import AdoptionError


def moved_requirements(
    lane: LaneContext, text: str, lock: Lock, without: Collection[str] = (), back: Collection[str] = ()
) -> str:
    """Return the text of the lane's requirements file with the pins of the set.

    without: kernel wheels that the lane gives up, whose requirements are dropped.
    back: kernel wheels that it takes back, which are required again.
    Raises AdoptionError (one line) if a requirement that contradicts the set would remain, or if the lock of another
    lane needs a pin that would change.
    """
    pins = Pins(lock, without)
    _check_others(lane, text, pins)
    more = [f"{name}=={Version(lock.versions[name]).public}" for name in sorted(back)]
    new = with_more(lane.declared, pinned(lane.declared, text, pins), more)
    found = places(lane.declared, new)
    if not lane.declared.requirements and lanes.is_foreign(lane.root):
        own = tomllib.loads(new).get("project", {}).get("dependencies", ())
        found += [(f"{lanes.PROJECT}: dependencies", str(each)) for each in own]
    for where, requirement in found:
        if pins.contradicts(requirement):
            name = Requirement(requirement).name
            version = lock.versions[canonicalize_name(name)]
            raise AdoptionError(
                f"{where} has {requirement}, which contradicts the new set ({name} {version}), and the next"
                f" bumpgate freeze would obey it: change it to allow {version}, and gate again"
            )
    return new


def _check_others(lane: LaneContext, text: str, pins: Pins) -> None:
    """Raise AdoptionError if a pin would change that is also a pin of another lane, whose lock needs it."""
    own = [(where, old) for where, old in places(lane.declared, text) if pins.moved(old) != old]
    kind = "requirements file" if lane.declared.requirements else "extra"
    for name in lanes.load(lane.root):
        other = LaneContext(lane.root, name)
        file = requirements_file(lane.root, other.declared)
        heir = other.lock_path == lane.lock_path
        if heir or other.lock is None or file != requirements_file(lane.root, lane.declared):
            continue
        theirs = places(other.declared, text)
        for where, old in reversed(own):
            package = canonicalize_name(Requirement(old).name)
            version, new = other.lock.versions.get(package), pins.moved(old)
            if (
                version
                and (where, old) in theirs
                and not (new and keeps(version, Requirement(new).specifier))
            ):
                raise AdoptionError(
                    f"{where} has {old}, which is also a pin of lane {name}, whose lock has {package} {version}: write"
                    f" the pin into the own {kind} of each lane ({lane.name}, {name}) instead, and gate again"
                )
