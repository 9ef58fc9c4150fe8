"""ssd_chunk_scan: the error of the chunked op against the token-by-token recurrence; test_scans.py has its laws.

B batch, T tokens, H heads, P head dim, N state dim, G groups.
The oracle is the recurrence in fp64. The op runs the chunked form, which is a different computation.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.ssd_chunk_scan import ssd_chunk_scan, ssd_chunk_scan_recurrent
from suites.ops.ssd_chunk_scan import SPEC, make_inputs, rounding_bound, without_carry
from suites.support.comparison import DTYPES, doubled, pooled, report_pooled
from suites.support.lanes import Lane, lanes
from suites.support.operands import OperandsIn

results = SPEC.trained


@lanes("cpu", "h200")
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_as_close_to_the_oracle_as_the_plain_recurrence(lane: Lane, dtype: str, row):
    chunked = partial(ssd_chunk_scan, chunk_size=16)
    seeds = [make_inputs(dtype=DTYPES[dtype], device=lane.device, seed=seed) for seed in range(8)]
    oracle = pooled(results(ssd_chunk_scan_recurrent, doubled(inputs)) for inputs in seeds)
    if lane.device == "cuda" and dtype != "fp32":  # a kernel there multiplies 16-bit operands
        with OperandsIn(DTYPES[dtype]):
            plain = pooled(results(partial(chunked, impl="eager"), inputs) for inputs in seeds)
    else:
        plain = pooled(results(ssd_chunk_scan_recurrent, inputs) for inputs in seeds)
    found = pooled(results(chunked, inputs) for inputs in seeds)
    for name in oracle:
        expected = seeds[0][{"y": "x", "final initial_state": "dt"}.get(name, name)].dtype
        assert found[name].dtype == plain[name].dtype == expected
    report_pooled(
        row, f"kernels/ssd_chunk_scan-{lane.name}-{dtype}", found, plain, oracle, inputs=SPEC.floats
    )


@lanes("cpu", "h200")
def test_fp32_error_is_within_rounding(lane: Lane):
    inputs = make_inputs(dtype=torch.float32, device=lane.device)
    oracle, _ = ssd_chunk_scan_recurrent(**doubled(inputs))
    bound = rounding_bound(inputs)
    for chunk_size in (1, 16, 64):
        y, _ = ssd_chunk_scan(**inputs, chunk_size=chunk_size)
        assert ((y - oracle).abs() <= bound).all()
    # The bound must separate a wrong scan from a correct one: no state between chunks, and no reset.
    wrong, _ = without_carry(**inputs)
    assert ((wrong - oracle).abs() > bound).double().mean() > 0.5
    unreset, _ = ssd_chunk_scan(**inputs | {"doc_ids": torch.zeros_like(inputs["doc_ids"])})
    assert ((unreset - oracle).abs() > bound).double().mean() > 0.2
