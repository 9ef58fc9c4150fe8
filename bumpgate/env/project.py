"""The project under test: its sources, and what each side of a gate imports of them.

A project that declares a build (pyproject.toml or setup.py) is built and installed into a folder for one interpreter,
compiled extensions included. Another one is imported from a copy of its sources.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.toml import tomllib
from bumpgate.env.build import BuildError
from bumpgate.env.cached import Say
from bumpgate.env.requirements import of_project
from bumpgate.env.uv import run_uv
from bumpgate.process.home import home
from bumpgate.process.tree_digest import all_files, bind

# Build requirements that the interpreter of the side must provide itself: the extension is compiled against them.
COMPILED_AGAINST = ("torch",)
# Bytes of a file that no row depends on and a build may read; a larger one is data.
SMALL = 2**20
# The line of a build's output that says why it failed.
WHY = re.compile(r"^\s*(\w*(?:Error|Exception|error): .+)", re.MULTILINE)


class ProjectError(BumpgateError):
    """The project cannot be read at a commit. One line."""


def commit_of(root: Path, ref: str) -> str:
    """Return the full commit that a name stands for. Raises ProjectError."""
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").decode().strip()
    except (OSError, subprocess.CalledProcessError):
        raise ProjectError(f"--base {ref}: no such commit here; name a branch, a tag or HEAD") from None


def sources(root: Path, into: Path, commit: str = "") -> Path:
    """Copy the sources of the work tree, or of a commit, into a folder. Returns the folder of the project."""
    if commit:
        prefix = _git(root, "rev-parse", "--show-prefix").decode().strip()
        with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", commit, "--", "."))) as archive:
            archive.extractall(into, filter="data")
        return into / prefix if prefix and (into / prefix).is_dir() else into
    measured = bind(root, into).files
    for path in sorted({*measured, *all_files(root)}):
        if (root / path).is_file() and (path in measured or (root / path).stat().st_size <= SMALL):
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / path, into / path)
    return into


def installed(root: Path, python: Path, key: str, say: Say, commit: str = "") -> Path:
    """Return the folder from which a side imports the project; built once for these sources and this environment.

    key: of the environment of the interpreter. commit: of the sources; "" for the work tree.
    Raises BuildError with the log of the build.
    """
    stamp = commit or bind(root).tree
    name = hashlib.sha256(f"{root} {stamp} {key}".encode()).hexdigest()[:20]
    place = home() / "projects" / name
    if place.exists():
        return place
    partial = place.with_name(f".{name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        tree = sources(root, partial / "sources", commit)
        out = partial / "installed"
        say(f"the project{f' at {commit[:12]}' if commit else ''}: building for {python.parent.parent.name}")
        if not _build(tree, python, out, partial):
            (tree / "src" if (tree / "src").is_dir() else tree).rename(out)
        out.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return place


def same(one: Path, other: Path) -> bool:
    """Return whether two folders of `installed` hold the same project; what a build notes about itself is ignored."""
    return _contents(one) == _contents(other)


def _contents(folder: Path) -> dict[str, bytes]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    kept = (file for file in files if "__pycache__" not in file.parts and ".dist-info" not in file.parts[0])
    return {file.as_posix(): hashlib.sha256((folder / file).read_bytes()).digest() for file in kept}


def relocked(root: Path, versions: Mapping[str, str]) -> str:
    """Return the text of the project's uv.lock with torch and its own dependencies in these versions, by uv.

    Raises ProjectError (one line) if uv cannot: a range of pyproject.toml excludes a version.
    """
    names = {canonicalize_name(Requirement(each).name) for each in of_project(root)} | {"torch"}
    pins = [f"{name}=={versions[name]}" for name in sorted(names & versions.keys())]
    with tempfile.TemporaryDirectory() as folder:
        tree = sources(root, Path(folder) / "sources")
        shutil.copy2(root / "uv.lock", tree)  # git may ignore it
        options = [word for pin in pins for word in ("--upgrade-package", pin)]
        variables = {"SETUPTOOLS_SCM_PRETEND_VERSION": "0.0.0"}
        code, output = run_uv(
            ("lock", "--project", tree, *options), Path(folder) / "log", variables=variables
        )
        text = (tree / "uv.lock").read_text(encoding="utf-8")
    found = {(entry["name"], entry.get("version")) for entry in tomllib.loads(text)["package"]}
    if kept := [pin for pin in pins if tuple(pin.split("==")) not in found]:
        why = (
            one_line(output.partition("error: ")[2] or output, 200)
            if code
            else "a range of pyproject.toml excludes it"
        )
        raise ProjectError(
            f"uv.lock cannot have {kept[0]}: {why}; allow it in pyproject.toml, and adopt again"
        )
    return text


def _build(tree: Path, python: Path, out: Path, work: Path) -> bool:
    """Build and install a project into `out`; return False if it declares no build."""
    file = tree / "pyproject.toml"
    document = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not ({"project", "build-system"} & document.keys() or (tree / "setup.py").is_file()):
        return False
    log = home() / "projects" / "logs" / f"{work.name.strip('.').partition('.')[0]}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    required = document.get("build-system", {}).get("requires", ["setuptools>=40.8"])
    names = {each.strip().partition(">")[0].partition("=")[0].strip().lower() for each in required}
    # A copy of the sources has no history that a build could take its version from.
    variables = {"SETUPTOOLS_SCM_PRETEND_VERSION": "0.0.0"}
    into: list[str | Path] = ["--python", python, "--no-deps", "--no-cache", "--quiet"]
    if not names.intersection(COMPILED_AGAINST):
        try:
            _run(("pip", "install", *into, "--target", out, tree), log, variables)
            return True
        except BuildError as error:  # a setup.py may import what it does not declare
            if not any(f"No module named '{name}'" in error.tail for name in COMPILED_AGAINST):
                raise
    tools = [each for each in required if not each.strip().lower().startswith(COMPILED_AGAINST)]
    if tools:
        _run(("pip", "install", *into[:2], "--quiet", "--target", work / "tools", *tools), log)
    variables["PYTHONPATH"] = str(work / "tools")
    _run(("pip", "install", *into, "--no-build-isolation", "--target", out, tree), log, variables)
    return True


def _run(arguments: tuple[str | Path, ...], log: Path, variables: dict[str, str] | None = None) -> None:
    code, output = run_uv(arguments, log, variables=variables)
    if code:
        why = (WHY.findall(output) or [output])[-1]
        raise BuildError(f"the project cannot be built: {one_line(why, 300)} (log: {log})", log, output)


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True).stdout
