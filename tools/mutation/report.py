"""The table of a mutation run: score of each group, and each survivor with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import sqrt

from tools.mutation.trial import KILLED, SURVIVED, UNDECIDED, UNTESTED, Result

Z = 1.96
OUTCOMES = (KILLED, SURVIVED, UNTESTED, UNDECIDED)
GOAL = 0.95


def merged(results: Iterable[Result]) -> list[Result]:
    """Return one result for each mutant, in its first group: killed if any run killed it, else the last decided one."""
    found: dict[tuple[str, str], Result] = {}
    for result in results:
        key = result.name, result.diff
        known = found.setdefault(key, result)
        if known.outcome != KILLED and result.outcome != UNDECIDED:
            found[key] = replace(result, group=known.group)
    return list(found.values())


def wilson(killed: int, number: int) -> tuple[float, float]:
    """Return the 95 % interval of a share."""
    if not number:
        return 0.0, 1.0
    p, n = killed / number, number
    middle, half = (p + Z * Z / (2 * n)), Z * sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return (middle - half) / (1 + Z * Z / n), (middle + half) / (1 + Z * Z / n)


def reason(result: Result, reasons: Mapping[tuple[str, str], str]) -> str:
    """Return why no test can kill this mutant; "" if that is not known."""
    return reasons.get((result.name.split(":")[0], result.diff), "")


def open_survivors(results: Iterable[Result], reasons: Mapping[tuple[str, str], str]) -> list[Result]:
    """Return the mutants that every test let through and that have no reason."""
    return [r for r in results if r.outcome in (SURVIVED, UNTESTED) and not reason(r, reasons)]


def table(results: Sequence[Result], reasons: Mapping[tuple[str, str], str], command: str) -> str:
    """Return the Markdown page. The score leaves out equivalent and undecided mutants, and says how many those are."""
    lines = [
        "# Mutation score",
        "",
        f"Small edits of the product that some test must turn red. Made by `{command}`.",
        "",
        "* *killed*: a test file failed, or took more than four times as long. *survived*: every test file passed that"
        " executes the mutated line (where that was measured) or depends on the mutated file. *untested*: none does."
        " *undecided*: the time for one mutant ended first.",
        "* Mutants of a lane's product run without the lane's tests that are timed, long or cold (`--fast`).",
        "* *equivalent*: survived, with a reason in `tools/mutation/equivalent.toml`.",
        "* *score*: killed of all that are neither equivalent nor undecided, with its 95 % interval.",
        "",
        "| group | mutants | killed | survived | untested | undecided | equivalent | score |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups = list(dict.fromkeys(r.group for r in results))
    for name in [*groups, "all"] if len(groups) > 1 else groups:
        lines.append(_line(name, [r for r in results if name in (r.group, "all")], reasons))
    lines += ["", "## Survivors", ""]
    rows = [r for r in results if r.outcome in (SURVIVED, UNTESTED)]
    if not rows:
        return "\n".join([*lines, "None.", ""])
    lines += ["| mutant | change | test files | reason |", "|---|---|---|---|"]
    for r in sorted(rows, key=lambda r: r.name):
        change = r.diff.replace("|", "\\|").replace("`", "'")
        lines.append(f"| {r.name} | `{change}` | {len(r.digests) - 1} | {reason(r, reasons) or 'open'} |")
    return "\n".join([*lines, ""])


def _line(name: str, results: Sequence[Result], reasons: Mapping[tuple[str, str], str]) -> str:
    count = Counter(r.outcome for r in results)
    equivalent = Counter(r.outcome for r in results if r.outcome != KILLED and reason(r, reasons))
    counted = count[KILLED] + sum(count[o] - equivalent[o] for o in (SURVIVED, UNTESTED))
    low, high = wilson(count[KILLED], counted)
    score = f"{count[KILLED] / counted:.1%} ({low:.1%} to {high:.1%})" if counted else "-"
    cells = [name, len(results), *(count[o] - equivalent[o] for o in OUTCOMES), equivalent.total(), score]
    return "| " + " | ".join(map(str, cells)) + " |"
