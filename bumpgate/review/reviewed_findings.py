"""The review of a gate that holds: which findings are intended, and why.

An undecided time can be reviewed once it had enough sessions: a reviewer who may accept a
proven change of +39 % may accept one that is +41 % at the worse end of its interval. That end is kept with the review.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from bumpgate.core.errors import is_line, one_line
from bumpgate.core.findings import Decision, Finding
from bumpgate.core.gate_file import GateFile
from bumpgate.core.toml import tomllib
from bumpgate.history.adoptions import ReviewedFinding
from bumpgate.process.file_transaction import AdoptionError

TABLE = "reviewed"


def reviewed(
    gate: GateFile, rows: Sequence[str], reasons: Sequence[str], file: Path | None = None
) -> tuple[ReviewedFinding, ...]:
    """Return the reviewed rows of the options and of a file. A row takes its first reason.

    Raises AdoptionError (one line) unless they cover every finding that holds the gate, and every undecided time.
    """
    if rows and len(reasons) not in (1, len(rows)):
        given = f"{len(rows)} --reviewed and {len(reasons)} --reason"
        raise AdoptionError(f"{given}: pass one reason for each, or one for all")
    if reasons and not rows:
        raise AdoptionError("--reason requires --reviewed: name the rows")
    if faulty := [reason for reason in reasons if not is_line(reason)]:
        raise AdoptionError(f"--reason must be one line of text in UTF-8, got {faulty[0]!r}")
    blocking = [f for f in gate.findings if f.decision is not Decision.ADOPT]
    by_row: dict[str, list[Finding]] = {}
    for f in blocking:
        for row in f.rows:
            if f.decision is Decision.HOLD or gate.bounded(f, row):
                by_row.setdefault(row, []).append(f)
    named: dict[str, str] = {}
    each = list(reasons) * (len(rows) if len(reasons) == 1 else 1)
    options = [("--reviewed", glob, reason) for glob, reason in zip(rows, each)]
    for where, glob, reason in (*options, *(_of_file(file) if file else ())):
        matched = [row for row in by_row if fnmatchcase(row, glob)]
        if not matched:
            raise AdoptionError(f"{where} {glob!r}: no finding that holds this gate has such a row")
        named |= {row: reason.strip() for row in matched if row not in named}
    if gaps := gate.gaps():
        raise AdoptionError(f"a review does not close gaps in the evidence: {'; '.join(gaps)}")
    if failed := [f for f in blocking if not f.rows]:
        raise AdoptionError(f"a failed test cannot be reviewed away: {'; '.join(f.cause for f in failed)}")
    if left := [row for row in by_row if row not in named]:
        causes = "; ".join(f"{f.label} {row}" for row in left for f in by_row[row])
        how = "name each with --reviewed ROW --reason TEXT, or all of them in a --review FILE"
        raise AdoptionError(f"not reviewed ({len(left)}): {causes}; {how}")
    found = {row: "; ".join(f.cause + _worse_end(gate, f, row) for f in by_row[row]) for row in named}
    return tuple(ReviewedFinding(row, found[row], reason) for row, reason in named.items())


def _worse_end(gate: GateFile, f: Finding, row: str) -> str:
    """Return how much slower an undecided time may be: the end of its interval, and slow processes."""
    if not gate.bounded(f, row):
        return ""
    timed = gate.timed[row]
    slow = f", slow processes: {timed.slow[0]} of {timed.sessions}" if timed.slow[0] > timed.slow[1] else ""
    return f", up to {100 * (timed.interval[1] - 1):+.1f} %{slow}"


def _of_file(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield place, glob and reason of each row that a review file names. Raises AdoptionError (one line)."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AdoptionError(f"--review {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise AdoptionError(f"--review {path}: not TOML ({one_line(error)})") from None
    entries = raw.get(TABLE)
    if raw.keys() != {TABLE} or not isinstance(entries, list) or not entries:
        raise AdoptionError(f"--review {path}: expected [[{TABLE}]] entries, and nothing else")
    for number, entry in enumerate(entries, 1):
        where = f"--review {path} entry {number}"
        if fault := _fault(entry):
            raise AdoptionError(f"{where}: {fault}")
        yield from ((where + ":", glob, entry["reason"]) for glob in entry["rows"])


def _fault(entry: Any) -> str:
    """Return what is wrong with one entry; "" if it is valid."""
    if not isinstance(entry, dict) or entry.keys() != {"rows", "reason"}:
        return 'expected rows = ["ROW", ...] and reason = "TEXT"'
    rows = entry["rows"]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, str) for row in rows):
        return f"rows must be a list of row ids or globs, got {rows!r}"
    return "" if is_line(entry["reason"]) else "reason must be one line of text"
