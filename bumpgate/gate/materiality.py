"""From which change on a person would hold a bump: one table, by kind of row, with a reason each.

The first kind whose metric and unit match applies. A smaller change holds nothing. Of a kind that is listed it is shown
as CHANGED, and such changes add up: bumpgate.gate.evidence also compares with the oldest value in the history. No kind
allows less than the row's own tolerance. Facts and other counts are of no kind here: an expectation judges them, or any
difference counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bumpgate.core.rows import ERRORS, TIMES, Row, is_finite, is_time, metric


@dataclass(frozen=True)
class Kind:
    """One line of the table.

    metric, unit: regular expressions that the whole name matches.
    factor: of a change; beyond it a person would hold the bump.
    reason: why there.
    listed: whether a smaller change is shown, and excuses an exact value that differs from the reviewed one.
    """

    name: str
    metric: str
    unit: str
    factor: float
    reason: str
    listed: bool = True


KINDS = (
    Kind(
        "guards", "guard_count", ".*", 1.05, "a release adds some: 1.2 and 1.3 % in 2.15.0; a check is 0.1 us"
    ),
    Kind(
        "launches", r"(kernels|launches)_per_step", ".*", 1.02, "each costs 4 us of a step of 19 ms and more"
    ),
    Kind(
        "generated things",
        r"fusions|(hlo_)?instructions|generated_(modules|kernels)",
        ".*",
        1.02,
        "a compiler splits its work anew in each release; its time and its memory are rows of their own",
    ),
    Kind(
        "bytes of code",
        r"(\w+_)?code(_size)?_bytes",
        "bytes",
        1.1,
        "code is far smaller than any cache it is in",
    ),
    Kind(
        "bytes of memory",
        r".*",
        "(Ki|Mi|Gi)?[Bb](ytes)?",
        1.01,
        "1 % of a GPU is 1.4 GB, less than a training leaves free; allocators vary by 0.03, accesses by 0.23 %",
    ),
)
# Of two H200s under one build (baselines/records) 4 of 112 error rows moved, by a factor of 1.83 at most; between torch
# 2.13.0 and 2.15.0 on the CPU 31 of 55 did, by 1.72 at most. Below a hundredth of its bound an error counts as that
# hundredth: rounding alone moves an error of 1e-15 by a factor of ten.
ERROR = Kind("errors", "", "", 2.0, "rounding in another order moves an error by up to 1.83", listed=False)
OF_BOUND = 0.01
LOSS = Kind(
    "losses", "", "", 1.25, "a short training amplifies rounding: 6.8 % between two H200s", listed=False
)
PER_BUILD = Kind(
    "of one build",
    "",
    "",
    1.25,
    "generated code differs for good reasons: 1 to 2 kernels of 200 a release",
    listed=False,
)
# Compiles and starts read in sessions: CPU seconds of phases vary by some percent with the order of passes alone.
START = Kind(
    "compiles and starts",
    r"(cold|warm|import|first_step|first_call)_(\w+_)?seconds",
    "s",
    1.05,
    "within this margin the sessions call two starts the same",
    listed=False,
)
EXACT = Kind("exact", "", "", 1.0, "any difference counts", listed=False)
# A guard count of the first graph alone read 131 of 332, FLOPs without the backward 284e6 of 853e6.
PLAUSIBLE = 1.25
# Rows that the variant of torch decides: more libraries and modules are loaded, and cache keys hash more files.
OF_VARIANT = re.compile(r"throughput/start-[^/]+/(import_\w+|warm_\w+|\w*memory\w*)")


def kind_of(row: Row) -> Kind:
    """Return the kind of a row whose values are compared once."""
    if row.per_build:
        return PER_BUILD
    if row.unit == "nats" or metric(row) == "loss_growth":
        return LOSS
    if ERRORS.search(metric(row)):
        return ERROR
    found = (k for k in KINDS if re.fullmatch(k.metric, metric(row)) and re.fullmatch(k.unit, row.unit))
    return EXACT if row.better == "code" or not isinstance(row.value, (int, float)) else next(found, EXACT)


def allowed(row: Row) -> tuple[float, float]:
    """Return the factor by which a row may be worse, and the size below which values count as that size."""
    bound = row.at_most if row.at_most is not None else row.at_least
    if is_time(row) and not row.per_build:
        # A time with a bound that the test derived is mostly far below it, and is measured next to other tests.
        return 2.0 if row.at_most is not None else TIMES.get(row.unit, TIMES["ms"]), 0.0
    kind = kind_of(row)
    own = 1 / (1 - row.tolerance) if row.better == "higher" else 1 + row.tolerance
    return max(kind.factor, own), OF_BOUND * abs(bound or 0.0) if kind in (ERROR, LOSS) else 0.0


def plausible(adopted: Row, candidate: Row) -> bool:
    """Whether a better value is near enough to be one: an instrument that lost a part of a count reads far less."""
    before, after = adopted.value, candidate.value
    return is_finite(before) and is_finite(after) and max(before, after) <= PLAUSIBLE * min(before, after)


def material_time(row: str, ratio: float) -> bool:
    """Whether a person would hold a bump for a time that sessions found slower. ratio: candidate over adopted."""
    start = re.fullmatch(START.metric, row.rsplit("/", 1)[1])
    return not start or ratio > START.factor


def variants(adopted: object, candidate: object) -> list[str]:
    """Return the labels of two versions of torch, such as cpu and cu130, if they differ; empty otherwise.

    A label that names a commit (+git21fec65) is no variant.
    """
    labels = [str(torch or "").partition("+")[2].partition(".")[0] for torch in (adopted, candidate)]
    differ = len({*labels}) == 2 and all(labels) and not any(label.startswith("git") for label in labels)
    return labels if differ else []


def other_device(adopted: object, candidate: object) -> bool:
    """Whether two versions of torch are built for different devices: +cpu and +cu130, but not +cu130 and +cu132."""
    return len({re.sub(r"[\d.]+", "", label) for label in variants(adopted, candidate)}) == 2
