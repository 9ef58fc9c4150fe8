"""What a gate finds: its decision, one cause with the rows that it affects, and the outcome of a timed row."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date
from enum import Enum
from itertools import chain

from bumpgate.core.rows import Verdict

# Verdicts against the product. Any other red verdict means that the row was not measured or not reviewed.
PRODUCT = (Verdict.REGRESSION, Verdict.CHANGED)
# A timed row whose time changed by less is SAME, unless a rule of the plan sets another margin.
SAME_MARGIN = 0.035
ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class Decision(Enum):
    """Worst first. The value is the exit code; 125 is what `git bisect run` skips."""

    HOLD = 1
    UNKNOWN = 125
    ADOPT = 0


class TimedOutcome(Enum):
    """Outcome of the sessions so far for one row. SLOW MODE: frequent slow processes of the candidate.

    NOT SLOWER: certainly not slower than the margin `same`, and neither SAME nor FASTER is certain.
    """

    SAME = "SAME"
    NOT_SLOWER = "NOT SLOWER"
    SLOWER = "SLOWER"
    FASTER = "FASTER"
    SLOW_MODE = "SLOW MODE"
    INCONCLUSIVE = "INCONCLUSIVE"


# Label of a ratio to another implementation (Row.own) that is worse: the row of the own time judges the candidate.
PEER = "PEER"
# Outcomes that do not hold a candidate.
NO_REGRESSION = (TimedOutcome.SAME, TimedOutcome.NOT_SLOWER, TimedOutcome.FASTER)


@dataclass(frozen=True)
class Finding:
    """One cause, and all the rows that it affects.

    decision: the gate's decision from this cause alone; ADOPT if it does not block (WIN, FASTER, FIXED).
    label: the row verdict or the outcome ("CHANGED", "SLOWER"). metric, head: the signature; no metric if rows
    could not be measured, since the reason alone is then the cause. adopted, candidate: what each side showed,
    line by line. repro: one command. tests: node ids that failed, and not for their red rows alone.
    """

    decision: Decision
    label: str
    metric: str
    head: str
    rows: tuple[str, ...] = ()
    adopted: tuple[str, ...] = ()
    candidate: tuple[str, ...] = ()
    repro: str = ""
    tests: tuple[str, ...] = ()

    @property
    def cause(self) -> str:
        """Return label, metric and head: `CHANGED graph_breaks: gone: a break in attention`."""
        what = ": ".join(text for text in (self.metric, self.head) if text)
        return f"{self.label} {what}".strip()


def group(loose: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merge findings by signature: rows and evidence are joined, the first repro is kept; worst first."""
    causes: dict[tuple[Decision, str, str, str], list[Finding]] = {}
    for f in loose:
        causes.setdefault((f.decision, f.label, f.metric, f.head), []).append(f)
    merged = [
        replace(
            found[0],
            rows=_union(f.rows for f in found),
            adopted=_union(f.adopted for f in found),
            candidate=_union(f.candidate for f in found),
            tests=_union(f.tests for f in found),
        )
        for found in causes.values()
    ]
    severity = list(Decision)
    return tuple(sorted(merged, key=lambda f: (severity.index(f.decision), -len(f.rows), f.rows)))


def _union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(parts)))


@dataclass(frozen=True)
class DriftReading:
    """log_ratio: log(time of that day's candidate / time of its anchor), the estimate from SESSIONS sessions."""

    day: date
    log_ratio: float
