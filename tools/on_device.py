"""Inject one fault of each class in a copy of the tree on an H200, and check that the expected row turns red.

`python -m tools.on_device [--only NAME]` prints a line per fault: its row's verdict, other red rows, seconds.
The tests first run in an unchanged copy; a row that is red there does not count as turned red by the fault.

A training step slowed by SLOWDOWN is compared with the unchanged tree on the same machine a minute before, and must
lose more than LIMIT; the unchanged tree, measured again after it, must not. The lane's own row allows 4 %, because it
compares machines. LIMIT is resolvable: the model keeps the device busy, and the 99 % interval of its median step is
1 % wide, so that neither half of it crosses LIMIT.

Exit code 1 if a fault survived, 2 on bad usage and without an H200.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bumpgate.core.baseline import Baseline, Reviewed, load, save
from bumpgate.core.errors import one_line
from bumpgate.plugin.devices import detect
from suites.support.lanes import LANES
from tests.support.mutants import MUTANTS, RED, Mutant
from tests.support.tree import RUN_SECONDS, LaneRun, copy_tree, run_lane

LANE = "h200"
WORKERS = "4"  # for the run of the unchanged copy, which has no timed rows
SLOWDOWN = 0.05
LIMIT = SLOWDOWN / 2
_CPU = {mutant.name: mutant for mutant in MUTANTS}

# By class. Whole models without Inductor, so that a fault costs seconds: graph breaks and recompilations of Dynamo do
# not depend on the code generator.
FAULTS = {
    "graph_break": replace(
        _CPU["print_in_attention"],
        test="suites/compile/test_policies.py::test_counts[nam52-per_block-h200]",
        row="compile/nam52-per_block/graph_breaks",
    ),
    "recompile": replace(
        _CPU["no_dynamic_mark"],
        test="suites/compile/test_dynamic_batch.py::test_batch_is_dynamic_and_sequence_is_static[regional-2-h200]",
        words=("C12", "model/"),
    ),
    # Not every layer: if a restart hits no cache at all, the row is INSTRUMENT.
    "cache": Mutant(
        "autograd_cache_cleared_at_start",
        (
            (
                "suites/cache/programs.py",
                '    if forget:\n        shutil.rmtree(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / forget)\n',
                '    directory = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])\n'
                '    shutil.rmtree(directory / (forget or "aotautograd"), ignore_errors=True)\n',
            ),
        ),
        "suites/cache/test_layers.py::test_every_cache_layer_is_warm_after_restart[h200]",
        "cache/layers-h200/cold_after_restart",
        ("C18", "aot"),
    ),
    "numerics": Mutant(
        "log2_of_e_to_five_digits",
        (("kernels/rms_norm_gated/kernel.py", "tl.constexpr(1.4426950408889634)", "tl.constexpr(1.4427)"),),
        "suites/kernels/test_rms_norm_gated.py::test_error_is_at_most_that_of_the_plain_formula[fp32-h200]",
        "kernels/rms_norm_gated-h200-fp32/forward_error_ratio",
        ("C36", "groups of"),
    ),
}

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


@dataclass(frozen=True)
class Outcome:
    """Result of one fault. also_red: other rows that turned red. survived: the reason, "" if it was killed."""

    fault: str
    row: str
    verdict: str
    also_red: tuple[str, ...]
    seconds: float
    survived: str
    note: str = ""

    def __str__(self) -> str:
        others = ", ".join(self.also_red[:3]) + (" ..." if len(self.also_red) > 3 else "") or "-"
        line = f"{self.fault:12} {self.verdict:12} {self.seconds:5.0f} s  {self.row}  also red: {others}"
        notes = [f"SURVIVED: {self.survived}" if self.survived else "", self.note]
        return "\n".join([line, *(f"{'':12} {note}" for note in notes if note)])


def outcome(
    fault: str, mutant: Mutant, run: LaneRun, unchanged: LaneRun, seconds: float, note: str = ""
) -> Outcome:
    """Return the result of a fault's row in `run`, given a run of the same tests in the unchanged tree."""
    verdict = run.verdict(mutant.row)
    also_red = sorted(row for row in run.rows if row != mutant.row and run.verdict(row) in RED)
    if verdict not in RED:
        survived = reason_of(run, mutant.row)
    elif not held(unchanged, mutant.row):
        survived = f"without it {unchanged.verdict(mutant.row)}: {reason_of(unchanged, mutant.row)}"
    elif words := mutant.unnamed(run.rows[mutant.row]):
        survived = f"the message does not name {', '.join(words)}"
    else:
        survived = ""
    return Outcome(fault, mutant.row, verdict, tuple(also_red), seconds, survived, note)


