"""The Triton kernels of cross_entropy under the interpreter: nan, and targets out of range.

N rows, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch

from suites.ops import interpreted
from suites.ops.cross_entropy import SOFTCAPS
from suites.support.lanes import Lane, lanes

OP = interpreted()["cross_entropy"]


@lanes("cpu")
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("dtype", OP.dtypes)
def test_nan_affects_only_its_own_row(lane: Lane, dtype: str, softcap: float):
    """Neither the maximum nor the bound of the fast softcap may hide it, in a full tile or in the last one."""
    for at in (3, 130):
        inputs = OP.example(dtype, 133)
        inputs["logits"][3, at] = torch.nan
        loss, _, dlogits = OP.launched(**inputs | {"softcap": softcap})
        assert loss.isnan().tolist() == [False] * 3 + [True]
        assert dlogits.isnan().any(1).tolist() == [False] * 3 + [True]


@lanes("cpu")
@pytest.mark.parametrize("expected", [-1, 133, 2**40])
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_out_of_range_target_gives_nan_without_a_read(lane: Lane, softcap: float, expected: int):
    inputs = OP.example("fp16", 133)
    inputs["target"][1] = expected
    loss, _, dlogits = OP.launched(**inputs | {"softcap": softcap})
    assert loss.isnan().tolist() == [False, True, False, False]
    assert dlogits.isnan().all(1).tolist() == dlogits.isnan().any(1).tolist() == loss.isnan().tolist()
