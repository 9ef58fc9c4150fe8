"""Accepted differences: rows that may have another value than the reviewed one, until when, and who accepted them.

baselines/accepted.toml holds one entry per lane, row and value, written by `bumpgate accept`. A reviewed value is
permanent; an acceptance records a known difference, its owner, and the day until which it must be resolved.

Standard library only (tomli where Python has no tomllib): this file must import under any candidate torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

from bumpgate.core import lanes
from bumpgate.core.baseline import Baseline, BaselineError, Failed, judge, violation
from bumpgate.core.errors import is_line, one_line
from bumpgate.core.rows import ROW_ID, Judgement, Row, Value, Verdict, is_finite, is_number, regular
from bumpgate.core.toml import tomllib

FILE = "accepted.toml"
# Verdicts that can be accepted. Any other red verdict means that nothing was measured.
ACCEPTABLE = (Verdict.REGRESSION, Verdict.CHANGED)
NO_FAULTS: Failed = {}
# What the writer allows; an entry beyond it was edited by hand.
MAX_DAYS = 366
MAX_RATIO = 2.0


@dataclass(frozen=True)
class Acceptance:
    """One entry. The last day on which it holds is `expires`.

    value: what the row may read, judged like a reviewed value, with the reviewed tolerance. None where `ratio` is set.
    ratio: for a row that the gate times in pairs: time of the candidate over time of the adopted build.
    """

    lane: str
    row: str
    value: Value
    owner: str
    reason: str
    since: date
    expires: date
    ratio: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the identity of an entry: lane, row and accepted value. Each may occur once."""
        return self.lane, self.row, self.measured

    @property
    def measured(self) -> str:
        return f"{self.value!r}" if self.ratio is None else f"ratio {self.ratio:.6g}"

    def expired(self, today: date) -> bool:
        return today > self.expires

    def __str__(self) -> str:
        return f"{self.owner}, until {self.expires}: {self.reason}"


def today() -> date:
    """Return the day in UTC, so that an acceptance ends everywhere at once."""
    return datetime.now(timezone.utc).date()


