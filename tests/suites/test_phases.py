"""The phases of a compilation: the phase of each span, and that a missing one is not 0."""

from __future__ import annotations

import time
from unittest import mock

import pytest

from bumpgate.core.baseline import Baseline, judge
from bumpgate.core.rows import Row, Verdict
from suites.support.instruments import Phases, compile_phases
from suites.support.instruments.phases import SPANS, spans_module
from suites.support.planted import planted

SECONDS = {"frame": 10.0, "compiler": 9.0, "backward": 4.0, "inductor": 11.0, "module": 8.0, "codegen": 2.0}


def measured(seconds: dict[str, float]) -> Phases:
    """Return the phases of spans reported by torch inside the block, after others with the same names."""
    names = {SPANS[ours]: spent for ours, spent in seconds.items()}
    spans = {name: [100.0] for name in SPANS.values()}
    with mock.patch.object(spans_module, "compilation_time_metrics", spans), compile_phases() as phases:
        for name, spent in names.items():
            spans[name].append(spent)
    return phases


def test_phases_do_not_overlap() -> None:
    phases = measured(SECONDS)
    assert phases == Phases(dynamo=1.0, aot=2.0, inductor=5.0, backend=6.0)
    assert sum(vars(phases).values()) == SECONDS["frame"] + SECONDS["backward"]


@pytest.mark.parametrize("lost", SECONDS)
@planted("C13", "torch renames a span of its compile times")
def test_renamed_span_is_none_and_never_zero(lost: str) -> None:
    phases = measured({name: spent for name, spent in SECONDS.items() if name != lost})
    absent = [name for name, spent in vars(phases).items() if spent is None]
    assert absent
    assert 0 not in vars(phases).values()
    row = Row(f"throughput/start/{absent[0]}", None, "s", 1, "C13", better="lower", paired=True)
    assert judge(row, Baseline("cpu"), failed_instruments={}).verdict is Verdict.INSTRUMENT


def test_spans_are_timed_in_cpu_seconds() -> None:
    """A sleep does not count; the module's own clock is restored at the end."""
    with mock.patch.object(spans_module, "compilation_time_metrics", {}), compile_phases():
        before = spans_module.time.time_ns()
        time.sleep(0.2)
        assert spans_module.time.time_ns() - before < 0.1e9
    assert spans_module.time is time
