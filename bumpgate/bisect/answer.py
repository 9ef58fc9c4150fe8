"""Output of a bisect: a line per probe while it runs, the final answer, and bisect.json for other programs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import Version
from rich.console import Console
from rich.status import Status

from bumpgate.bisect import wheel_metadata
from bumpgate.bisect.attribution import Attribution, PackageChange, changes
from bumpgate.bisect.bisection import Bisection
from bumpgate.bisect.candidates import Range
from bumpgate.bisect.journal import BisectPlan
from bumpgate.bisect.probe import ProbeResult, Reading
from bumpgate.bisect.search import ProbeOutcome, Search, SearchResult
from bumpgate.core.findings import Finding
from bumpgate.core.rows import write_atomic
from bumpgate.core.text import some
from bumpgate.env.build import Environment

SCHEMA = 1
FINDINGS = 8
SHOWN = 4
STYLE = dict.fromkeys(ProbeOutcome, "yellow") | {ProbeOutcome.GOOD: "green", ProbeOutcome.BAD: "red"}


class Watcher:
    """Print one line per probe; on a terminal also show the probe in progress.

    seconds: total time of the probes. last: the reason of the last outcome.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds = 0.0
        self.last = ""
        self._left = ""
        self._status = Status("", console=console) if console.is_terminal else None

    def __enter__(self) -> Watcher:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status:
            self._status.stop()

    def probing(self, name: str) -> None:
        if self._status:
            self._status.update(f"probing {name}{f' ({self._left})' if self._left else ''}")

    def probed(self, name: str, reading: Reading, result: ProbeResult, left: str) -> None:
        self.seconds += reading.seconds
        self.last = result.reason
        self._left = left
        style = STYLE[result.outcome] if self._status else None
        self.console.print(f"{result.outcome.value:7}", end=" ", style=style, highlight=False)
        where = f" on {reading.host}" if reading.host else ""
        text = f"{name} in {reading.seconds:.1f} s{where}: {result.reason}{f'; {left}' if left else ''}"
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Answer:
    """Result of a bisect.

    good, bad: the two adjacent versions. findings: how their rows differ. unread: suspects without a reading.
    read: number of versions with a reading. noise: misread rates (false BAD, false GOOD).
    pinned: libraries at fault only as a part of the package that pins them.
    """

    range: Range
    plan: BisectPlan
    result: SearchResult
    attribution: Attribution | None = None
    good: str = ""
    bad: str = ""
    links: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    repro: str = ""
    changed: tuple[str, ...] = ()
    pinned: frozenset[str] = frozenset()
    deciding: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    read: int = 0
    noise: tuple[float, float] = (0.0, 0.0)

    @property
    def blamed(self) -> tuple[PackageChange, ...]:
        """Packages at fault, each as a change from the earlier candidate to the later one."""
        return self._in_order(self.attribution.changes) if self.attribution else ()

    @property
    def others(self) -> tuple[tuple[PackageChange, ...], ...]:
        """Further package sets that each cause the failure alone, in the same direction."""
        return tuple(map(self._in_order, self.attribution.others)) if self.attribution else ()

    def _in_order(self, found: tuple[PackageChange, ...]) -> tuple[PackageChange, ...]:
        return tuple(replace(c, old=c.new, new=c.old) for c in found) if self.plan.find_fix else found

    @property
    def sure(self) -> bool:
        return self.result.sure(self.plan.confidence)


