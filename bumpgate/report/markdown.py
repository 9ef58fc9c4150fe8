"""The page as Markdown, for a CI's job summary: the verdict, its causes and the red or open rows.

GitHub drops a summary of more than 1 MiB completely, so the parts that do not fit are left out and counted.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from bumpgate.core.findings import Finding
from bumpgate.report.page import Page

LIMIT = 1024 * 1024
ROOM = 512  # for the last lines
LINE = 1000  # characters of the headline, which is always shown
MAX_ROWS = 10  # of one cause; the table below has all of them
# Characters of markup, mentions or links in GitHub's Markdown. An entity is never markup.
MARKUP = re.compile(r"[\\`*_\[\]|~@#]")
SIGN = {"bad": "\U0001f534", "open": "\U0001f7e0", "good": "\U0001f7e2", "info": "\U0001f535"}


def summary(page: Page, limit: int = LIMIT) -> str:
    """Return the summary, at most `limit` bytes of UTF-8."""
    blocks = [f"## {SIGN[page.tone]} {page.word}: {escape(page.headline[:LINE])}\n\n"]
    if page.compare:
        blocks.append(f"[What lies between the two builds of torch]({page.compare})\n\n")
    blocks += [f"- {escape(str(problem))}\n" for problem in page.problems]
    blocks += [f"- acceptance: {escape(note)}\n" for note in page.notes]
    blocks += [f"- not run on this device: {escape(line)}\n" for line in page.not_run]
    if page.moved:
        title = f"{len(page.moved)} package{'s' * (len(page.moved) != 1)} moved"
        lines = [f"\n<details><summary>{title}</summary>", "", *_fenced(page.moved), "</details>\n"]
        blocks.append("\n".join(lines))
    blocks += [finding_block(finding) for finding in page.findings]
    moved = [row for row in page.rows if row.tone != "good"]
    if moved:
        heads = ("verdict", "row", "adopted", "candidate", "reviewed", "limit", "why", "rule", "place")
        blocks.append(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|\n")
    blocks += [
        f"| {SIGN[row.tone]} {escape(row.label)} | {escape(row.id)} | {escape(row.adopted)} |"
        f" {escape(row.candidate)} | {escape(row.reviewed)} | {escape(row.limit)} | {escape(row.reason)} |"
        f" {escape(row.rule)} | {escape(row.place)} |\n"
        for row in moved
    ]
    shown, used = [], 0
    for block in blocks:
        size = len(block.encode("utf-8", "replace"))
        if used + size > limit - ROOM:
            continue
        shown.append(block)
        used += size
    if left := len(blocks) - len(shown):
        shown.append(f"\n{left} more lines, causes and rows do not fit here; the HTML report has them all.\n")
    right = sum(row.tone == "good" for row in page.rows)
    shown.append(f"\n{right} of {len(page.rows)} rows are right.\n")
    return "".join(shown).encode("utf-8", "replace").decode("utf-8")


def escape(text: str) -> str:
    """Return text in one line, with all Markdown markup escaped."""
    line = html.escape(" ".join(text.split()))
    return MARKUP.sub(lambda found: f"&#{ord(found[0])};", line.replace("&#x27;", "'"))


def finding_block(finding: Finding) -> str:
    """Return one cause as a block that opens: what both sides showed."""
    rows = f"{len(finding.rows)} row{'s' * (len(finding.rows) != 1)}" if finding.rows else "the environment"
    tone = {"HOLD": "bad", "UNKNOWN": "open"}.get(finding.decision.name, "info")
    title = " ".join(word for word in (finding.label, finding.metric) if word)
    lines = [
        f"\n<details{' open' * (tone == 'bad')}><summary>{SIGN[tone]} <b>{html.escape(title)}</b> ({rows})"
    ]
    lines += [f"{escape(finding.head)}</summary>", ""]
    for name, evidence in (("adopted", finding.adopted), ("candidate", finding.candidate)):
        if evidence:
            lines += [f"**{name}**", "", *_fenced(evidence[:MAX_ROWS]), ""]
            if more := len(evidence[MAX_ROWS:]):
                lines += [f"and {more} more lines", ""]
    if finding.repro:
        lines += _fenced([finding.repro])
    return "\n".join([*lines, "</details>\n"])


def _fenced(lines: Iterable[str]) -> list[str]:
    """Return a code block whose fence is longer than any run of backticks inside."""
    text = [" ".join(line.split()) for line in lines]
    longest = max((len(run) for line in text for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *text, fence]
