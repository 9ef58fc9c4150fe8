"""Problems of a run that no red row shows: a test that failed, a file that cannot be imported, a gap in the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class ProblemKind(Enum):
    """What happened. Only FAILED, UNCOLLECTED and NOTHING can be a fault of the product."""

    FAILED = "failed"  # a test raised, or reported a row of another test
    INFRA = "infra"  # the machine stopped a test that has no reviewed rows: no memory, other processes
    UNCOLLECTED = "uncollected"  # a file could not be imported
    NOTHING = "nothing"  # nothing was measured: the workers died, or every test was skipped
    GAP = "gap"  # under --gate: a test was skipped, deselected or not run, or passed where a failure is expected
    CUT_SHORT = "cut short"  # tests did not finish


FAULTS = (ProblemKind.FAILED, ProblemKind.UNCOLLECTED, ProblemKind.NOTHING)
# Words of the problems in records of schema 1, which were lines of text.
WORDS = {
    ": could not be collected: ": ProblemKind.UNCOLLECTED,
    "under --gate": ProblemKind.GAP,
    "part of the lane: ": ProblemKind.GAP,
    "the run was cut short": ProblemKind.CUT_SHORT,
    "no row measured: ": ProblemKind.NOTHING,
    "rows missing: ": ProblemKind.NOTHING,
    "nothing was checked": ProblemKind.NOTHING,
}


@dataclass(frozen=True)
class Problem:
    """test: a node id, or the path of a file; "" if the problem belongs to none. why: one line."""

    test: str
    kind: ProblemKind
    why: str

    def __str__(self) -> str:
        return f"{self.test}: {self.why}" if self.test else self.why

    @property
    def fault(self) -> bool:
        """Whether the product can have caused it."""
        return self.kind in FAULTS

    @property
    def subject(self) -> str:
        """Key by which the same problem is found in another run: the test, else the kind."""
        return self.test or self.kind.value

    def to_json(self) -> dict[str, str]:
        return {"test": self.test, "kind": self.kind.value, "why": self.why}

    @classmethod
    def from_json(cls, raw: Any) -> Problem:
        """Create a problem from to_json's output, or from a line of schema 1. Raises KeyError or ValueError."""
        if isinstance(raw, Mapping):
            return cls(str(raw["test"]), ProblemKind(raw["kind"]), str(raw["why"]))
        line = str(raw)
        kind = next((kind for words, kind in WORDS.items() if words in line), ProblemKind.FAILED)
        test, separator, why = line.partition(": ")
        return cls(test, kind, why) if separator and ".py" in test else cls("", kind, line)
