"""Topics: the findings of one cause, which share one message.

Findings of one lane and package have one cause if they show the same kind of difference (the label) in the same test
module. If a lane has more than STORM new causes at once, the moved packages are the cause of all, in one topic. A
finding stays in its topic, also when it comes back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bumpgate.core.errors import one_line
from bumpgate.core.findings import Decision
from bumpgate.core.text import redacted, some
from bumpgate.history.known_findings import Known

STORM = 5
FINDINGS, ROWS, LINES = 10, 5, 4  # shown in a message: findings, and of each its rows and lines of evidence
MAX_TEXT = 30_000


@dataclass(frozen=True)
class Message:
    """Content of a topic for a channel. state: open or closed. keys: of its findings."""

    topic: str
    state: str
    title: str
    text: str
    keys: tuple[str, ...]

    @property
    def marker(self) -> str:
        """Marker that identifies the topic in the text of an issue."""
        return f"<!-- bumpgate {hashlib.sha256(self.topic.encode()).hexdigest()[:16]} -->"

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.title}\n{self.text}".encode("utf-8", "replace")).hexdigest()


def cause(one: Known) -> str:
    """Return the topic of a finding by itself."""
    subject = f"{one.lane}, {one.package or 'interpreter'}"
    return f"{subject}: {one.label} in {one.module or 'the environment'}"[:250]


def assign(known: Sequence[Known]) -> dict[str, str]:
    """Return the topics of open findings that have none yet, by key."""
    existing = {one.topic for one in known if one.topic}
    fresh = [one for one in known if not one.gone and not one.topic]
    out = {one.key: cause(one) for one in fresh}
    for lane, package in {(one.lane, one.package) for one in fresh}:
        late = [one for one in fresh if (one.lane, one.package) == (lane, package)]
        late = [one for one in late if out[one.key] not in existing]
        if len({out[one.key] for one in late}) > STORM:
            day = max(one.last for one in late)
            storm = f"{lane}, {package or 'interpreter'}: many causes at once on {day[:16]}"
            out |= {one.key: storm for one in late}
    return out


def messages(known: Iterable[Known], answers: Mapping[str, str]) -> list[Message]:
    """Return one message per topic. answers: what a bisect found, by topic."""
    topics: dict[str, list[Known]] = {}
    for one in known:
        if one.topic:
            topics.setdefault(one.topic, []).append(one)
    return [_message(topic, found, answers.get(topic, "")) for topic, found in topics.items()]


def answer(raw: Mapping[str, Any]) -> str:
    """Return a bisect's result in a few lines. raw: its bisect.json. Raises KeyError or TypeError on anything else."""
    package = raw["package"]
    if raw["failure"] or not raw["first"]:
        return f"bisect: no answer: {one_line(raw['failure'])}"
    lines = [f"bisect: first bad {package} {raw['first']}, last good {package} {raw['last']}"]
    blamed = [c for c in raw["at_fault"] if c["name"] not in raw.get("pinned", ())]
    lines += [f"at fault: {c['name']} {c['old']} -> {c['new']}" for c in blamed]
    return "\n".join([*lines, *(f"compare: {link}" for link in raw["compare"])])


def answered(raw: Mapping[str, Any], known: Iterable[Known]) -> set[str]:
    """Return the open topics that share a row with what a bisect followed, or its test if it has no rows."""
    found = raw["findings"]
    rows = {row for f in found for row in f["rows"]}
    tests = " ".join(line for f in found for line in (f["repro"], *f.get("candidate", f.get("bad", ()))))
    topics = set()
    for one in known:
        same = rows.intersection(one.rows) or (not one.rows and one.module and one.module in tests)
        if one.topic and not one.gone and same:
            topics.add(one.topic)
    return topics


def _message(topic: str, found: list[Known], answer: str) -> Message:
    still = [one for one in found if not one.gone]
    shown = still or found
    rows = {row for one in shown for row in one.rows}
    count = f"{len(rows)} rows" if len(rows) != 1 else "1 row"
    verdict = "" if any(one.decision == Decision.HOLD.name for one in shown) else " (no verdict)"
    first, latest = min(one.first for one in found)[:10], max(one.last for one in found)[:10]
    dates = f"First seen {first}, last seen {latest}."
    if not still:
        dates += f" Gone since the gate of {max(str(one.gone) for one in found)[:10]}."
    last = max(shown, key=lambda one: one.last)
    lines = [f"{len(shown)} finding{'s' * (len(shown) != 1)}, {count}. {dates}", ""]
    if last.moved:
        lines += [f"moved: {some(last.moved, 10)}", ""]
    if answer:
        lines += [*answer.splitlines(), ""]
    for one in shown[:FINDINGS]:
        lines += [*_finding(one), ""]
    if len(shown) > FINDINGS:
        lines.append(f"and {len(shown) - FINDINGS} more findings: bumpgate findings list --lane {last.lane}")
    text = redacted("\n".join(lines).rstrip())
    title = redacted(f"bumpgate: {topic}{verdict}")
    text = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "\n(cut)"
    return Message(topic, "open" if still else "closed", title, text, tuple(one.key for one in found))


def _finding(one: Known) -> list[str]:
    lines = [f"{one.key}  {one.title}"]
    lines += [f"  rows: {some(one.rows, ROWS)}"] if one.rows else []
    lines += [f"  adopted:   {one_line(line)}" for line in one.adopted[:LINES]]
    lines += [f"  candidate: {one_line(line)}" for line in one.candidate[:LINES]]
    facts = (("again", one.repro), ("owner", one.owner), ("known issue", one.issue))
    return lines + [f"  {name}: {value}" for name, value in facts if value]
