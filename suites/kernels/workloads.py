"""The ops at the model's shapes: inputs, the op, its reference, its peer, and the minimum work.

B batch, T tokens, H heads, P head dim, N state dim, D model dim, E experts, K top-k, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import attention
from kernels.causal_conv1d import causal_conv1d
from kernels.cross_entropy import cross_entropy
from kernels.dsa_indexer import dsa_attention, dsa_chosen_scores, dsa_distribution, dsa_indexer
from kernels.grouped_gemm import grouped_gemm
from kernels.m2rnn import m2rnn
from kernels.mamba3_siso import mamba3_siso
from kernels.mla import mla
from kernels.moe_combine import moe_combine
from kernels.moe_dispatch import moe_dispatch
from kernels.rms_norm_gated import rms_norm_gated
from kernels.ssd_chunk_scan import ssd_chunk_scan

T = 4096
BF16 = torch.bfloat16


class Work(NamedTuple):
    """The minimum of a call: bytes moved, and FLOP of its matrix products; for forward, and for both passes."""

    forward_bytes: float
    both_bytes: float
    forward_flops: float = 0.0
    both_flops: float = 0.0


class Case(NamedTuple):
    """op(*inputs) returns a tensor, or a tuple that begins with one; so do the reference and any peer."""

    op: Callable[..., Any]
    reference: Callable[..., Any]
    peer: Callable[..., Any] | None
    inputs: tuple[Tensor, ...]
    work: Work


def by_impl(
    function: Callable[..., Any], peer: bool = True, **options: Any
) -> tuple[Callable[..., Any], ...]:
    """Return op, reference and peer of a public function with these options."""
    impls = ("op", "eager", "upstream") if peer else ("op", "eager")
    return *(partial(function, impl=impl, **options) for impl in impls), *(() if peer else (None,))


def draw(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def one_document(B: int) -> Tensor:
    return torch.zeros(B, T, dtype=torch.int32, device="cuda")


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def streaming(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], flops: float = 0.0) -> Work:
    """Count inputs read and outputs written; the backward reads both again and writes the inputs' gradients."""
    forward, floats = size(*inputs, *outputs), [t for t in inputs if t.is_floating_point()]
    return Work(forward, forward + size(*inputs, *outputs, *floats), flops, 3 * flops)


def conv_case(B: int) -> Case:
    D, W = 3584, 4
    x, weight, bias = draw(B, T, D), draw(D, W), draw(D)
    inputs = (x, weight, bias, one_document(B))
    return Case(*by_impl(causal_conv1d), inputs, streaming(inputs, (x,)))


def norm_case(B: int, norm_before_gate: bool) -> Case:
    D, S = 7168, 896
    inputs = (draw(B, T, D), draw(B, T, D), draw(D))
    functions = by_impl(rms_norm_gated, group_size=S, norm_before_gate=norm_before_gate)
    return Case(*functions, inputs, streaming(inputs, inputs[:1]))


def attention_case(B: int, Hq: int, Hkv: int, P: int, softcap: float) -> Case:
    q, k, v = draw(B, T, Hq, P), draw(B, T, Hkv, P), draw(B, T, Hkv, P)
    inputs = (q, k, v, one_document(B))
    moved, flops = streaming(inputs, (q,)), 4 * B * Hq * P * T * T / 2
    # Two products forward; five backward.
    work = Work(moved.forward_bytes, moved.both_bytes, flops, 3.5 * flops)
    return Case(*by_impl(attention, softcap=softcap), inputs, work)


def mla_case(B: int, softcap: float) -> Case:
    H, C, P, R, V = 56, 64, 64, 64, 64
    inputs = (
        draw(B, T, H, P), draw(B, T, H, R), draw(B, T, C), draw(B, T, R),
        draw(H, P, C) * C**-0.5, draw(H, V, C) * C**-0.5, one_document(B),
    )  # fmt: skip
    moved = streaming(inputs, (draw(B, T, H, V),))
    pairs, up = 2 * B * H * T * T / 2, 2 * B * T * C * H * (P + V)
    flops, backward = pairs * (P + R + V) + up, pairs * (3 * (P + R) + 2 * V) + 2 * up
    work = Work(moved.forward_bytes, moved.both_bytes, flops, flops + backward)
    return Case(*by_impl(mla, peer=False, softcap=softcap), inputs, work)


