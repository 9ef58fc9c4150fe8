"""Writes a reproducer as an issue in the form of pytorch's and triton's bug templates. It is never sent."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from bumpgate.core.errors import BumpgateError, loads, one_line
from bumpgate.logs.families import load_issues
from bumpgate.process import child
from bumpgate.process.runner import child_environment
from bumpgate.reproduce.proof import Environment, Outcome
from bumpgate.reproduce.reproduction import Reproduction

# Where a package's issues are: a place to search and to write.
TRACKERS = {
    "torch": "https://github.com/pytorch/pytorch/issues",
    "triton": "https://github.com/triton-lang/triton/issues",
}
LINES = 30
# An error of the corpus that is shorter names no fault by itself.
TELLING = 12


@dataclass(frozen=True)
class Known:
    """An issue that may be this one: its place, why it may be, and what to do until it is fixed ("" if unknown)."""

    link: str
    why: str
    workaround: str = ""


def package(found: Reproduction, bisect: Mapping[str, Any]) -> str:
    """Return the package at fault: the one that a bisect names, else the first one that differs."""
    blamed = [str(change["name"]) for change in bisect.get("at_fault") or ()]
    differing = [n for n in TRACKERS if found.good.versions.get(n) != found.bad.versions.get(n)]
    return next((n for n in (*blamed, *differing) if n in TRACKERS), "torch")


def known_issues(root: Path, found: Reproduction, place: str) -> list[Known]:
    """Return the known issues with this fault's signature: of the logs, and of cases in a folder named corpus.

    place: FILE.py:function of the program, which may be a case itself.
    """
    shown = found.proof.bad[0].text
    issues = [
        Known(i.link, f"its signature is {', '.join(map(repr, i.signature))}", i.workaround)
        for i in load_issues()
        if i.matches(shown.splitlines())
    ]
    for file, function, link, error in _cases(root):
        title_ = (ast.get_docstring(function) or "").rstrip(".")
        if f"{file}:{function.name}" == place or title_ == found.program.title.rstrip("."):
            issues.append(Known(link, "the program is a case of the corpus that names it"))
        elif len(error) >= TELLING and error in shown:
            issues.append(Known(link, f"its error is {error!r}, too"))
    return issues


def _cases(root: Path) -> Iterator[tuple[str, ast.FunctionDef, str, str]]:
    """Yield file, function, link and error of each `@regression(area, issue, error=...)` whose issue is known."""
    folders = [p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")]
    for path in sorted(file for folder in folders for file in folder.glob("**/corpus/*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for call in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if not isinstance(call, ast.Call) or len(call.args) < 2:
                    continue
                number = getattr(call.args[1], "value", None)
                error = next((ast.literal_eval(k.value) for k in call.keywords if k.arg == "error"), "")
                if isinstance(number, int):
                    yield str(path.relative_to(root)), node, f"{TRACKERS['torch']}/{number}", error  # type: ignore[misc]


def title(found: Reproduction, name: str) -> str:
    """Return the issue's title: what is wrong, and since when if the older side is right."""
    good, bad = (side.versions.get(name, "0") for side in (found.good, found.bad))
    since = f"[{bad} regression] " if Version(bad) > Version(good) else ""
    return since + found.program.title.rstrip(".")


def body(found: Reproduction, name: str, bisect: Mapping[str, Any], known: list[Known], changed: str) -> str:
    """Return the issue's text. changed: Markdown about the changed code, "" if there is none."""
    good, bad = (f"{name} {side.versions.get(name, '?')}" for side in (found.good, found.bad))
    times = len(found.proof.bad)
    parts = [
        f"### 🐛 Describe the bug\n\n{found.program.title.rstrip('.')}. The program below is wrong under {bad}"
        f" and right under {good}: {times} of {times} runs in fresh processes with empty caches, on each.",
        *_since(bisect),
        f"```python\n{found.text.strip()}\n```",
        *(f"Workaround: {k.workaround}." for k in known if k.workaround),
        f"### Changed code\n\n{changed.strip()}" if changed.strip() else "",
        f"### Error logs\n\n{bad} (exit code {found.proof.bad[0].code}):\n\n{_quoted(found.proof.bad[0])}",
        f"{good} (exit code {found.proof.good[0].code}):\n\n{_quoted(found.proof.good[0])}",
        f"### Versions\n\n{_versions(found.bad, bad)}\n\n{_versions(found.good, good)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _since(bisect: Mapping[str, Any]) -> Iterator[str]:
    if bisect.get("first"):
        word = "First good" if bisect.get("find_fix") else "First bad"
        yield f"{word} version: {bisect['package']} {bisect['first']}, after {bisect['last']}."
    yield from (f"Commits between them: {link}" for link in bisect.get("compare") or ())


def _quoted(outcome: Outcome) -> str:
    return "```\n" + "\n".join(outcome.text.strip().splitlines()[-LINES:]).replace("```", "'''") + "\n```"


def _versions(side: Environment, name: str) -> str:
    """Return what torch.utils.collect_env prints in an environment, folded."""
    reader = child.Interpreter(side.python, side.python.parent, child_environment(side.python, None))
    try:
        text = reader.run("-m", "torch.utils.collect_env", timeout=120)
    except child.ChildFault as fault:
        text = f"{side}\n(torch.utils.collect_env: {one_line(fault, 120)})"
    return f"<details><summary>{name}</summary>\n\n```\n{text.strip()}\n```\n\n</details>"


def read_bisect(path: Path | None) -> dict[str, Any]:
    """Read a bisect.json, {} without a path. Raises BumpgateError."""
    if path is None:
        return {}
    with suppress(OSError, ValueError):
        raw = loads(path.read_text(encoding="utf-8"))
        if isinstance(raw, dict) and "suspects" in raw:
            return raw
    raise BumpgateError(f"{path}: no bisect.json; name the file that `bumpgate bisect` writes")
