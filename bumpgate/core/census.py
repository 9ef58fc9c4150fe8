"""The census of a run: each test that was collected for its lane, and how it ended, whether or not it reports rows.

A record has it as `tests`, node id -> outcome. baselines/<lane>.tests is the reviewed set of a lane: one node id a
line, sorted. Standard library only: this file must import under any candidate torch, and under none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from bumpgate.core.baseline import BaselineError, in_tier
from bumpgate.core.rows import regular

PASSED, FAILED, SKIPPED, XFAILED, XPASSED = "passed", "failed", "skipped", "xfailed", "xpassed"
# Failed, and a plugin ran it again. Collected and not run to its end. Left out by an option or a plugin that says so.
RERUN, NOT_REACHED, DESELECTED = "rerun", "not reached", "deselected"
OUTCOMES = (PASSED, FAILED, SKIPPED, XFAILED, XPASSED, RERUN, NOT_REACHED, DESELECTED)
ABSENT = "absent"
# Why a test with this outcome proves nothing. A failure and a skip are shown as such.
LOST = {
    ABSENT: "not collected",
    XFAILED: "failing as xfail expects",
    RERUN: "run again after a failure",
    NOT_REACHED: "collected and not run",
    DESELECTED: "deselected",
}
Tests = Mapping[str, str]


def lost(expected: Iterable[str], tests: Tests) -> dict[str, str]:
    """Return the expected tests that a run has lost, in order: node id -> a key of LOST.

    expected: the reviewed set, or `ran` of the run that this one is compared with.
    """
    found = {test: tests.get(test, ABSENT) for test in sorted(expected)}
    return {test: outcome for test, outcome in found.items() if outcome in LOST}


def ran(tests: Tests) -> frozenset[str]:
    """Return the tests that another run of the same sources must not lose: those that ran to their own end."""
    return frozenset(test for test, outcome in tests.items() if outcome in (PASSED, FAILED, XPASSED, RERUN))


def reviewed(old: Collection[str], tests: Tests, *, whole: bool) -> frozenset[str]:
    """Return the set that a review of this run keeps.

    old: the set before. whole: the run selected the whole lane, so that a test that it lacks is gone.
    Tests of a tier are not in it: which ones exist depends on the tier's environment.
    """
    kept = (test for test, outcome in tests.items() if outcome in (PASSED, FAILED, SKIPPED, XPASSED))
    return frozenset(test for test in kept if not in_tier(test)) | (frozenset() if whole else frozenset(old))


def path(baseline: Path) -> Path:
    """Return the path of the reviewed set next to a lane's baseline."""
    return baseline.with_suffix(".tests")


def load(path: Path) -> frozenset[str]:
    """Return the reviewed set of a lane; empty if there is no such file. Raises BaselineError on an invalid one."""
    name = f"{path.parent.name}/{path.name}"
    restore = f"restore it with: git checkout {name}"
    try:
        lines = regular(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise BaselineError(f"{name}: cannot be read ({error.strerror}); {restore}") from None
    except ValueError:
        raise BaselineError(f"{name}: not UTF-8; {restore}") from None
    if lines.pop():
        raise BaselineError(f"{name}: its last line is cut off; {restore}")
    for number, (before, line) in enumerate(zip(["", *lines], lines), 1):
        if "::" not in line or line <= before:
            raise BaselineError(
                f"{name} line {number}: must hold sorted node ids, got {line[:80]!r}; {restore}"
            )
    return frozenset(lines)


def text(tests: Iterable[str]) -> str:
    """Return a reviewed set as its file."""
    return "".join(f"{test}\n" for test in sorted(set(tests)))
