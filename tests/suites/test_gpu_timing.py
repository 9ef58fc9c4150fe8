"""Statistics of GPU samples, and the stack that loads the ops' kernels. No GPU is needed."""

from __future__ import annotations

import pytest

from model import preset
from suites.support import gpu_timing
from suites.throughput.full_size import one_of_each_kind


def test_median_interval_of_few_and_many_samples() -> None:
    """The 99 % interval of a median by the binomial distribution."""
    assert gpu_timing.median([8, 1, 7, 2, 6, 3, 5, 4])[:3] == (4.5, 1, 8)
    assert gpu_timing.median(range(20))[:3] == (9.5, 4, 16)


def test_compared_calls_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_timing, "_timed", lambda function: function())
    clock = iter(range(100))
    functions = [lambda: next(clock), lambda: next(clock)]
    assert gpu_timing.alternately(functions, calls=3, warmup=2) == [[4, 6, 8], [5, 7, 9]]


@pytest.mark.parametrize("name", ["nam12", "nam52", "nam56r"])
def test_short_stack_has_each_kind_of_layer_once(name: str) -> None:
    config = preset(name, "full")
    short = one_of_each_kind(config)
    assert [*short.kinds] == [*dict.fromkeys(config.kinds)]
    assert (short.d_model, short.experts, short.vocab_size) == (
        config.d_model,
        config.experts,
        config.vocab_size,
    )
