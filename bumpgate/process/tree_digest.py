"""Binds a gate's verdict to the work tree and the bumpgate version that measured it.

A verdict is valid for this content only. `bumpgate gate --resume` and `bumpgate adopt` compare it with the present
content, and on a difference fail with a message that lists it.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from bumpgate.core.errors import BumpgateError
from bumpgate.core.text import printable, some
from bumpgate.process.home import home

OWN = "of this tree"  # the version of a bumpgate that runs from the work tree itself
GIT_SECONDS = 60
# Of the files that git does not track, only these can change what a lane measures. A job's log next to them cannot.
CODE = (".py", ".cu", ".cuh", ".cc", ".cpp", ".h", ".hpp")
SOURCES = (*CODE, ".toml", ".ini", ".cfg", ".json", ".yaml", ".yml", ".txt", ".npy", ".npz", ".safetensors")
# Files that a run or a gate writes, by name.
RESULTS = ("record.json", "smoke.json")
# Start of the paths of the tests that `bumpgate gate --command` generates. A gate is bound to the command itself, and
# another gate of the same tree may write its test meanwhile.
GENERATED = "build/gate/test_command_"
# A folder with one of these is an environment or the output of a gate or a bisect, and not part of the tree.
FOREIGN = ("pyvenv.cfg", "gate.json", "state.jsonl")
# A tree that git lists has one of these at its root.
DECLARING = {"pyproject.toml", "bumpgate.toml"}
# Paths that no row's value depends on. A baseline is written after the run that it accepts.
UNMEASURED = ("baselines/", "docs/", ".github/", ".ci/")
# An import statement, with the names in parentheses after it, or a call that imports.
IMPORT = re.compile(
    r"^\s*(?:from|import)\s[^(\n]*(?:\([^)]*\))?|import_module\([^)]*\)|__import__\([^)]*\)", re.MULTILINE
)
SKIPPED = ("__pycache__", "build", "dist", "node_modules")


@dataclass(frozen=True)
class Binding:
    """bumpgate: its version, or that it is the tree's own. commit: of git, "" outside of git.

    files: path below the root -> digest of its content.
    """

    bumpgate: str
    commit: str
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def tree(self) -> str:
        """Return one digest of the commit and every file."""
        lines = [self.commit, *(f"{path} {digest}" for path, digest in sorted(self.files.items()))]
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    def differences(self, now: Binding) -> list[str]:
        """Return the changes since, each in a few words; empty if the verdict is still valid."""
        pairs = {
            "bumpgate": (self.bumpgate, now.bumpgate),
            "commit": (self.commit[:12] or "none", now.commit[:12] or "none"),
        }
        out = [f"{name} {before} -> {after}" for name, (before, after) in pairs.items() if before != after]
        # The names in a gate.json that was read are printable.
        old, new = ({printable(path): x for path, x in each.files.items()} for each in (self, now))
        changed = [path for path in sorted({*old, *new}) if old.get(path) != new.get(path)]
        return [*out, f"tree: {some(changed)}"] if changed else out

    def sources(self) -> Binding:
        """Return what a lane run executes and reads, for any commit: no baselines, documents and CI files."""
        kept = [path for path in self.files if not path.startswith(UNMEASURED) and path[-3:] != ".md"]
        return Binding("", "", {path: self.files[path] for path in kept})

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "tree": self.tree, "files": dict(self.files)}

    @classmethod
    def of_gate(cls, path: Path, raw: Any) -> Binding:
        """Return the binding that a gate.json states. Raises BumpgateError (one line) if it has none."""
        try:
            return cls.from_json(raw)
        except (KeyError, TypeError, AttributeError):
            raise BumpgateError(f"{path} does not record its work tree: gate again") from None

    @classmethod
    def from_json(cls, raw: Any) -> Binding:
        """Create a binding from to_json's output. Raises KeyError, TypeError or AttributeError on anything else."""
        return cls(raw["bumpgate"], raw["commit"], dict(raw["files"].items()))


def measured_tree(root: Path, record: Path) -> str:
    """Return a digest of the present sources. record: where the run writes its rows; left out."""
    return bind(root, record).sources().tree


def bind(root: Path, *outputs: Path) -> Binding:
    """Return the binding of the present work tree. outputs: folders or files in it that a run or a gate writes."""
    places = [path.resolve() for path in (*outputs, home())]
    # A folder that contains the tree leaves out none of it.
    left_out = [place for place in places if not root.resolve().is_relative_to(place)]
    listed = _git_files(root)
    paths = _walk(root) if listed is None else [*listed, *_ignored_imports(root, listed)]
    resolved = ((path, (root / path).resolve()) for path in set(paths))
    kept = sorted(path for path, place in resolved if not any(map(place.is_relative_to, left_out)))
    commit = (_git(root, "rev-parse", "HEAD") or "").strip() if listed is not None else ""
    return Binding(_version(root), commit, {path: _digest(root / path) for path in kept})