def load(path: Path) -> tuple[Acceptance, ...]:
    """Load accepted.toml; empty if there is no such file. Raises BaselineError (one line) on an invalid one."""
    name = f"{path.parent.name}/{path.name}"
    restore = f"restore it with: git checkout {name}"
    try:
        raw = tomllib.loads(regular(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise BaselineError(f"{name}: cannot be read ({error.strerror}); {restore}") from None
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"{name}: not TOML ({one_line(error)}); {restore}") from None
    entries = raw.get("accepted", [])
    if raw.keys() - {"accepted"} or not isinstance(entries, list):
        raise BaselineError(f"{name}: holds [[accepted]] entries and nothing else; {restore}")
    known = lanes.known(path)
    found: dict[tuple[str, str, str], Acceptance] = {}
    for number, entry in enumerate(entries, 1):
        fault = _fault(entry, known)
        made = None if fault else Acceptance(**{"value": None} | entry)
        if made and made.key in found:
            fault = f"duplicate entry {made.row} {made.measured} of lane {made.lane}"
        if fault:
            raise BaselineError(f"{name} entry {number}: {fault}; {restore}")
        assert made
        found[made.key] = made
    return tuple(found.values())


def of_lane(acceptances: Iterable[Acceptance], lane: str) -> dict[str, tuple[Acceptance, ...]]:
    """Return row id -> its entries."""
    out: dict[str, tuple[Acceptance, ...]] = {}
    for a in acceptances:
        if a.lane == lane:
            out[a.row] = (*out.get(a.row, ()), a)
    return out


def lapsed(acceptances: Iterable[Acceptance], lane: str, started: str, day: date) -> list[str]:
    """Return the entries of a lane that held when a gate started (ISO 8601) and have expired since, in a few words."""
    return [
        f"the acceptance of {a.row} expired {a.expires}"
        for a in acceptances
        if a.lane == lane and a.expired(day) and started[:10] <= a.expires.isoformat()
    ]


def covers(acceptance: Acceptance, row: Row, baseline: Baseline) -> bool:
    """Return whether the row passes with the accepted value as the reviewed one. Derived expectations still apply."""
    reviewed = baseline.rows.get(row.id)
    value = acceptance.value
    if reviewed is None or value is None or violation(row) is not None:
        return False
    if row.better == "code":
        return row.value == value
    moved = Baseline(baseline.lane, {}, {row.id: replace(reviewed, value=value)})
    if row.better not in ("lower", "higher"):
        return not judge(row, moved, failed_instruments=NO_FAULTS).red
    old, measured = reviewed.value, row.value
    if not (is_number(value) and is_number(old) and is_number(measured)):
        return False
    found = judge(row, moved, failed_instruments=NO_FAULTS)
    # Also a value between the reviewed and the accepted one; far beyond the reviewed one that would accept any loss.
    near = abs(old) / MAX_RATIO <= abs(value) <= abs(old) * MAX_RATIO
    between = near and min(old, value) <= measured <= max(old, value)
    return found.verdict is Verdict.PASS or (between and found.verdict in (Verdict.WIN, Verdict.CHANGED))


def apply(
    judgement: Judgement,
    baseline: Baseline,
    acceptances: Mapping[str, Sequence[Acceptance]],
    day: date,
) -> Judgement:
    """Apply the accepted entries of a row: the judgement is no longer red, or names the owner of the expired entry.

    acceptances: from `of_lane`. An accepted row keeps its verdict, so a reader still sees the difference.
    """
    entries = acceptances.get(judgement.row.id, ())
    differs = judgement.red or judgement.explains
    if not (entries and differs and judgement.verdict in ACCEPTABLE):
        return judgement
    matching = sorted(
        (a for a in entries if covers(a, judgement.row, baseline)), key=lambda a: a.expires, reverse=True
    )
    if matching and not matching[0].expired(day):
        return replace(judgement, accepted=str(matching[0]), command="")
    if matching:
        a = matching[0]
        note = f"accepted by {a.owner}, expired {a.expires}: {a.reason}"
    else:
        note = ", ".join(f"{a.owner} accepted {a.measured} until {a.expires}" for a in entries) + ", not this"
    return replace(judgement, reason=f"{judgement.reason}; {note}")


def states(
    judgements: Iterable[Judgement],
    baseline: Baseline,
    acceptances: Mapping[str, Sequence[Acceptance]],
    day: date,
    *,
    whole: bool,
) -> list[str]:
    """Return one line per entry on its effect in this run; an unused entry is listed with the command that removes it.

    whole: the run measured every row of the lane, so an entry without its row is unused.
    """
    measured = {j.row.id: j for j in judgements if not j.row.unmeasured}
    lines = []
    for row, entries in sorted(acceptances.items()):
        j = measured.get(row)
        for a in entries if j or whole else ():
            lines.append(f"{row} {a.measured}: {_state(a, j, baseline, day)}")
    return lines


def _state(a: Acceptance, j: Judgement | None, baseline: Baseline, day: date) -> str:
    remove = f"remove it with: bumpgate accept {a.row} --lane {a.lane} --remove"
    if j is None:
        return f"accepted by {a.owner}, and nothing measures it; {remove}"
    if a.ratio is not None:
        return f"judged by the gate; {a}"
    if covers(a, j.row, baseline) and (j.accepted or j.red):
        return f"EXPIRED {a.expires}; {a.owner}: {a.reason}" if a.expired(day) else f"accepted by {a}"
    return f"accepted by {a.owner}, but measured {j.row.value!r} ({j.label}); {remove}"


def _fault(raw: Any, known: Sequence[str]) -> str | None:
    """Return what is wrong with one entry; None if it is valid. known: the declared lanes, () if there are none."""
    names = {"lane", "row", "owner", "reason", "since", "expires"}
    if not isinstance(raw, dict) or raw.keys() not in (names | {"value"}, names | {"ratio"}):
        return f"an entry has the fields {', '.join(sorted(names))}, and value or ratio"
    if not isinstance(raw["lane"], str) or (known and raw["lane"] not in known):
        return f"lane must be one of {', '.join(known) or 'the declared ones'}, got {raw['lane']!r}"
    if not isinstance(raw["row"], str) or not ROW_ID.fullmatch(raw["row"]):
        return f"row must read suite/case/metric, got {raw['row']!r}"
    for name in ("owner", "reason"):
        if not is_line(raw[name]):
            return f"{name} must be one line of text"
    for name in ("since", "expires"):
        if type(raw[name]) is not date:  # a datetime is a date as well
            return f"{name} must be a day such as 2026-12-31, got {one_line(str(raw[name]))}"
    if raw["since"] > today() or not 0 <= (raw["expires"] - raw["since"]).days <= MAX_DAYS:
        return f"since must not be in the future, and expires at most {MAX_DAYS} days later"
    value = raw.get("value", "")
    if not (isinstance(value, (str, bool)) or is_finite(value)):
        return f"value must be a finite number, a string or a boolean, got {value!r}"
    ratio = raw.get("ratio", MAX_RATIO)
    fits = is_finite(ratio) and 1 < ratio <= MAX_RATIO
    return None if fits else f"ratio must be above 1 and at most {MAX_RATIO:g}, got {ratio!r}"