def dsa_case(B: int, choose: bool) -> Case:
    """Attention over the chosen keys; with `choose`, the op also makes the choice, from constants."""
    Hq, Hkv, P, J, K = 56, 8, 64, 32, 256
    index = (draw(B, T, J, P), draw(B, T, P), draw(B, T, J), one_document(B))
    indices = dsa_indexer(*index, top_k=K)
    inputs = (draw(B, T, Hq, P), draw(B, T, Hkv, P), draw(B, T, Hkv, P), indices)
    moved, flops = streaming(inputs, inputs[:1]), 4 * B * T * K * Hq * P
    work = Work(moved.forward_bytes, moved.both_bytes, flops, 3.5 * flops)
    op, reference, peer = by_impl(dsa_attention, peer=False)
    if not choose:
        return Case(op, reference, peer, inputs, work)

    def choose_and_attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return dsa_attention(q, k, v, dsa_indexer(*index, top_k=K))

    moved, flops = size(*index), 2 * B * J * P * T * T / 2
    with_choice = Work(*(total + more for total, more in zip(work, (moved, moved, flops, flops))))
    return Case(choose_and_attend, reference, peer, inputs, with_choice)


def dsa_loss_case(B: int) -> Case:
    """The scores of the chosen keys and their target: what training a sparse layer adds to its attention."""
    Hq, Hkv, P, J, K = 56, 8, 64, 32, 256
    index = draw(B, T, J, P), draw(B, T, P), draw(B, T, J)
    indices = dsa_indexer(*index, one_document(B), top_k=K)
    inputs = (*index, indices, draw(B, T, Hq, P), draw(B, T, Hkv, P))

    def learn(
        q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, query: Tensor, key: Tensor, impl: str
    ) -> tuple[Tensor, Tensor]:
        scores = dsa_chosen_scores(q, k, weights, indices, impl=impl)
        return scores, dsa_distribution(query, key, indices, softcap=30.0, impl=impl)

    written = draw(B, T, K, dtype=torch.float32)
    scored, forward = 2 * B * T * K * J * P, streaming(inputs, (written, written)).forward_bytes
    flops = scored + 2 * B * T * K * Hq * P
    both = forward + size(written) + 2 * size(*index) + size(indices)
    op, reference = (partial(learn, impl=impl) for impl in ("op", "eager"))
    return Case(op, reference, None, inputs, Work(forward, both, flops, flops + 3 * scored))


def ssd_case(B: int, N: int, G: int) -> Case:
    H, P = 112, 64
    x, dt = draw(B, T, H, P), F.softplus(draw(B, T, H, dtype=torch.float32) - 3)
    A, D = -torch.rand(H, device="cuda") * 15 - 1, torch.ones(H, device="cuda")
    inputs = (x, dt, A, draw(B, T, G, N), draw(B, T, G, N), D, one_document(B))
    return Case(*by_impl(ssd_chunk_scan), inputs, streaming(inputs, (x,), B * T * H * scan_flops(P, N)))


def mamba3_case(B: int, N: int, G: int) -> Case:
    H, P = 112, 64
    v, z, dt = draw(B, T, H, P), draw(B, T, H, P), F.softplus(draw(B, T, H, dtype=torch.float32) - 3)
    q_bias, k_bias, D = (torch.ones(*shape, device="cuda") for shape in ((H, N), (H, N), (H,)))
    inputs = (
        draw(B, T, G, N), draw(B, T, G, N), v, -2 * dt, dt, draw(B, T, H), q_bias, k_bias,
        draw(B, T, H, N // 4), D, z, one_document(B),
    )  # fmt: skip

    def output_and_state(*inputs: Tensor, impl: str) -> tuple[Tensor, Tensor]:
        y, state = mamba3_siso(*inputs, impl=impl)
        return y, state.h

    return Case(*by_impl(output_and_state), inputs, streaming(inputs, (v,), B * T * H * scan_flops(P, N)))


def scan_flops(P: int, N: int, L: int = 64) -> float:
    """Return the FLOP per token and head of the chunked form, with half of the triangle: scores, their use, state in
    and out.
    """
    return 2 * (L / 2 * N + L / 2 * P + 2 * P * N)


def m2rnn_case(B: int) -> Case:
    H, K, V = 8, 64, 16
    q, k, v = draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V)
    W, f = draw(H, V, V) * V**-0.5, torch.rand(B, T, H, device="cuda")
    inputs = (q, k, v, W, f, one_document(B))
    return Case(*by_impl(m2rnn, peer=False), inputs, streaming(inputs, (v,)))


def routing(B: int, E: int, K: int) -> Tensor:
    """Return a uniform routing: K different experts per token, (B,T,K) int64."""
    return torch.rand(B, T, E, device="cuda").topk(K, dim=-1).indices


def dispatch_case(B: int) -> Case:
    E, K, D, bucket = 64, 6, 3584, 512
    x, expert = draw(B, T, D), routing(B, E, K)
    forward = size(x, expert, expert) + E * B * bucket * D * 2
    # Backward: a row of the padded gradient for each assignment, and x's gradient.
    backward = B * T * K * D * 2 + size(x, expert, expert)

    def padded(x: Tensor, impl: str) -> Tensor:
        return moe_dispatch(x, expert, E, bucket, impl=impl)[0]

    return Case(*by_impl(padded, peer=False), (x,), Work(forward, forward + backward))


