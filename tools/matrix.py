"""The mutant matrix: every rule, its checks, and the injected faults that they caught.

`python -m tools.matrix cpu.xml self.xml --record record.json` reads the JUnit files of two runs:

    pytest -m cpu --junitxml=cpu.xml --record=record.json
    pytest tests --junitxml=self.xml

With `--lane v6e` only the rules of that lane, and with `--lane cpu --lane v6e` those of both.

A fault comes from tests/support/mutants.py (an edit of a copy of the tree: its row must turn red) or from a test marked
`@planted(rule, fault)` (it injects the fault itself and passes only if the check refuses it). Exit code 1 if a rule
of the lanes that ran has no check or no fault, or if a fault survived; 2 on files that cannot be read or written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from bumpgate.core.errors import BumpgateError
from bumpgate.core.rows import read_record, write_atomic
from bumpgate.core.toml import tomllib
from suites.support.tables import table

RULES = Path(__file__).parents[1] / "suites" / "rules.toml"


class Rule(NamedTuple):
    """name: "C6". text: the rule in one line. lane: the lane that must run its checks and faults."""

    name: str
    text: str
    lane: str


class Fault(NamedTuple):
    """rule, injected fault, the row or test that must catch it, other rows that turned red, and whether it did."""

    rule: str
    planted: str
    killer: str
    companions: tuple[str, ...]
    killed: bool


def rules(path: Path = RULES) -> dict[str, Rule]:
    """Load the rules by name, in the order of the file."""
    raw = tomllib.loads(path.read_text())
    return {name: Rule(name, entry["says"], entry.get("lane", "cpu")) for name, entry in raw.items()}


def faults(junit: Path) -> Iterator[Fault]:
    """Yield the faults injected in one run. A fault whose test did not pass counts as not killed.

    Raises OSError and BumpgateError if the file cannot be read.
    """
    try:
        root = ElementTree.parse(junit).getroot()
    except ElementTree.ParseError as error:
        raise BumpgateError(f"{junit}: not valid XML ({error})") from None
    for case in root.iter("testcase"):
        killed = not any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        seen = {(p.get("name"), p.get("value", "")) for p in case.iter("property")}
        for name, value in sorted(seen):
            if name == "planted":
                mark = json.loads(value)
                yield Fault(mark["rule"], mark["fault"], mark.get("row") or test, tuple(mark["red"]), killed)


def checked(records: Iterable[Path]) -> dict[str, set[str]]:
    """Map rule -> rows that name it and have a positive witness."""
    found: dict[str, set[str]] = defaultdict(set)
    for record in records:
        for judgement in read_record(record).judgements:
            if judgement.row.witness > 0:
                found[judgement.row.rule].add(judgement.row.id)
    return found


def gaps(
    known: dict[str, Rule], planted: list[Fault], rows: dict[str, set[str]], lanes: set[str]
) -> list[str]:
    """Return one line for each rule without a check or a fault, each survivor and each unknown rule."""
    lines = [f"{f.rule}: {f.planted}: survived {f.killer}" for f in planted if not f.killed]
    lines += [f"{f.rule}: {f.planted}: no such rule in rules.toml" for f in planted if f.rule not in known]
    covered = {f.rule for f in planted}
    for rule in (rule for rule in known.values() if rule.lane in lanes):
        if rule.name not in covered:
            lines.append(f"{rule.name}: no planted fault: {rule.text}")
        if not rows.get(rule.name):
            lines.append(f"{rule.name}: no row checks it: {rule.text}")
    return lines


def markdown(known: dict[str, Rule], planted: list[Fault], rows: dict[str, set[str]], lanes: set[str]) -> str:
    """Format the report: one line per fault, below its rule."""
    count, killed = len({f.rule for f in planted}), sum(f.killed for f in planted)
    ran = f"Lanes: {', '.join(sorted(lanes))}."
    cells: list[tuple[str, ...]] = []
    for rule in known.values():
        own = sorted((f for f in planted if f.rule == rule.name), key=lambda f: f.planted)
        if rule.lane not in lanes and not own:
            cells.append((f"{rule.name}: {rule.text}", f"lane {rule.lane} did not run", "", "", ""))
            continue
        head = (f"{rule.name}: {rule.text}", str(len(rows.get(rule.name, ()))))
        for fault in own or [Fault(rule.name, "none", "", (), False)]:
            killer = f"`{fault.killer}`" if fault.killed else "**SURVIVED**" if own else "**no fault**"
            companions = ", ".join(fault.companions[:3]) + (" ..." if len(fault.companions) > 3 else "")
            texts = (" ".join(text.split()) for text in (fault.planted, killer, companions))
            cells.append((*head, *texts))
            head = ("", "")
    heads = ("rule", "rows that check it", "planted fault", "killed by", "also red")
    title = f"{len(planted)} planted faults of {count} rules, {killed} killed. {ran}"
    return "\n".join(["# Mutant matrix", "", title, "", *table(heads, cells), ""])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("junit", nargs="+", type=Path, help="JUnit files of the runs that planted faults")
    records = {"action": "append", "type": Path, "default": [], "help": "records whose rows check rules"}
    parser.add_argument("--record", **records)
    parser.add_argument("--lane", action="append", help="lanes that ran; by default cpu alone")
    parser.add_argument("--out", type=Path, default=Path("mutants.md"))
    options = parser.parse_args(arguments)
    known, lanes = rules(), set(options.lane or ["cpu"])
    try:
        planted = [fault for file in options.junit for fault in faults(file)]
        rows = checked(options.record)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(options.out, markdown(known, planted, rows, lanes))
    except (OSError, BumpgateError) as error:
        where = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"{where}; pass JUnit files and records of complete runs, a writable --out", file=sys.stderr)
        return 2
    open_ends = gaps(known, planted, rows, lanes)
    killed = sum(f.killed for f in planted)
    print(*open_ends, f"{options.out}: {len(planted)} planted faults, {killed} killed", sep="\n")
    return 1 if open_ends else 0


if __name__ == "__main__":
    sys.exit(main())