def answer(
    bisection: Bisection, span: Range, result: SearchResult, attribution: Attribution | None
) -> Answer:
    """Build the Answer for a found result from saved environments and readings. Runs nothing."""
    test = bisection.context.test
    _, bad_environment = bisection.environments(result)
    good, bad = (span.versions[i] for i in bisection.neighbours(result))
    first, last = bisection.in_order(result)
    found = Answer(span, bisection.state.plan, result, attribution, good, bad)
    good_reading, bad_reading = (
        bisection.reading_of(index, outcome)
        for index, outcome in zip(bisection.neighbours(result), (ProbeOutcome.GOOD, ProbeOutcome.BAD))
    )
    names = f"{span.package} {good}", f"{span.package} {bad}"
    findings = test.findings(names, good_reading, bad_reading) if good_reading and bad_reading else []
    suspects = [span.versions[i] for i in result.suspects[:-1]]
    return replace(
        found,
        links=tuple(_links(first, last, [c.name for c in found.blamed] or [span.package])),
        findings=tuple(findings),
        repro=test.repro(bad_environment, bad_reading),
        changed=tuple(map(str, changes(first.packages, last.packages))),
        pinned=frozenset().union(*(_pinned(cause, first, last) for cause in (found.blamed, *found.others))),
        deciding=test.deciding,
        unread=tuple(suspects),
        read=len({i for i, o in bisection.search.history if o in (ProbeOutcome.GOOD, ProbeOutcome.BAD)}),
        noise=bisection.search.noise(),
    )


def _pinned(cause: Iterable[PackageChange], *environments: Environment) -> set[str]:
    return wheel_metadata.pinned([change.name for change in cause], *environments)


def _links(first: Environment, last: Environment, packages: list[str]) -> Iterator[str]:
    for name in packages:
        if link := wheel_metadata.compare_link(first, last, name):
            version = last.packages.get(name, "0")
            # A build by commit names a commit of main itself.
            nightly = Version(version).is_devrelease and "+git" not in version
            yield link + " (commits of the nightly branch: their messages name those of main)" * nightly


def text(found: Answer) -> str:
    """Format the answer, without the package at fault, which closing_text adds."""
    span, result = found.range, found.result
    fix = found.plan.find_fix
    name = span.versions[result.suspects[-1]]
    new, old = ("first good", "last bad") if fix else ("first bad", "last good")
    lines = [f"{new:11} {span.package} {span.label(name)}"]
    if found.unread:
        lines.append(f"{'':11} or one of {', '.join(found.unread)}, which could not be probed")
    if not found.sure:
        why = "" if result.confirmed else ", and not confirmed by repeats"
        lines[0] += f", likely (posterior {result.posterior:.2f} of {found.plan.confidence}{why})"
    assert result.last_old is not None, "a found result has a candidate before it"
    lines.append(f"{old:11} {span.package} {span.label(span.versions[result.last_old])}")
    lines += _history_lines(found)
    if found.deciding:
        lines.append(f"{'decided by':11} {some(found.deciding, SHOWN)}")
    for finding in found.findings[:FINDINGS]:
        lines.append(f"{finding.label.lower():11} {finding.metric or 'test'}: {finding.head or 'its value'}")
        lines += [f"{'':11}   good {found.good}: {line}" for line in finding.adopted]
        lines += [f"{'':11}   bad  {found.bad}: {line}" for line in finding.candidate]
    if len(found.findings) > FINDINGS:
        lines.append(f"{'':11} and {len(found.findings) - FINDINGS} more causes in bisect.json")
    misreads = (
        f", {result.misreads} misread ({found.noise[0]:.0%} false BAD, {found.noise[1]:.0%} false GOOD)"
        if result.misreads
        else ""
    )
    lines.append(
        f"{'probes':11} {result.probes}{misreads}, of {found.read} of {len(span.versions)} versions;"
        " a fault that comes and goes between two of them is not seen"
    )
    lines.append(f"{'again':11} {found.repro}")
    return "\n".join(lines)


def so_far(search: Search) -> str:
    """Return the readings next to the likeliest change, and the probability that it is between them.

    "" before both ends are read.
    """
    if not all(any(i == end for i, _ in search.history) for end in (search.first, search.last)):
        return ""
    masses = search.posterior()
    likeliest = search.first + masses.index(max(masses))  # the first candidate with the change
    margins = Counter[int]()
    for i, outcome in search.history:
        margins[i] += (outcome is search.new) - (outcome is search.old)
    old = max((i for i, m in margins.items() if m < 0 and i < likeliest), default=search.first)
    new = min((i for i, m in margins.items() if m > 0 and i >= likeliest), default=search.last)
    between = math.fsum(masses[old - search.first + 1 : new - search.first + 1])
    names = search.candidates
    return f"{'so far':11} {names[old]} {search.old.value}, {names[new]} {search.new.value}; probability {between:.2f}"