def sources_in(root: Path, folder: Path) -> list[str]:
    """Return the source code of the work tree that is in a folder. Data may be what an earlier gate left there."""
    paths = (path for path in _git_files(root) or _walk(root) if path.endswith(CODE))
    return sorted(path for path in paths if (root / path).resolve().is_relative_to(folder.resolve()))


def all_files(root: Path) -> list[str]:
    """Return the files of the work tree that git does not ignore, also those that no row depends on: a README."""
    listed = _git_files(root) and _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed:
        return listed.strip("\0").split("\0")
    return [*_walk(root, lambda path: not path.endswith(".so"))]


def _version(root: Path) -> str:
    """Return the version of this bumpgate; OWN if it runs from the tree, whose files are bound with it."""
    if Path(__file__).resolve().parents[2] == root.resolve():
        return OWN
    try:
        return metadata.version("bumpgate")
    except metadata.PackageNotFoundError:
        return "source"


def _git_files(root: Path) -> list[str] | None:
    """Return the tracked files and the untracked sources that are not ignored; None outside of git."""
    tracked = _git(root, "ls-files", "-z", "--cached", "--recurse-submodules")
    others = _git(root, "ls-files", "-z", "--others", "--exclude-standard")
    if tracked is None or others is None:
        return None
    own = [path for path in tracked.split("\0") if path]
    new = [path for path in others.split("\0") if path and _is_source(path)]
    # For a folder that the enclosing repository ignores, git lists no files.
    if DECLARING.isdisjoint((*own, *new)):
        return None
    foreign = {folder for path in new for folder in _folders(path) if _is_foreign(root / folder)}
    return [*own, *(path for path in new if not foreign.intersection(_folders(path)))]


def _ignored_imports(root: Path, listed: Iterable[str]) -> list[str]:
    """Return the Python files that git ignores and whose names an import in a listed file, or in one of them, has.

    A work tree may import a vendored or generated module. A file that a run writes is imported by no source.
    """
    folders = _git(root, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    places = [place for place in (folders or "").split("\0") if not _is_skipped(root, place)]
    files = [place for place in places if not place.endswith("/")]
    files += [f"{place}{path}" for place in places if place.endswith("/") for path in _walk(root / place)]
    others = {path for path in files if path.endswith(".py")}
    found: list[str] = []
    new = [path for path in listed if path.endswith(".py")]
    while new:
        named = {word for path in new for word in _imported(root / path)}
        new = sorted(path for path in others if _module(path) in named)
        others -= {*new}
        found += new
    return found


def _is_skipped(root: Path, place: str) -> bool:
    parts = Path(place).parts
    outside = any(part in SKIPPED or part.startswith(".") for part in parts)
    return not place or outside or any(_is_foreign(root / folder) for folder in (place, *_folders(place)))


def _imported(path: Path) -> set[str]:
    """Return the words of the import statements of a file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return {word for line in IMPORT.findall(text) for word in re.findall(r"\w+", line)}


def _module(path: str) -> str:
    """Return the name of a module's file, or of the folder of an __init__.py."""
    stem = Path(path).stem
    return Path(path).parent.name if stem == "__init__" else stem


def _folders(path: str) -> Iterable[str]:
    return (str(folder) for folder in Path(path).parents if str(folder) != ".")


def _walk(root: Path, kept: Callable[[str], bool] | None = None) -> Iterator[str]:
    """Yield the sources below a folder outside of git, or files by `kept`. Links to folders are followed once."""
    seen: set[Path] = set()
    for folder, names, files in os.walk(root, followlinks=True):
        current = Path(folder)
        seen.add(current.resolve())
        own = (name for name in names if not name.startswith(".") and name not in SKIPPED)
        new = (name for name in own if (current / name).resolve() not in seen)
        names[:] = [name for name in new if not _is_foreign(current / name)]
        yield from (str((current / file).relative_to(root)) for file in files if (kept or _is_source)(file))


def _is_source(path: str) -> bool:
    generated = path.startswith(GENERATED) or os.path.basename(path) in RESULTS
    return path.endswith(SOURCES) and not generated


def _is_foreign(folder: Path) -> bool:
    return any((folder / name).exists() for name in FOREIGN)


def _digest(path: Path) -> str:
    """Return 16 hexadecimal digits over a file's mode and bytes, or a word for what exists in place of the file."""
    try:
        if path.is_symlink() and not path.is_file():
            return f"link {os.readlink(path)}"
        if path.is_dir():
            return "folder"
        executable = b"x" if os.access(path, os.X_OK) else b"-"
        return hashlib.sha256(executable + path.read_bytes()).hexdigest()[:16]
    except FileNotFoundError:
        return "absent"


def _git(root: Path, *arguments: str) -> str | None:
    how: dict[str, Any] = {"capture_output": True, "text": True, "errors": "surrogateescape"}
    try:
        return str(
            subprocess.run(["git", *arguments], cwd=root, check=True, timeout=GIT_SECONDS, **how).stdout
        )
    except (OSError, subprocess.SubprocessError):
        return None
