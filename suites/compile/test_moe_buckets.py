"""The padded dispatch: one graph per power-of-two bucket for any routing, and the same result as dropless.

Rule C11. Sources: GShard (capacity and groups), the padded path of the hybrid's own launchers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bumpgate.plugin.instruments import DynamoWatch, dynamo_config, read_dynamo_config, reset_dynamo
from launch.contract import apply_dynamo, load
from launch.step import needed_bucket
from model import preset
from model.layers import rms_norm
from model.moe import MoEBlock
from suites.support.hybrids import SEED
from suites.support.lanes import Lane, lanes
from suites.support.reduce import largest

INSTRUMENTS = ("graphs", "recompiles")
SKEWS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dropless(block: MoEBlock, x: Tensor) -> Tensor:
    """Compute the block without dispatch: every expert on every token, weighted; x (B,T,D) -> (B,T,D)."""
    u = rms_norm(x, block.eps)
    expert, weights, _, _ = block.route(u)
    dense = torch.zeros(*expert.shape[:2], block.experts, dtype=weights.dtype).scatter(-1, expert, weights)
    hidden = F.relu(torch.einsum("btd,edf->btef", u, block.up)).square()
    routed = torch.einsum("btef,efd,bte->btd", hidden, block.down, dense.to(x.dtype))
    gate, value = block.shared_in(u).chunk(2, dim=-1)
    return x + routed + block.shared_out(F.silu(gate) * value)


@lanes("cpu")
def test_moe_compiles_one_graph_per_bucket(lane: Lane, row, canaries) -> None:
    canaries(*INSTRUMENTS)
    config = preset("nam52")
    contract = load()
    torch.manual_seed(SEED)
    block = MoEBlock(config)
    inputs = torch.randn(2, config.seq_len, config.d_model)
    popular = torch.randn(config.d_model)
    errors, buckets, needed = [], set(), []
    with dynamo_config(read_dynamo_config(contract.dynamo)):
        apply_dynamo(contract)
        with DynamoWatch() as watch:
            block.compile(backend=watch.backend("eager"))
            for skew in SKEWS:
                x = inputs + skew * popular  # the more the tokens lean one way, the fuller a few experts
                block.min_bucket = needed_bucket(block, rms_norm(x, block.eps))
                slots = max(block.min_bucket, config.bucket(config.seq_len))
                buckets.add(1 << (slots - 1).bit_length())
                needed.append(block.min_bucket)
                with torch.no_grad():
                    y, _ = block(x)
                    errors.append(float((y - dropless(block, x)).abs().max() / y.abs().max()))
        reset_dynamo()
    report = watch.report
    evidence = (f"buckets {sorted(buckets)} over {len(SKEWS)} routings (needed {needed})", *report.evidence())
    case, shared = "compile/nam52-moe_buckets", {"rule": "C11", "seen": report.calls, "evidence": evidence}
    row.count(f"{case}/graphs", report.unique_graphs, expected=len(buckets), **shared)
    row.bound(f"{case}/overflow_count", int(block.overflow), "pairs", expected=0, **shared)
    row.bound(f"{case}/error_to_dropless", largest(errors), "ratio", at_most=1e-5, **shared)
