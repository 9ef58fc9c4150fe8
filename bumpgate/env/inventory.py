"""Finds what an interpreter would import, without importing any of it.

`PROGRAM` runs in that interpreter and needs only the standard library. torch/version.py is parsed, not run, so that
the version is known even if torch crashes at import.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import inspect
import io
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from bumpgate.core.errors import BumpgateError, one_fault
from bumpgate.process.child import Interpreter

SECONDS = 60
VERSION_FILE = "torch/version.py"


def constants(text: str) -> dict[str, Any]:
    """Return the literals that a module assigns, none if it is not Python."""
    found: dict[str, Any] = {}
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant):
                found[target.id] = node.value.value
    return found


def digest_of(hashes: Iterable[tuple[str, str]]) -> str:
    """Return one digest of path and hash of each file that a wheel brings; "" if none has a hash.

    Left out are .dist-info, which installers change, `.data/`, and paths outside of the packages.
    """
    named = [f"{path} {value}" for path, value in hashes if value and path[:2] != ".."]
    lines = sorted(line for line in named if ".dist-info/" not in line and ".data/" not in line)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""


PROGRAM = f"""
from __future__ import annotations
import ast, hashlib, importlib.machinery, importlib.metadata, importlib.util, json, os, platform, sys
{inspect.getsource(constants)}
{inspect.getsource(digest_of)}"""
PROGRAM += r'''
def where(name, path=None):
    """Directory of the package that `import name` finds: on this path, else by every finder (editable installs)."""
    try:
        find = importlib.machinery.PathFinder.find_spec
        spec = find(name, path) if path else importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or []) if spec else []
    return places[0] if places else spec and spec.origin

def text(path):
    """The text of a file; "" if it cannot be read."""
    try:
        return open(path, encoding="utf-8").read()
    except (OSError, ValueError):
        return ""

def describe(d, metadata):
    files = d.files or ()  # each access reads the whole RECORD again
    extensions = [f for f in files if f.name.endswith(".so") or ".so." in f.name]
    url = json.loads(d.read_text("direct_url.json") or "{}")
    archive = url.get("archive_info", {})
    return {
        "name": metadata["Name"], "version": metadata["Version"], "file": url.get("url", "").rsplit("/", 1)[-1],
        "sha256": archive.get("hashes", {}).get("sha256", ""),
        "content": digest_of((str(f), f.hash.value) for f in files if f.hash),
        "place": str(d.locate_file("")), "requires": d.requires or [],
        "extensions": [str(d.locate_file(f)) for f in extensions],
    }

scripts = [entry for entry in sys.path if entry not in ("", os.getcwd())]
torch = where("torch")
read = ((d, d.metadata) for d in importlib.metadata.distributions())
print(json.dumps({
    "python": platform.python_version(), "implementation": platform.python_implementation(),
    "kernels": where("kernels"), "kernels_of_scripts": where("kernels", scripts),
    "torch": torch, "version": constants(text(os.path.join(torch or "", "version.py"))),
    "distributions": [describe(*found) for found in read if found[1]["Name"]],
}))
'''


@dataclass(frozen=True)
class Distribution:
    """One installed distribution.

    file, sha256: the wheel it was installed from, if the installer recorded it; else "".
    place: the directory that holds it.
    requires: PEP 508 strings.
    extensions: its shared libraries.
    content: a digest of its files, equal to `content_of` its wheel; "" if the installer recorded none.
    """

    name: str
    version: str
    file: str = ""
    sha256: str = ""
    place: Path = Path()
    requires: tuple[str, ...] = ()
    extensions: tuple[Path, ...] = ()
    content: str = ""


@dataclass(frozen=True)
class Inventory:
    """One interpreter. torch: the directory of the package, None if not installed. version: torch/version.py.

    kernels: where a module start (`python -m`, pytest) finds that name; kernels_of_scripts: where a program started
    by its file does.
    distributions: by canonical name, the first on the path first.
    """

    python: str
    implementation: str
    kernels: Path | None
    kernels_of_scripts: Path | None
    torch: Path | None
    version: Mapping[str, Any]
    distributions: Mapping[str, tuple[Distribution, ...]] = field(default_factory=dict)

    def installed(self, name: str) -> Distribution | None:
        """Return the distribution that an import would find first, or None."""
        return next(iter(self.distributions.get(canonicalize_name(name), ())), None)

    @property
    def cuda(self) -> str | None:
        """Version of CUDA that torch was built for; None for another build."""
        return str(self.version.get("cuda") or "") or None

    @property
    def torch_version(self) -> str:
        """Version in torch/version.py, which may differ from the metadata: 2.13.0+cu130 in PyPI's wheels of 2.13.0."""
        distribution = self.installed("torch")
        return str(self.version.get("__version__") or (distribution.version if distribution else ""))


def take(interpreter: Interpreter) -> Inventory:
    """Take the inventory of an interpreter. Raises ChildFault if it gives no result."""
    raw = interpreter.json("-c", PROGRAM, timeout=SECONDS)
    found: dict[str, tuple[Distribution, ...]] = {}
    for d in raw["distributions"]:
        d |= {"place": Path(d["place"]), "requires": tuple(d["requires"])}
        each = Distribution(**d | {"extensions": tuple(map(Path, d["extensions"]))})
        known = found.setdefault(canonicalize_name(each.name), ())
        if each.place not in {other.place for other in known}:
            found[canonicalize_name(each.name)] = (*known, each)
    paths = {n: Path(raw[n]) if raw[n] else None for n in ("kernels", "kernels_of_scripts", "torch")}
    return Inventory(**raw | paths | {"distributions": found})


def content_of(wheel: Path) -> str:
    """Return the digest that an inventory has of a distribution installed from this wheel; "" if it is not a wheel.

    Of one version there may be several builds, under the same file name.
    """
    with suppress(BumpgateError), one_fault(wheel.name), zipfile.ZipFile(wheel) as archive:
        record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        lines = csv.reader(io.StringIO(archive.read(record).decode("utf-8")))
        return digest_of((line[0], line[1].partition("=")[2]) for line in lines if line[1:])
    return ""


def version_of(wheel: Path) -> dict[str, Any]:
    """Return what torch/version.py of a wheel of torch assigns; empty if it has none."""
    with suppress(BumpgateError), one_fault(wheel.name), zipfile.ZipFile(wheel) as archive:
        return constants(archive.read(VERSION_FILE).decode("utf-8"))
    return {}
