"""The padded experts of the full-size model against the dropless form over F.grouped_mm: time, memory, and padding.

Rule C11: the power-of-two bucket gives one graph for every routing, and this is its cost. Both are called eagerly on
the same routing, uniform over the experts, with nothing dropped. The time of the dropless form includes the plain torch
around grouped_mm that a compiler would fuse.

B batch, T tokens, D model dim, E experts, K top-k, F expert hidden, C bucket (slots per expert and sequence).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grouped_gemm import grouped_gemm
from kernels.moe_combine import moe_combine
from kernels.moe_dispatch import moe_dispatch
from model import preset
from suites.ops.spec import draw, routing
from suites.support.gpu_timing import CALLS, forward_and_backward, milliseconds
from suites.support.lanes import Lane, lanes
from suites.throughput.full_size import BATCH, DEVICE_BOUND

TOLERANCE = {"milliseconds": 0.06, "peak": 0.02, "ratio": 0.08}
# Both multiply in bf16 and sum in fp32: they differ by the rounding of the expert's hidden and output.
LARGEST_DIFFERENCE = 1e-2


class Experts:
    """The routed experts of one E block, padded as in the model and without padding, on one routing (B,T,K)."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        config = preset(name, "full")
        B, T, D, hidden = BATCH, config.seq_len, config.d_model, config.expert_hidden
        self.E, self.K, self.bucket = config.experts, config.top_k, config.bucket(T)
        self.expert = routing(B, self.E, self.K)
        assert self.expert.shape[1] == T
        self.counts = (self.expert.unsqueeze(-1) == torch.arange(self.E, device="cuda")).sum((0, 1, 2))
        self.order = self.expert.flatten().argsort(stable=True)  # assignments by expert
        self.place = self.order.argsort()  # position of each assignment in that order
        weights = torch.rand(B, T, self.K, device="cuda")
        self.leaves = (
            draw(B, T, D), draw(self.E, D, hidden) * D**-0.5, draw(self.E, hidden, D) * hidden**-0.5,
            weights / weights.sum(-1, keepdim=True),
        )  # fmt: skip

    def padded(self, x: Tensor, up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
        """Like model.moe.MoEBlock.forward: x (B,T,D), up (E,D,F), down (E,F,D), weights (B,T,K) fp32 -> (B,T,D)."""
        rows, slot, _ = moe_dispatch(x, self.expert, self.E, self.bucket)
        return moe_combine(self.padded_products(rows, up, down), self.expert, slot, weights, self.bucket)

    def padded_products(self, rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """rows (E,B*C,D) -> (E,B*C,D)."""
        return torch.bmm(F.relu(torch.bmm(rows, up)).square(), down)

    def grouped(self, x: Tensor, up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
        """Compute the same without padding: tokens sorted by expert, a gather back, the weighted sum in fp32."""
        rows = x.flatten(0, 1).index_select(0, self.order // self.K)
        y = self.grouped_products(rows, up, down).index_select(0, self.place)
        products = y.view(-1, self.K, x.shape[-1]).float() * weights.view(-1, self.K, 1)
        return products.sum(1).to(x.dtype).view_as(x)

    def grouped_products(self, rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """rows (B*T*K,D) sorted by expert -> (B*T*K,D)."""
        hidden = F.relu(grouped_gemm(rows, up, self.counts, impl="upstream")).square()
        return grouped_gemm(hidden, down, self.counts, impl="upstream")


def peak_memory(call: Callable[[], object]) -> int:
    """Return the peak of bytes that the second call allocates, above what is already allocated."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held


@lanes("h200")
@pytest.mark.parametrize("name", ["nam52", "nam56r"])
def test_padded_against_grouped_experts(lane: Lane, name: str, row, exclusive_machine) -> None:
    experts = Experts(name)
    x, up, down, _ = experts.leaves
    with torch.no_grad():
        expected, found = experts.grouped(*experts.leaves), experts.padded(*experts.leaves)
        rows, _, overflow = moe_dispatch(x, experts.expert, experts.E, experts.bucket)
        assert int(overflow) == 0
        difference = float((found.double() - expected.double()).norm() / expected.double().norm())
        assert difference < LARGEST_DIFFERENCE
        real = x.flatten(0, 1).index_select(0, experts.order // experts.K)
    ways = {
        "padded": (experts.padded, experts.padded_products, rows),
        "grouped": (experts.grouped, experts.grouped_products, real),
    }
    layer, products, shared = {}, {}, {"rule": "C11", "seen": CALLS}
    for way, (whole, inner, inner_rows) in ways.items():
        _, both = forward_and_backward(whole, experts.leaves)
        peak = peak_memory(both)
        layer[way] = milliseconds(both)
        products[way] = milliseconds(forward_and_backward(inner, (inner_rows, up, down))[1])
        case = f"throughput/{name}-full-experts-{way}"
        about = {"tolerance": TOLERANCE["milliseconds"], "bound": DEVICE_BOUND, **shared}
        for metric, timing in (("layer", layer[way]), ("products", products[way])):
            row.timed(f"{case}/{metric}_milliseconds", timing, "ms", **about)
        row.cost(f"{case}/layer_peak_bytes", peak, "bytes", tolerance=TOLERANCE["peak"], **shared)
    case = f"throughput/{name}-full-experts"
    for metric, timings in (("layer", layer), ("products", products)):
        row.cost(
            f"{case}/{metric}_padded_over_grouped", timings["padded"].median / timings["grouped"].median,
            "ratio", tolerance=TOLERANCE["ratio"], bound=DEVICE_BOUND, **shared,
            evidence=[f"outputs differ by {difference:.1e}"],
            own=f"throughput/{name}-full-experts-padded/{metric}_milliseconds",
        )  # fmt: skip
    slots, assignments = rows.shape[0] * rows.shape[1], experts.expert.numel()
    evidence = [f"{slots / assignments - 1:.1%} more than the {assignments} assignments"]
    for metric, found, expected, seen in (
        ("padded_slots", slots, experts.E * BATCH * experts.bucket, assignments),
        ("assignments", int(experts.counts.sum()), BATCH * x.shape[1] * experts.K, slots),
    ):
        about = {"expected": expected, "rule": "C11", "seen": seen, "evidence": evidence}
        row.bound(f"{case}/{metric}", found, "slots", **about)
