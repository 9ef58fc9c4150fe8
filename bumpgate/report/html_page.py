"""HTML pages: the report of a run or gate, and the templates that the dashboard uses too."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from bumpgate.core.errors import need
from bumpgate.core.text import printable
from bumpgate.report import diffs
from bumpgate.report.page import Page

TEMPLATES = Path(__file__).with_name("templates")
DASHES = ("-", "--", ":", "-.")


def html_page(shown: Page) -> str:
    """Return the report as one self-contained file: no external script, style, font or picture."""
    suspects = [row for finding in shown.findings for row in finding.rows]
    changed, more = diffs.of_records(*shown.records, suspects)
    # A template inserts the svg, which is matplotlib's markup, unescaped.
    plots = [{"row": row, "svg": curves(row, *drawn)} for row, drawn in _series(shown).items()]
    return fill("report.html.j2", page=shown, plots=plots, diffs=changed, more_diffs=more, isnan=math.isnan)


def fill(template: str, **values: Any) -> str:
    """Render a template with every value escaped. The page's policy allows no script but its own."""
    script = (TEMPLATES / "script.html.j2").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = _environment().get_template(template).render(script=script, script_digest=digest, **values)
    return printable(str(text))


def curves(title: str, unit: str, series: Mapping[str, tuple[float, ...]]) -> str:
    """Draw one line per curve over its steps, as an <svg> element on white."""
    matplotlib = need("matplotlib.figure", "matplotlib", command="a report with curves")
    figure = matplotlib.figure.Figure(figsize=(4.6, 2.5), layout="constrained")
    axes = figure.add_subplot()
    for i, (name, points) in enumerate(series.items()):
        axes.plot(
            range(1, len(points) + 1), points, DASHES[i % len(DASHES)], linewidth=1.3, label=_plain(name)
        )
    axes.set(xlabel="step", ylabel=_plain(unit))
    axes.legend(frameon=False)
    out = io.StringIO()
    # Text stays text, which can be searched and selected. The salt makes the file reproducible and ids unique.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 8}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"|(<svg)', r"\1\2", text, count=1)


def _series(shown: Page) -> dict[str, tuple[str, dict[str, tuple[float, ...]]]]:
    """Return row id -> unit and curves, with both sides together."""
    found: dict[str, tuple[str, dict[str, tuple[float, ...]]]] = {}
    for side, record in zip(("adopted: ", "candidate: " if shown.paired else ""), shown.records):
        for row in (j.row for j in record.judgements) if record else ():
            for name, points in row.series.items():
                found.setdefault(row.id, (row.unit, {}))[1][side + name] = points
    return found


def _plain(text: str) -> str:
    """Escape $, since matplotlib reads $...$ as a formula."""
    return text.replace("$", r"\$")


@lru_cache(maxsize=1)
def _environment() -> Any:
    jinja2 = need("jinja2", command="an HTML report")
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
