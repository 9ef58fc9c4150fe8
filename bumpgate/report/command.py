"""`bumpgate report`: a run or a gate as a self-contained HTML page, JUnit XML and Markdown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from bumpgate.core.rows import write_output
from bumpgate.core.text import printable, redacted
from bumpgate.gate.evidence import read_judged
from bumpgate.report import junit, markdown, page
from bumpgate.report.html_page import html_page
from bumpgate.report.page import Page

# Option, end of the file's name, how its text begins, and what makes it.
FORMATS: tuple[tuple[str, str, str, Callable[[Page], str]], ...] = (
    ("html", ".html", "<!DOCTYPE html>", html_page),
    ("junit", ".junit.xml", "<?xml", junit.xml),
    ("markdown", ".md", "## ", markdown.summary),
)


def command(
    path: Annotated[Path, typer.Argument(help="record.json of a run, or gate.json of a gate.")],
    html: Annotated[Path | None, typer.Option(help="Path of the page; by default next to the input.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Path of the JUnit XML.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Path of the Markdown job summary.")] = None,
) -> None:
    """Write a record or a gate as an HTML page, JUnit XML and a Markdown job summary.

    Without --html, --junit and --markdown all three are written next to the input.

    Exit codes: 0 written, whatever the verdict; 4 bad input.
    """
    named = {"html": html, "junit": junit, "markdown": markdown}
    targets = {name: target for name, target in named.items() if target} or default_paths(path, path.parent)
    for written in render(path, targets):
        typer.echo(f"wrote {written}")


def default_paths(path: Path, folder: Path) -> dict[str, Path]:
    """Return format -> path: gate.html, gate.junit.xml and gate.md of gate.json, in a folder."""
    return {name: folder / f"{path.stem}{suffix}" for name, suffix, *_ in FORMATS}


def render(path: Path, targets: dict[str, Path]) -> list[Path]:
    """Write each requested format of a record.json or gate.json atomically, and return the paths.

    Raises GateFileError or RecordError on an input that is neither, ExtraMissingError if HTML is requested and its
    libraries are not installed, BumpgateError on a path with another file.
    """
    shown = page.of(read_judged(path))
    texts = [(targets[name], make(shown), begins) for name, _, begins, make in FORMATS if name in targets]
    for target, text, begins in texts:
        write_output(target, printable(redacted(text)), begins)
    return [target for target, *_ in texts]
