"""A bf16 combine explodes the loss, and the model's combine does not, also with real atomics on a GPU.

Rule C33. A training run of 64 experts and top-6 went from a loss of 15 to 5014 in four steps when its weighted multiply
and its scatter-adds were bf16. That run is not public, and random weights cannot show the effect: six terms lose 0.4 %,
and a capped, normalized head bounds the loss. So the weights are constructed for the fault here. Experts come in pairs
of +v and -v, chosen in the order +a +b +c -a -b -c with equal weights, 10,000 times as large as the stream: in exact
arithmetic they add nothing. The head has no cap, and predicts each token from itself on rows of one token each: the
loss is near 0 while the stream is unchanged, and thousands once rounding has replaced it.

B batch, T tokens, D model dim, E experts, K top-k, C bucket.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import model.moe
from bumpgate.plugin.instruments import DynamoWatch, dynamo_config, read_dynamo_config, reset_dynamo
from kernels.moe_combine import moe_combine
from kernels.moe_dispatch import moe_dispatch
from launch.contract import apply_dynamo, load
from launch.policies import apply
from launch.step import make_optimizer, train_step
from model import Hybrid, preset
from suites.ops.spec import draw, routing
from suites.support.hybrids import SEED, build
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted
from suites.support.reduce import largest

BF16 = torch.bfloat16
BATCH, STEPS, LAYERS = 2, 4, 4
EMBEDDING = 1000.0  # norm of an embedding row, which scales the logits
GAIN = 1e4  # a routed expert's output over the stream
# Exact cancellation leaves a loss of 0; if rounding has replaced the stream, the loss is a multiple of EMBEDDING.
LARGEST_LOSS, EXPLODED = 1.0, 100.0
# For the fp32 result before its cast. bf16 atomics read 4e-3 on an H200, fp32 ones 6e-8.
BOUND = 1e-5

Combine = Callable[..., Tensor]


def rows_of(y: Tensor, expert: Tensor, slot: Tensor, bucket: int) -> Tensor:
    """Return the row (B,T,K,D) that each assignment of moe_combine reads; a dropped one reads that of slot 0."""
    first = torch.arange(expert.shape[0], device=y.device).view(-1, 1, 1) * bucket
    return y[expert, first + slot.clamp(min=0)]


def combine_by_atomics(
    y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int, total: torch.dtype = BF16
) -> Tensor:
    """Compute moe_combine with products in `total`, added by index_add, which on CUDA uses one atomic for each."""
    B, T, K = expert.shape
    products = (rows_of(y, expert, slot, bucket).to(total) * weights.unsqueeze(-1).to(total)).where(
        (slot >= 0).unsqueeze(-1), 0
    )
    token = torch.arange(B * T, device=y.device).repeat_interleave(K)
    summed = y.new_zeros(B * T, y.shape[-1], dtype=total).index_add(0, token, products.flatten(0, 2))
    return summed.view(B, T, -1)


def combine_in_turn(y: Tensor, expert: Tensor, slot: Tensor, weights: Tensor, bucket: int) -> Tensor:
    """Compute the same in a fixed order, rounded to bf16 after each addition: CPU index_add hides that rounding."""
    products = rows_of(y, expert, slot, bucket) * weights.unsqueeze(-1).to(y.dtype)
    products = products.where((slot >= 0).unsqueeze(-1), 0)
    out = torch.zeros_like(products[:, :, 0])
    for k in range(expert.shape[-1]):
        out = out + products[:, :, k]
    return out


def cancelling(device: str) -> Hybrid:
    """Build four E blocks whose six chosen experts cancel and an uncapped head, in bf16."""
    config = preset(
        "nam12", "narrow", layer_pattern="E", depth=LAYERS, logit_softcap=1e9, aux_weight=0.0, z_weight=0.0
    )
    hybrid = build(config, device)
    half, chosen = config.top_k // 2, config.top_k
    with torch.no_grad():
        rows = hybrid.embedding.weight
        rows.mul_(EMBEDDING / rows.norm(dim=-1, keepdim=True))
        stream = EMBEDDING / config.d_model**0.5  # root mean square
        for block in hybrid.blocks:
            # The bias determines the experts and their order, and does not enter the weights.
            block.expert_bias[:chosen] = torch.arange(chosen, 0, -1, dtype=torch.float32)
            block.min_bucket = config.seq_len
            block.router.weight[half:chosen] = block.router.weight[:half]
            block.up[half:chosen] = block.up[:half]
            # relu(n)^2 of a standard normal n has a root mean square of sqrt(1.5).
            size = GAIN * stream / (1.5 * config.expert_hidden) ** 0.5
            block.down[:half] = torch.randn_like(block.down[:half]) * size
            block.down[half:chosen] = -block.down[:half]
            block.shared_out.weight.zero_()
    return hybrid.to(BF16)


def losses(device: str, policy: str) -> list[float]:
    """Return the losses of four train steps on rows of one token, which the cancelling model predicts."""
    contract = load()
    with dynamo_config(read_dynamo_config(contract.dynamo)), DynamoWatch() as watch:
        apply_dynamo(contract)
        hybrid = cancelling(device)
        compiled = apply(hybrid, policy, contract, watch.backend())
        optimizer = make_optimizer(hybrid)
        tokens = torch.arange(BATCH, device=device).unsqueeze(1) + 10
        ids = tokens.expand(BATCH, hybrid.config.seq_len).contiguous()
        compiled.warm_up(ids)
        found = [float(train_step(compiled, optimizer, ids)) for _ in range(STEPS)]
        assert hybrid.overflow() == 0
    reset_dynamo()
    return found


# The compiled model on the GPU; on a CPU, where the code generator is not under test, its eager form.
POLICY = {"cpu": "eager", "cuda": "regional"}


@lanes("cpu", "h200")
def test_loss_does_not_explode(lane: Lane, row) -> None:
    found = losses(lane.device, POLICY[lane.device])
    row.bound(
        "numerics/cancelling_experts-four_steps/largest_loss", largest(found), "nats", at_most=LARGEST_LOSS,
        rule="C33", seen=found, evidence=[" -> ".join(f"{loss:.4g}" for loss in found)],
    )  # fmt: skip


def exploded(found: list[float], limit: float) -> bool:
    """Return whether a loss is above the limit or NaN."""
    return not largest(found) <= limit


def explodes(combine: Combine, device: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setattr(model.moe, "moe_combine", combine)
    found = losses(device, "eager")
    assert exploded(found, LARGEST_LOSS), f"the check misses it: {found}"
    return found


@lanes("cpu", "h200")
@planted("C33", "the experts' combine in bf16, an addition after the other")
def test_bf16_sum_makes_the_loss_explode(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exploded(explodes(combine_in_turn, lane.device, monkeypatch), EXPLODED)


@lanes("h200")
@planted("C33", "the experts' combine by bf16 atomics")
def test_bf16_atomics_make_the_loss_explode(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exploded(explodes(combine_by_atomics, lane.device, monkeypatch), EXPLODED)


def full_size_errors() -> tuple[dict[str, float], int]:
    """Return the relative error to fp64 of the op, fp32 and bf16 atomics at nam52's full size, and the assignments."""
    torch.manual_seed(SEED)
    config = preset("nam52", "full")
    E, K, bucket = config.experts, config.top_k, config.bucket(config.seq_len)
    expert = routing(BATCH, E, K)
    _, slot, overflow = moe_dispatch(draw(*expert.shape[:2], 8), expert, E, bucket)
    assert int(overflow) == 0
    weights = torch.rand(expert.shape, device="cuda")
    given = (
        draw(E, BATCH * bucket, config.d_model),
        expert,
        slot,
        weights / weights.sum(-1, keepdim=True),
        bucket,
    )
    exact = (rows_of(given[0], expert, slot, bucket).double() * given[3].double().unsqueeze(-1)).sum(2)
    found = {
        "op": moe_combine(*given, out_dtype=torch.float32),
        "fp32 atomics": combine_by_atomics(*given, total=torch.float32),
        "bf16 atomics": combine_by_atomics(*given),
    }
    errors = {name: float((out.double() - exact).norm() / exact.norm()) for name, out in found.items()}
    return errors, expert.numel()


@lanes("h200")
def test_combine_at_full_size(lane: Lane, row) -> None:
    errors, assignments = full_size_errors()
    torch.cuda.empty_cache()
    assert errors["fp32 atomics"] < BOUND < errors["bf16 atomics"] / 100
    row.bound(
        "numerics/moe_combine-nam52-full/error_before_cast", errors["op"], "ratio", at_most=BOUND, rule="C33",
        seen=assignments, evidence=[f"{name}: {error:.1e}" for name, error in errors.items()],
    )  # fmt: skip