def held(run: LaneRun, row: str) -> bool:
    """Whether a row was measured and correct. A row that is not reviewed yet reads MISSING."""
    judged = run.rows.get(row)
    return bool(
        judged and judged["verdict"] in ("PASS", "WIN", "MISSING") and judged["row"]["value"] is not None
    )


def reason_of(run: LaneRun, row: str) -> str:
    """Return the reason of a row's verdict, or how a run without the row ended."""
    return one_line(run.rows[row]["reason"] or "no fault found" if row in run.rows else run.output[-300:])


def run(root: Path, *arguments: str) -> LaneRun:
    """Run the lane in a copy. A run that times out has measured nothing."""
    try:
        return run_lane(root, *arguments, lane=LANE)
    except subprocess.TimeoutExpired:
        return LaneRun(124, f"no end within {RUN_SECONDS} s", {})


def run_faults(names: list[str], directory: Path) -> Iterator[Outcome]:
    """Run each named fault of FAULTS in its own copy."""
    tests = dict.fromkeys(FAULTS[name].test for name in names)
    unchanged = run(copy_tree(directory / "unchanged"), "-n", WORKERS, *tests)
    for name in names:
        started, mutant = time.monotonic(), FAULTS[name]
        root = copy_tree(directory / name)
        mutant.plant(root)
        faulty = run(root, mutant.test)
        yield outcome(name, mutant, faulty, unchanged, time.monotonic() - started)


def slowdown(directory: Path) -> Outcome:
    """Time the unchanged step, the slower one and the unchanged one again."""
    started, mutant = time.monotonic(), slower_step(0.0)
    unchanged, slower = (copy_tree(directory / name) for name in ("unchanged_step", "slower_step"))
    first = run(unchanged, mutant.test)
    rate = first.rows.get(mutant.row)
    if rate is None or not rate["row"]["interval"]:
        return outcome("slowdown", mutant, first, first, time.monotonic() - started)
    milliseconds = step_milliseconds(mutant.row, rate["row"]["value"])
    mutant = slower_step(round(SLOWDOWN * milliseconds, 3))
    mutant.plant(slower)
    for root in (unchanged, slower):
        review(root / f"baselines/{LANE}.json", rate["row"])
    faulty, again = run(slower, mutant.test), run(unchanged, mutant.test)
    values = [
        r.rows[mutant.row]["row"]["value"] if mutant.row in r.rows else None for r in (first, faulty, again)
    ]
    note = f"tokens/s unchanged, slower by {SLOWDOWN:.0%}, unchanged again: {values}"
    return outcome("slowdown", mutant, faulty, again, time.monotonic() - started, note)


def step_milliseconds(row: str, tokens_per_second: float) -> float:
    """Convert to milliseconds per step of B x T tokens, as given by the row's id."""
    batch, tokens = map(int, re.search(r"-(\d+)x(\d+)/", row).groups())
    return 1e3 * batch * tokens / tokens_per_second


def review(path: Path, row: dict) -> None:
    """Write a measured row as the reviewed one, with tolerance LIMIT."""
    known = load(path, LANE, missing_ok=True)
    reviewed = Reviewed(row["value"], row["unit"], row["better"], LIMIT, test=row["test"])
    save(path, Baseline(LANE, known.made_with, {**known.rows, row["id"]: reviewed}))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.on_device", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*FAULTS, "slowdown"], help="one fault instead of all")
    only = parser.parse_args(arguments).only
    missing = detect(LANES[LANE])
    if missing:
        parser.error(missing)
    survived = 0
    print(f"{'fault':12} {'verdict':12} {'time':>7}  row")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for found in chosen(only, directory):
            print(found, flush=True)
            survived += bool(found.survived)
    print(f"{survived} survived" if survived else "every fault was killed")
    return 1 if survived else 0


def chosen(only: str | None, directory: Path) -> Iterator[Outcome]:
    names = [name for name in FAULTS if only in (None, name)]
    if names:
        yield from run_faults(names, directory)
    if only in (None, "slowdown"):
        yield slowdown(directory)


if __name__ == "__main__":
    sys.exit(main())
