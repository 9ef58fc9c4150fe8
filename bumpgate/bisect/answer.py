"""Output of a bisect: a line per probe while it runs, the final answer, and bisect.json for other programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from packaging.version import Version
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bumpgate.bisect import wheel_metadata
from bumpgate.bisect.attribution import Attribution, PackageChange, changes
from bumpgate.bisect.bisection import Bisection
from bumpgate.bisect.candidates import Range
from bumpgate.bisect.probe import ProbeResult, Reading
from bumpgate.bisect.search import BAD, GOOD, ProbeOutcome, Search, SearchResult
from bumpgate.core.text import some
from bumpgate.env.build import Environment

SCHEMA = 1
FINDINGS = 8
SHOWN = 4
STYLE = dict.fromkeys(ProbeOutcome, "yellow") | {GOOD: "green", BAD: "red"}
NO_CHANGE: dict[str, Any] = {
    **dict.fromkeys(("at_fault", "pinned", "also_sufficient", "changed", "compare", "findings"), ()),
    "attribution": None,
    "repro": "",
    "reproduce": "",
}


class Watcher:
    """Print one line per probe; on a terminal also show the probe in progress.

    seconds: total time of the probes. last: the reason of the last outcome.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds = 0.0
        self.last = ""
        self._left = ""
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._status = Progress(*columns, console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Watcher:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status:
            self._status.stop()

    def probing(self, name: str) -> None:
        if self._status:
            for task in self._status.task_ids:
                self._status.remove_task(task)
            self._status.add_task(f"probing {name}{f' ({self._left})' if self._left else ''}")

    def probed(self, name: str, reading: Reading, result: ProbeResult, left: str) -> None:
        self.seconds += reading.seconds
        self.last, self._left = result.reason, left
        style = STYLE[result.outcome] if self._status else None
        self.console.print(f"{result.outcome.value:7}", end=" ", style=style, highlight=False)
        text = f"{name} in {reading.seconds:.1f} s: {result.reason}{f'; {left}' if left else ''}"
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def answer(
    bisection: Bisection, span: Range, result: SearchResult, attribution: Attribution | None = None
) -> dict[str, Any]:
    """Return the result of a bisect as bisect.json has it, from saved environments and readings. Runs nothing."""
    plan, search = bisection.state.plan, bisection.search
    suspects = [span.versions[i] for i in result.suspects]
    return {
        "schema": SCHEMA,
        "command": " ".join(plan.command),
        "package": span.package,
        "good": span.good,
        "bad": span.bad,
        "find_fix": plan.find_fix,
        "candidates": list(span.versions),
        "failure": result.failure,
        "first": suspects[-1] if suspects else None,
        "suspects": suspects,
        "last": None if result.last_old is None else span.versions[result.last_old],
        "posterior": result.posterior,
        "confidence": plan.confidence,
        "sure": result.sure(plan.confidence),
        "probes": result.probes,
        "confirmed": result.confirmed,
        "misreads": result.misreads,
        "noise": dict(zip(("false_bad", "false_good"), search.noise())),
        "versions_read": len({i for i, outcome in search.history if outcome in (GOOD, BAD)}),
        "earlier_changes": [span.versions[i] for i in result.earlier],
        **(_change(bisection, span, result, attribution) if result.found else NO_CHANGE),
        "deciding": list(bisection.setup.test.deciding),
        "readings": [
            {
                "version": span.versions[index],
                "outcome": outcome.value,
                "failure": reading.failure,
                "exit_code": reading.code,
                "seconds": reading.seconds,
                "folder": f"probes/{reading.place.name}",
            }
            for index, outcome, reading in bisection.steps()
        ],
    }


def _change(
    bisection: Bisection, span: Range, result: SearchResult, attribution: Attribution | None
) -> dict[str, Any]:
    """Return what the environments and the readings of the two neighbours of the change show."""
    test, find_fix = bisection.setup.test, bisection.search.find_fix
    good, bad = bisection.environments(result)
    first, last = (bad, good) if find_fix else (good, bad)
    causes = [attribution.changes, *attribution.others] if attribution else [()]
    if find_fix:  # each as a change from the earlier candidate to the later one
        causes = [tuple(replace(c, old=c.new, new=c.old) for c in cause) for cause in causes]
    blamed, *others = ([vars(c) for c in cause] for cause in causes)
    pinned = [wheel_metadata.pinned([c.name for c in cause], first, last) for cause in causes]
    neighbours = bisection.neighbours(result)
    was, now = (bisection.reading_of(index, outcome) for index, outcome in zip(neighbours, (GOOD, BAD)))
    good_name, bad_name = (f"{span.package} {span.versions[i]}" for i in neighbours)
    found = test.findings((good_name, bad_name), was, now) if was and now else []
    sides = f"--adopted {first.python} --candidate {last.python}"
    program = test.program(now)
    return {
        "at_fault": blamed,
        "pinned": sorted(set().union(*pinned)),
        "also_sufficient": others,
        "attribution": attribution
        and {name: value for name, value in vars(attribution).items() if name not in ("changes", "others")},
        "changed": list(map(str, changes(first.packages, last.packages))),
        "compare": list(_links(first, last, [c["name"] for c in blamed] or [span.package])),
        "findings": [vars(f) | {"decision": f.decision.name} for f in found],
        "repro": test.repro(bad, now),
        "reproduce": f"bumpgate reproduce --program {program} {sides}" if program else "",
    }


def _links(first: Environment, last: Environment, packages: list[str]) -> Iterator[str]:
    for name in packages:
        if link := wheel_metadata.compare_link(first, last, name):
            version = last.packages.get(name, "0")
            # A build by commit names a commit of main itself.
            nightly = Version(version).is_devrelease and "+git" not in version
            yield link + " (commits of the nightly branch: their messages name those of main)" * nightly


def text(raw: Mapping[str, Any], span: Range) -> str:
    """Format the answer, without the package at fault, which closing_text adds."""
    *unread, name = raw["suspects"]
    words, states = ("first bad", "last good"), ("BAD", "GOOD")
    good, bad = raw["last"], name
    if raw["find_fix"]:
        words, states, good, bad = ("first good", "last bad"), ("GOOD", "BAD"), bad, good
    confirmed = "" if raw["confirmed"] else ", and not confirmed by repeats"
    likely = f", likely (posterior {raw['posterior']:.2f} of {raw['confidence']}{confirmed})"
    lines = [f"{words[0]:11} {span.package} {span.label(name)}{'' if raw['sure'] else likely}"]
    if unread:
        lines.append(f"{'':11} or one of {', '.join(unread)}, which could not be probed")
    lines.append(f"{words[1]:11} {span.package} {span.label(raw['last'])}")
    if raw["earlier_changes"]:
        names = some(raw["earlier_changes"], SHOWN)
        lines.append(
            f"{'history':11} changes more than once: {names} read {states[0]}, then {states[1]} again before the last"
            " change above; bisect the earlier range for the others"
        )
    if raw["deciding"]:
        lines.append(f"{'decided by':11} {some(raw['deciding'], SHOWN)}")
    for f in raw["findings"][:FINDINGS]:
        lines.append(f"{f['label'].lower():11} {f['metric'] or 'test'}: {f['head'] or 'its value'}")
        lines += [f"{'':11}   good {good}: {line}" for line in f["adopted"]]
        lines += [f"{'':11}   bad  {bad}: {line}" for line in f["candidate"]]
    if len(raw["findings"]) > FINDINGS:
        lines.append(f"{'':11} and {len(raw['findings']) - FINDINGS} more causes in bisect.json")
    false_bad, false_good = raw["noise"].values()
    misreads = f", {raw['misreads']} misread ({false_bad:.0%} false BAD, {false_good:.0%} false GOOD)"
    lines.append(
        f"{'probes':11} {raw['probes']}{misreads if raw['misreads'] else ''}, of {raw['versions_read']} of"
        f" {len(span.versions)} versions; a fault that comes and goes between two of them is not seen"
    )
    lines.append(f"{'again':11} {raw['repro']}")
    if raw["reproduce"]:
        lines.append(f"{'reproduce':11} {raw['reproduce']}")
    return "\n".join(lines)


def closing_text(raw: Mapping[str, Any]) -> str:
    """Format the package at fault and the time."""
    lines = _fault_lines(raw, raw["attribution"]) if raw["attribution"] else []
    lines += [f"{'compare':11} {link}" for link in raw["compare"]]
    seconds = raw["seconds"]
    return "\n".join(
        [*lines, f"{'time':11} {seconds['probes']:.1f} s in probes, {seconds['overhead']:.1f} s overhead"]
    )


def _fault_lines(raw: Mapping[str, Any], attribution: Mapping[str, Any]) -> list[str]:
    if attribution["failure"]:
        return [f"{'at fault':11} not found: {attribution['failure']}"]
    causes = [[PackageChange(**c) for c in cause] for cause in (raw["at_fault"], *raw["also_sufficient"])]
    blamed, *others = (", ".join(str(c) for c in cause if c.name not in raw["pinned"]) for cause in causes)
    line = f"{'fixed by' if raw['find_fix'] else 'at fault':11} "
    spared = "" if raw["package"] in [c.name for c in causes[0]] else f", not {raw['package']}"
    if not attribution["separable"]:
        line += f"{blamed}: not separable, {attribution['unresolved']} mixtures could not be run"
    elif others and not attribution["needed"]:
        line += f"either suffices: {'; or '.join([blamed, *others])}"
    elif others:
        line += f"{blamed}{spared}; in the good set also {'; or '.join(others)}, without which the bad set stays red"
    elif not attribution["needed"]:
        line += f"{blamed}{spared}: sufficient, but the bad set without it stays red"
    else:
        line += f"{blamed}{spared}"
    along = [str(c) for cause in causes for c in cause if c.name in raw["pinned"]]
    with_it = f"{'':11} with {some(along, SHOWN)}: pinned by it, not tried apart"
    return [line, with_it] if along else [line]


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