def closing_text(found: Answer, probes: float, overhead: float) -> str:
    """Format the package at fault and the time. probes: probes, overhead: seconds."""
    lines = _fault_lines(found)
    lines += [f"{'compare':11} {link}" for link in found.links]
    lines.append(f"{'time':11} {probes:.1f} s in probes, {overhead:.1f} s overhead")
    return "\n".join(lines)


def _history_lines(found: Answer) -> list[str]:
    """Warn if the state changes more than once; the answer is the last change."""
    if not found.result.earlier:
        return []
    new, old = ("GOOD", "BAD") if found.plan.find_fix else ("BAD", "GOOD")
    names = some([found.range.versions[i] for i in found.result.earlier], SHOWN)
    return [
        f"{'history':11} changes more than once: {names} read {new}, then {old} again before the last change"
        " above; bisect the earlier range for the others"
    ]


def _fault_lines(found: Answer) -> list[str]:
    attribution = found.attribution
    if attribution is None:
        return []
    if attribution.failure:
        return [f"{'at fault':11} not found: {attribution.failure}"]
    label = "fixed by" if found.plan.find_fix else "at fault"
    named = {c.name for c in found.blamed}
    spared = "" if found.range.package in named else f", not {found.range.package}"
    line = f"{label:11} {_cause(found, found.blamed)}"
    others = [_cause(found, other) for other in found.others]
    if not attribution.separable:
        line += f": not separable, {attribution.unresolved} mixtures could not be run"
    elif others and not attribution.needed:
        line = f"{label:11} either suffices: {'; or '.join([line[12:], *others])}"
    elif others:
        line += f"{spared}; in the good set also {'; or '.join(others)}, without which the bad set stays red"
    elif not attribution.needed:
        line += f"{spared}: sufficient, but the bad set without it stays red"
    else:
        line += spared
    along = [str(c) for cause in (found.blamed, *found.others) for c in cause if c.name in found.pinned]
    with_it = f"{'':11} with {some(along, SHOWN)}: pinned by it, not tried apart"
    return [line, with_it] if along else [line]


def _cause(found: Answer, cause: Iterable[PackageChange]) -> str:
    return ", ".join(str(change) for change in cause if change.name not in found.pinned)


def write_json(path: Path, found: Answer, bisection: Bisection, **more: Any) -> None:
    """Write all readings and results of the bisect to a JSON file, atomically."""
    span, result = found.range, found.result
    suspects = [span.versions[i] for i in result.suspects]
    attribution = found.attribution
    raw = {
        "schema": SCHEMA,
        "command": " ".join(found.plan.command),
        "package": span.package,
        "good": span.good,
        "bad": span.bad,
        "find_fix": found.plan.find_fix,
        "candidates": list(span.versions),
        "failure": result.failure,
        "first": suspects[-1] if suspects else None,
        "suspects": suspects,
        "last": None if result.last_old is None else span.versions[result.last_old],
        "posterior": result.posterior,
        "sure": found.sure,
        "probes": result.probes,
        "confirmed": result.confirmed,
        "misreads": result.misreads,
        "noise": {"false_bad": found.noise[0], "false_good": found.noise[1]},
        "versions_read": found.read,
        "earlier_changes": [span.versions[i] for i in result.earlier],
        "at_fault": [vars(c) for c in found.blamed],
        "pinned": sorted(found.pinned),
        "also_sufficient": [[vars(c) for c in other] for other in found.others],
        "attribution": attribution
        and {k: v for k, v in vars(attribution).items() if k not in ("changes", "others")},
        "deciding": list(found.deciding),
        "changed": list(found.changed),
        "compare": list(found.links),
        "findings": [vars(f) | {"decision": f.decision.name} for f in found.findings],
        "repro": found.repro,
        "readings": [
            {
                "version": step.version,
                "outcome": step.outcome.value,
                "failure": step.reading.failure,
                "exit_code": step.reading.code,
                "seconds": step.reading.seconds,
                "host": step.reading.host,
                "folder": f"probes/{step.reading.place.name}",
            }
            for step in bisection.steps()
        ],
        **more,
    }
    write_atomic(path, json.dumps(raw, indent=1) + "\n")