def combine_case(B: int) -> Case:
    E, K, D, bucket = 64, 6, 3584, 512
    expert = routing(B, E, K)
    _, slot, _ = moe_dispatch(draw(B, T, 8), expert, E, bucket)
    y, weights = draw(E, B * bucket, D), torch.rand(B, T, K, device="cuda")
    rows, out = B * T * K * D * 2, B * T * D * 2
    forward = rows + out + size(expert, slot, weights)
    backward = out + rows + size(y) + size(expert, slot, weights, weights)

    def combine(y: Tensor, weights: Tensor, impl: str) -> Tensor:
        return moe_combine(y, expert, slot, weights, bucket, impl=impl)

    return Case(*by_impl(combine, peer=False), (y, weights), Work(forward, forward + backward))


def grouped_case(B: int, D_in: int, D_out: int) -> Case:
    E, K = 64, 6
    counts = routing(B, E, K).flatten().bincount(minlength=E)
    x, weight = draw(B * T * K, D_in), draw(E, D_in, D_out) * D_in**-0.5
    read, y = size(x, weight), len(x) * D_out * 2
    flops = 2 * len(x) * D_in * D_out

    def grouped(x: Tensor, weight: Tensor, impl: str) -> Tensor:
        return grouped_gemm(x, weight, counts, impl=impl)

    return Case(*by_impl(grouped), (x, weight), Work(read + y, 3 * read + 2 * y, flops, 3 * flops))


def cross_entropy_case(B: int, softcap: float) -> Case:
    """The peer is Inductor's compilation of the model's loss head."""
    V = 65536
    inputs = (draw(B, T, V), torch.randint(0, V, (B, T), device="cuda"))

    def written_out(logits: Tensor, target: Tensor) -> Tensor:
        s = logits.float()
        s = softcap * torch.tanh(s / softcap) if softcap else s
        return F.cross_entropy(s.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)

    op, reference, _ = by_impl(cross_entropy, peer=False, softcap=softcap)
    return Case(op, reference, torch.compile(written_out, dynamic=False), inputs, streaming(inputs, ()))


# By batch size; B 4 is timed, B 1 is what an fp64 oracle of attention can hold.
CASES: dict[str, Callable[[int], Case]] = {
    "causal_conv1d-D3584": conv_case,
    "rms_norm_gated-D7168-gate_first": partial(norm_case, norm_before_gate=False),
    "rms_norm_gated-D7168-norm_first": partial(norm_case, norm_before_gate=True),
    "attention-P128-softcap30": partial(attention_case, Hq=32, Hkv=8, P=128, softcap=30.0),
    "attention-P128": partial(attention_case, Hq=32, Hkv=8, P=128, softcap=0.0),
    "attention-P64-softcap30": partial(attention_case, Hq=56, Hkv=8, P=64, softcap=30.0),
    "attention-P64": partial(attention_case, Hq=56, Hkv=8, P=64, softcap=0.0),
    "mla-P64-softcap30": partial(mla_case, softcap=30.0),
    "mla-P64": partial(mla_case, softcap=0.0),
    "dsa_indexer-K256": partial(dsa_case, choose=True),
    "dsa_indexer-K256-attention": partial(dsa_case, choose=False),
    "dsa_indexer-K256-loss": dsa_loss_case,
    "ssd_chunk_scan-N64-G8": partial(ssd_case, N=64, G=8),
    "ssd_chunk_scan-N128-G1": partial(ssd_case, N=128, G=1),
    "mamba3_siso-N64-G8": partial(mamba3_case, N=64, G=8),
    "mamba3_siso-N128-G1": partial(mamba3_case, N=128, G=1),
    "m2rnn-H8-K64-V16": m2rnn_case,
    "moe_dispatch-E64-K6": dispatch_case,
    "moe_combine-E64-K6": combine_case,
    "grouped_gemm-E64-K6-3584x896": partial(grouped_case, D_in=3584, D_out=896),
    "grouped_gemm-E64-K6-896x3584": partial(grouped_case, D_in=896, D_out=3584),
    "cross_entropy-V65536": partial(cross_entropy_case, softcap=0.0),
    "cross_entropy-V65536-softcap15": partial(cross_entropy_case, softcap=15.0),
}

# GiB that an op, its peer and its reference need in turn, also in fp64 and with gradients, at B 1, as reserved by torch
# on an H200. By prefix of a case's name; all others stay below the last number.
ORACLE_GIB = {"attention-P128": 30, "attention-P64": 52, "mla": 52, "dsa_indexer": 18, "cross_entropy": 16}
LEAST_ORACLE_GIB = 11


def oracle_gib(name: str) -> int:
    """Return the GiB for a case of CASES."""
    return next((gib for start, gib in ORACLE_GIB.items() if name.startswith(start)), LEAST_ORACLE_GIB)
