"""Prepared environments as the candidates of a bisect: `bumpgate bisect --environments FOLDER`. Nothing is built."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.version import Version

from bumpgate.bisect.builder import installed
from bumpgate.core.errors import BumpgateError
from bumpgate.env.build import Environment, NotInstallable
from bumpgate.env.request import Request
from bumpgate.env.versions import FoundVersion
from bumpgate.process.child import ChildFault


class PreparedError(BumpgateError):
    """A folder without a usable environment, or an interpreter that does not run. One line."""


@dataclass(frozen=True)
class Prepared:
    """The environments FOLDER/NAME, each with its bin/python; a machine without an index has no other ones.

    Of several with the same version of `package`, the first by name is the candidate. The others have it together with
    other versions of its set, and are for attribution alone.
    """

    folder: Path
    package: str

    @cached_property
    def environments(self) -> tuple[Environment, ...]:
        """All environments that have the package, sorted by name. Raises PreparedError if there is none."""
        out = []
        for python in sorted(self.folder.absolute().glob("*/bin/python")):
            name = python.parent.parent.name
            try:
                packages = installed(python)
            except ChildFault as fault:
                raise PreparedError(f"--environments: {python} does not run: {fault}") from None
            if self.package in packages:
                out.append(Environment(name, python, name, packages))
        if not out:
            raise PreparedError(
                f"--environments {self.folder}: no NAME/bin/python in it has {self.package} installed"
            )
        return tuple(out)

    def versions(self) -> list[FoundVersion]:
        """Return the versions of the package, in order."""
        found = {e.packages[self.package] for e in self.environments}
        return [FoundVersion(version, None, None, "") for version in sorted(found, key=Version)]

    def request(self, version: str) -> Request:
        """Return the request of a candidate."""
        return Request((f"{self.package}==={version}",), name=f"{self.package} {version}")

    def __call__(self, request: Request) -> Environment:
        """Return the first environment with the requested packages; of a mixture, it has these and no others.

        Raises NotInstallable if there is none.
        """
        packages = dict(requirement.split("===") for requirement in request.requirements)
        for environment in self.environments:
            exact = request.dependencies or len(packages) == len(environment.packages)
            if exact and packages.items() <= environment.packages.items():
                return environment
        raise NotInstallable(f"{request.title}: no environment of {self.folder} has it", self.folder, "")

    def together(self, good: Environment, bad: Environment) -> list[set[str]]:
        """Group the packages that no prepared environment separates: each one has all of a group from the same side."""
        mixed = [
            e.packages for e in self.environments if _is_mixture(e.packages, good.packages, bad.packages)
        ]
        groups: dict[tuple[bool, ...], set[str]] = defaultdict(set)
        for name in good.packages.keys() | bad.packages.keys():
            groups[tuple(packages.get(name) == bad.packages.get(name) for packages in mixed)].add(name)
        return list(groups.values())


def _is_mixture(packages: Mapping[str, str], good: Mapping[str, str], bad: Mapping[str, str]) -> bool:
    """Return whether each package has its version of one of the two sides."""
    names = packages.keys() | good.keys() | bad.keys()
    return all(packages.get(name) in (good.get(name), bad.get(name)) for name in names)
