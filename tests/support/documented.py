"""Extract the command lines of the documents, the action and the workflows, as written there.

From a document: code blocks (fenced or indented), code spans with a command that has an option or a path, and the
command of a generated table. In a block with prompts (`$ `) only those lines are commands; in any other block with a
command each line is one. A shell script (fence `bash`, a YAML `run:` or `command:`) counts as one command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

PROGRAMS = ("bumpgate", "pytest", "python", "python3", "pip", "tox", "git", "uv", "sbatch", "apt-get")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```\n", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")
SPAN = re.compile(r"`([^`]+)`")
# A span such as `bumpgate gate` only names a command.
ARGUMENT = re.compile(r" \S*[-/.=\[]")
TABLE = re.compile(r"<!-- table: (.+?) -->")
# Languages whose blocks contain no commands.
NOT_A_SHELL = ("python", "toml")


@dataclass(frozen=True)
class Documented:
    """place: the file, and the step of a script. text: without comment, on one line; of a script "FILE: STEP"."""

    place: str
    text: str


def documented(root: Path) -> Iterator[Documented]:
    """Yield every command line of the documents, the action and the workflows below `root`."""
    for path in (root / "README.md", root / "CONTRIBUTING.md", *sorted(root.glob("docs/*.md"))):
        place = path.relative_to(root).as_posix()
        for text in of_markdown(path.read_text(), place):
            yield Documented(place, text)
    for path in (root / "action.yml", *sorted(root.glob(".github/workflows/*.yml"))):
        for step, _ in scripts(YAML(typ="safe").load(path.read_text())):
            yield Documented(path.name, f"{path.name}: {step}")


def of_markdown(text: str, place: str) -> Iterator[str]:
    """Yield the commands of one document. Raises ValueError on a fence with an unknown language."""
    for match in FENCE.finditer(text):
        language, body = match[2], match[3]
        if language == "bash":
            yield f"{place}: bash"
        elif language == "yaml":
            yield from (f"{place}: {step}" for step, _ in scripts(YAML(typ="safe").load(body)))
        elif language == "":
            yield from of_block(body)
        elif language not in NOT_A_SHELL:
            raise ValueError(f"{place}: a code block of an unknown language {language!r}")
    prose = FENCE.sub("\n", text)
    for block in INDENTED.finditer(prose):
        yield from of_block(block[0])
    prose = INDENTED.sub("\n", prose)
    spans = map(clean, [*SPAN.findall(prose), *TABLE.findall(prose)])
    yield from (line for line in spans if is_command(line) and ARGUMENT.search(line))


def of_block(body: str) -> Iterator[str]:
    """Yield the commands of a block without a language."""
    lines = [line.strip() for line in body.replace("\\\n", " ").splitlines()]
    prompts = [line[2:] for line in lines if line.startswith("$ ")]
    listed = lines if any(map(is_command, lines)) else []
    yield from filter(None, map(clean, prompts or listed))


def is_command(line: str) -> bool:
    """Whether a line begins with a known program, after variable assignments."""
    words = [word for word in line.split() if not re.match(r"[A-Z_]+=", word)]
    return bool(words) and words[0] in PROGRAMS


def clean(line: str) -> str:
    """Remove the comment and repeated spaces."""
    return " ".join(re.sub(r"(^|\s)#\s.*$", "", line).split())


def scripts(raw: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, script) of the steps of an action, a workflow or a Buildkite pipeline."""
    if isinstance(raw, dict):
        for key in ("run", "command"):
            if isinstance(text := raw.get(key), str):
                yield str(raw.get("name") or raw.get("label") or text.splitlines()[0]), text
        raw = list(raw.values())
    for part in raw if isinstance(raw, list) else ():
        yield from scripts(part)
