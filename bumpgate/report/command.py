"""`bumpgate report`: a run or a gate as a self-contained HTML page, JUnit XML and Markdown."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import typer

from bumpgate.core import gate_file
from bumpgate.core.errors import BumpgateError
from bumpgate.core.extra import need
from bumpgate.core.findings import SAME_MARGIN
from bumpgate.core.rows import Record, is_finite, write_atomic
from bumpgate.report import benchmark as benchmarks
from bumpgate.report import diffs, junit, markdown, page, plots, tlparse
from bumpgate.report import trace as traces
from bumpgate.report.page import Page
from bumpgate.report.trace import Trace

TEMPLATES = Path(__file__).with_name("templates")
MAX_INTERVALS = 40
OUTCOME_TONE = {"SLOWER": "bad", "FASTER": "good", "INCONCLUSIVE": "open"}


@dataclass(frozen=True)
class Plot:
    """A plot. svg: our own markup, the only value that a template inserts unescaped."""

    caption: str
    svg: str


def command(
    path: Annotated[Path, typer.Argument(help="record.json of a run, or gate.json of a gate.")],
    html: Annotated[Path | None, typer.Option(help="Path of the page; by default next to the input.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Path of the JUnit XML.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Path of the Markdown job summary.")] = None,
    benchmark: Annotated[
        Path | None, typer.Option(help="Path of the rows in seconds, as JSON of pytest-benchmark.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Output of TORCH_TRACE; the page shows what was compiled, and why.")
    ] = None,
) -> None:
    """Write a record or a gate as an HTML page, JUnit XML, a Markdown job summary, or JSON of pytest-benchmark.

    Without --html, --junit, --markdown and --benchmark the first three are written next to the input.

    Exit codes: 0 written, whatever the verdict; 4 bad input.
    """
    requested = (html, junit, markdown)
    if benchmark:
        write_atomic(benchmark, benchmarks.text(gate_file.read(path)))
        typer.echo(f"wrote {benchmark}")
    if any(requested) or not benchmark:
        for written in render_to(path, *(requested if any(requested) else default_paths(path)), trace=trace):
            typer.echo(f"wrote {written}")


def default_paths(path: Path, out: Path | None = None) -> tuple[Path, Path, Path]:
    """gate.json -> gate.html, gate.junit.xml and gate.md, in the same folder or in `out`."""
    folder = out or path.parent
    return folder / f"{path.stem}.html", folder / f"{path.stem}.junit.xml", folder / f"{path.stem}.md"


def render(path: Path, out: Path) -> tuple[Path, ...]:
    """Write a record.json or gate.json in all three formats into the folder `out`; return the paths."""
    out.mkdir(parents=True, exist_ok=True)
    return render_to(path, *default_paths(path, out))


def render_to(
    path: Path,
    html: Path | None = None,
    junit_xml: Path | None = None,
    summary: Path | None = None,
    *,
    trace: Path | None = None,
) -> tuple[Path, ...]:
    """Write each format that has a path, atomically; tlparse's pages of a trace go to a folder next to the HTML.

    Raises GateFileError or RecordError on an input that is neither, TraceError on an incomplete trace,
    ExtraMissingError if HTML is requested and its libraries are not installed.
    """
    shown = page.of(gate_file.read(path))
    traced = _traced(trace, html) if trace else None
    forms: tuple[tuple[Path | None, Callable[[Page], str]], ...] = (
        (html, lambda shown: html_page(shown, traced)),
        (junit_xml, junit.xml),
        (summary, markdown.summary),
    )
    texts = [(target, form(shown)) for target, form in forms if target]
    for target, text in texts:
        # A lone surrogate in foreign text cannot be encoded.
        write_atomic(target, text.encode("utf-8", "replace").decode("utf-8"))
    return tuple(target for target, _ in texts)


def _traced(place: Path, html: Path | None) -> Trace:
    if html is None:
        raise BumpgateError("a trace is shown by the HTML page: name it with --html")
    files = traces.read(place)
    logs = [file.path for file in files]
    return Trace(files, *tlparse.pages(logs, html.with_name(f"{html.stem}.tlparse")))


def html_page(shown: Page, trace: Trace | None = None) -> str:
    """Return the page as one self-contained file: no external script, style, font or picture."""
    suspects = [row for finding in shown.findings for row in finding.rows]
    changed, more = diffs.of_records(*shown.records, suspects)
    return fill(
        "report.html.j2",
        page=shown,
        plots=all_plots(shown),
        diffs=changed,
        more_diffs=more,
        trace=trace,
        isnan=math.isnan,
    )


def fill(template: str, **values: Any) -> str:
    """Render a template with every value escaped. The page's policy allows no script but its own."""
    script = (TEMPLATES / "script.html.j2").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return str(_environment().get_template(template).render(script=script, script_digest=digest, **values))


def all_plots(shown: Page) -> list[Plot]:
    """Return all plots for which this record or gate has numbers."""
    out = _curves(shown)
    if shown.paired:
        margin = SAME_MARGIN
        axis = "time of the candidate over time of the adopted build"
        lines = [
            plots.Interval(row, _reading(t), OUTCOME_TONE.get(t.outcome, ""), t.ratio, *t.interval)
            for row, t in sorted(shown.timed.items(), key=lambda item: -_or(item[1].ratio, math.inf))
        ]
        caption = f"Timed rows in paired sessions. Within the band (\u00b1{100 * margin:g} %) a row counts as unmoved."
    else:
        margin, axis, lines = 0.0, "interval over the value itself", _own_intervals(shown)
        caption = "How well each timed row was measured: its confidence interval, relative to its value."
    if lines:
        caption += f" {len(lines[MAX_INTERVALS:])} more rows are in the table." * (len(lines) > MAX_INTERVALS)
        out.append(
            Plot(caption, plots.forest("Intervals of timed rows", lines[:MAX_INTERVALS], margin, axis))
        )
    if moved := diffs.kernels(*shown.records):
        caption = "Kernels that the candidate's compiler added and removed, by program."
        out.append(Plot(caption, plots.changes("Kernels added and removed", moved)))
    return out


def _curves(shown: Page) -> list[Plot]:
    """Return one plot per row with curves; those of both sides are overlaid."""
    found: dict[str, dict[str, tuple[float, ...]]] = {}
    units = {}
    for side, record in zip(("adopted: ", "candidate: " if shown.paired else ""), shown.records):
        for row in (j.row for j in record.judgements) if record else ():
            for name, points in row.series.items():
                found.setdefault(row.id, {})[side + name] = points
                units[row.id] = row.unit
    return [Plot(row, plots.curves(f"Curves of {row}", series, units[row])) for row, series in found.items()]


def _own_intervals(shown: Page) -> list[plots.Interval]:
    record: Record | None = shown.records[1]
    tones: Mapping[str, str] = {row.id: row.tone for row in shown.rows}
    out = []
    for row in (j.row for j in record.judgements) if record else ():
        if row.interval and is_finite(row.value) and row.value:
            low, high = sorted(x / row.value for x in row.interval)
            text = f"{page.show(row.value)} {row.unit}"
            out.append(plots.Interval(row.id, text, tones[row.id], 1.0, low, high))
    return out


def _reading(timed: gate_file.Paired) -> str:
    if not math.isfinite(timed.ratio):
        return f"{timed.outcome}, not measured"
    return f"{timed.outcome} {100 * (timed.ratio - 1):+.1f} %"


def _or(value: float, other: float) -> float:
    return value if math.isfinite(value) else other


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
