"""Injected faults, each with the row that it must turn red: mutants.toml.

A mutant is one or more exact edits of a copy of the tree. It is killed if the named row of the named test is red and
its message names the rule and the location. A surviving mutant means that a rule is not checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bumpgate.core.errors import one_line
from bumpgate.core.toml import tomllib
from tests.support.tree import LaneRun, edit

# The verdicts that an injected fault must cause.
RED = ("REGRESSION", "CHANGED")


@dataclass(frozen=True)
class Mutant:
    """name; edits as (file, old, new), each `old` exactly once; the test to run; the row id; words of its message."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    test: str
    row: str
    words: tuple[str, ...]

    def plant(self, root: Path) -> None:
        """Edit a copy of the tree. Raises AssertionError if an edit no longer matches the code."""
        for file, old, new in self.edits:
            edit(root, file, old, new)

    def survived(self, run: LaneRun, unchanged: LaneRun | None = None) -> str:
        """Return why a run of the mutant's test in the edited tree is no kill; "" if its row is red.

        unchanged: a run of the same test without the fault, in which the row must be right.
        """
        if run.verdict(self.row) not in RED:
            return self._reason(run)
        if unchanged and not measured_right(unchanged, self.row):
            return f"without it {unchanged.verdict(self.row)}: {self._reason(unchanged)}"
        absent = [word for word in self.words if word not in message(run.rows[self.row])]
        return f"the message does not name {', '.join(absent)}" if absent else ""

    def also_red(self, run: LaneRun) -> tuple[str, ...]:
        return tuple(sorted(row for row in run.rows if row != self.row and run.verdict(row) in RED))

    def _reason(self, run: LaneRun) -> str:
        """Return the reason of the row's verdict, or how a run without the row ended."""
        found = run.rows.get(self.row)
        return one_line(found["reason"] or "no fault found") if found else one_line(run.output[-300:])


def measured_right(run: LaneRun, row: str) -> bool:
    """Return whether a row was measured and is not red. A row that is not reviewed yet is NEW."""
    judged = run.rows.get(row)
    good = judged is not None and judged["verdict"] in ("PASS", "WIN", "NEW")
    return good and judged["row"]["value"] is not None


def message(judged: dict[str, Any]) -> str:
    return " ".join([judged["row"]["rule"], judged["reason"], *judged["row"]["evidence"]])


def _load() -> dict[str, Mutant]:
    """Return the mutants by kind, those of a CPU by name."""
    raw = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["mutant"]
    return {
        m.get("kind", m["name"]): Mutant(
            m["name"],
            tuple((e["file"], e["before"], e["after"]) for e in m["edits"]),
            m["test"],
            m["row"],
            tuple(m["words"]),
        )
        for m in raw
    }


_ALL = _load()
MUTANTS = tuple(mutant for kind, mutant in _ALL.items() if kind == mutant.name)
# On an H200, by class (tools/on_device.py). Whole models without Inductor, so that a fault costs seconds: graph breaks
# and recompilations of Dynamo do not depend on the code generator.
ON_DEVICE = {kind: mutant for kind, mutant in _ALL.items() if kind != mutant.name}

# Sleeps on the device for a number of milliseconds. _sleep counts clock cycles, whose rate varies with the power draw
# of the step: each sleep is calibrated by the events of the last one.
SLEEP = """
class Asleep:
    cycles, events = 10**6, []

    @classmethod
    def for_milliseconds(cls, milliseconds: float) -> None:
        if cls.events:
            start, end = cls.events
            end.synchronize()
            cls.cycles = int(cls.cycles * milliseconds / start.elapsed_time(end))
        cls.events = start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        start.record()
        torch.cuda._sleep(cls.cycles)
        end.record()


"""


def slower_step(milliseconds: float) -> Mutant:
    """End a training step with a sleep on the device, so that host work cannot overlap it."""
    head = "def train_step("
    end = "    optimizer.zero_grad(set_to_none=True)\n    return loss.detach()\n"
    slept = end.replace("    return", f"    Asleep.for_milliseconds({milliseconds!r})\n    return")
    return Mutant(
        "sleep_in_the_step",
        (("launch/step.py", head, SLEEP.lstrip() + head), ("launch/step.py", end, slept)),
        "suites/throughput/test_full_size.py::test_full_size_training_step[nam56r-eager-h200]",
        "throughput/nam56r-full-eager-2x4096/tokens_per_second",
        ("C37",),
    )
