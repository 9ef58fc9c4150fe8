"""Every op with faulty versions of it: what the ratio rule must reject, and what it must accept.

B batch, T tokens, R MIMO rank, D channels, K chosen keys, C bucket.
A fault takes the fp32 inputs and the op's correct outputs and returns wrong ones, so that all faults of an op share one
oracle. The oracle is the plain formula of the op's suite in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import attention
from kernels.attention.naive import attention_naive
from kernels.causal_conv1d import causal_conv1d
from kernels.causal_conv1d.naive import causal_conv1d_naive
from kernels.cross_entropy import cross_entropy
from kernels.cross_entropy.naive import cross_entropy_naive
from kernels.dsa_indexer import dsa_attention, dsa_chosen_scores, dsa_indexer
from kernels.dsa_indexer.naive import dsa_attention_naive, dsa_chosen_scores_naive
from kernels.grouped_gemm import grouped_gemm
from kernels.grouped_gemm.naive import grouped_gemm_naive
from kernels.m2rnn import m2rnn, m2rnn_recurrent
from kernels.mla import mla
from kernels.mla.naive import mla_naive
from kernels.moe_combine import moe_combine
from kernels.moe_combine.naive import moe_combine_naive
from kernels.moe_dispatch import moe_dispatch
from kernels.moe_dispatch.naive import moe_dispatch_naive
from kernels.rms_norm_gated import rms_norm_gated
from kernels.rms_norm_gated.naive import rms_norm_gated_naive
from kernels.ssd_chunk_scan import ssd_chunk_scan, ssd_chunk_scan_recurrent
from suites.kernels import inputs as op_inputs
from suites.kernels.scan_op import on_circle
from suites.support.comparison import doubled, error_ratio
from suites.support.reduce import largest
from suites.support.scans import carried

Inputs = dict[str, Any]
Outputs = tuple[Tensor, ...]
Fault = Callable[["Subject", Inputs, Outputs], Outputs]
Faults = dict[str, Fault]


class Subject(NamedTuple):
    """One op: make_inputs(seed) -> its fp32 inputs by name, op and plain formula, and its specific faults.

    exact: the formula that in fp64 is the oracle, if it is not the plain one.
    """

    make_inputs: Callable[[int], Inputs]
    op: Callable[..., Any]
    plain: Callable[..., Any]
    faults: Faults = {}
    exact: Callable[..., Any] | None = None

    def run(self, inputs: Inputs) -> Outputs:
        return _outputs(self.op(**inputs))

    def judge(self, inputs: Inputs) -> Callable[[Outputs], float]:
        """Return a function of outputs that computes their worst error ratio for these inputs."""
        plain = _outputs(self.plain(**inputs))
        oracle = _outputs((self.exact or self.plain)(**doubled(inputs)))
        return lambda found: largest(error_ratio(*three) for three in zip(found, plain, oracle, strict=True))

    def every_fault(self) -> Faults:
        return EVERY_OP | self.faults


def _outputs(result: Any) -> Outputs:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _first(change: Callable[[Tensor], Tensor]) -> Fault:
    """Return the fault that changes a copy of the first output only."""
    return lambda subject, inputs, right: (change(right[0].clone()), *right[1:])


def _one_wrong_element(y: Tensor) -> Tensor:
    """Change the entry of median size by 1 %. Zeros do not count: a factor of 1.01 would not change them."""
    sizes = y.abs().flatten()
    used = sizes.nonzero().flatten()
    y.view(-1)[used[sizes[used].argsort()[len(used) // 2]]] *= 1.01
    return y


def _zeroed_tail(y: Tensor) -> Tensor:
    """Leave the last token unwritten; of dispatched tokens, the last row of each expert; of a product, a column."""
    y[:, -1] = 0
    return y


def _tf32_operands(subject: Subject, inputs: Inputs, right: Outputs) -> Outputs:
    """Round operands as a Triton product of fp32 does by default: 10 bits of each factor."""
    return subject.run({n: _tf32(t) for n, t in inputs.items()})


def _tf32(t: Any) -> Any:
    if not isinstance(t, Tensor) or t.dtype != torch.float32:
        return t
    return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


EVERY_OP: Faults = {
    "3 % scale": _first(lambda y: y * 1.03),
    "one wrong element": _first(_one_wrong_element),
    "zeroed tail": _first(_zeroed_tail),
    "tf32 operands": _tf32_operands,
}


def _dropped_reset(subject: Subject, inputs: Inputs, right: Outputs) -> Outputs:
    """Treat the whole row as one document."""
    return subject.run(inputs | {"doc_ids": torch.zeros_like(inputs["doc_ids"])})


def _bf16_state(scan: Callable[..., Any], per_token: Sequence[str], state: Sequence[str]) -> Fault:
    """Store the state between two halves of the row in bf16. state: its names, in the order of scan's outputs."""

    def fault(subject: Subject, inputs: Inputs, right: Outputs) -> Outputs:
        half = inputs["doc_ids"].shape[1] // 2
        early = {n: t[:, :half] if n in per_token else t for n, t in inputs.items()}
        late = {n: t[:, half:] if n in per_token else t for n, t in inputs.items()}
        y0, *middle = scan(**early)
        narrow = (carried(s.bfloat16().float(), inputs["doc_ids"], half) for s in middle)
        y1, *final = subject.op(**late | dict(zip(state, narrow, strict=True)))
        return torch.cat((y0, y1), 1), *final

    return fault


def _without_diagonal(subject: Subject, inputs: Inputs, right: Outputs) -> Outputs:
    """Compute Mamba-3's whole-sequence form with the same weight for a token itself as for those after it."""
    query, key = op_inputs.mamba3_siso.biased(inputs, "q"), op_inputs.mamba3_siso.biased(inputs, "k")
    _, shifted = op_inputs.mamba3_siso.trapezoid(inputs)
    itself = inputs["v"] * (shifted * (query * key).sum(-1))[..., None]
    return right[0] + itself * F.silu(inputs["z"]), *right[1:]


def _noconv(subject: Subject, inputs: Inputs, right: Outputs) -> Outputs:
    """Add the error of the Mamba-2 scan with a scaled key, taken with zero angles and without a state, which that scan
    does not support.
    """
    still = inputs | {n: torch.zeros_like(inputs[n]) for n in ("angles", *op_inputs.mamba3_siso.STATE)}
    return right[0] + op_inputs.mamba3_siso.scaled_k_in_mamba2(still) - subject.run(still)[0], *right[1:]


def _bf16_weights(subject: Subject, inputs: Inputs, right: Outputs) -> Outputs:
    return subject.run(inputs | {"weights": inputs["weights"].bfloat16().float()})


def _named(names: str, make: Callable[..., Sequence[Any]], **sizes: Any) -> Callable[[int], Inputs]:
    """Return a function of the seed that makes an op's fp32 inputs, its tuple by name."""
    return lambda seed: dict(zip(names.split(), make(dtype=torch.float32, seed=seed, **sizes), strict=True))


def _scan(module: Any, op: Callable[..., Any], plain: Callable[..., Any], state: Sequence[str]) -> Subject:
    """Return the subject of a suite's scan, with documents and with a state that is among its inputs by these names."""
    faults = {
        "dropped document reset": _dropped_reset,
        "bf16 state": _bf16_state(op, module.PER_TOKEN, state),
    }
    return Subject(_wide(module), op, plain, faults)


def _wide(module: Any) -> Callable[[int], Inputs]:
    """Return a function of the seed that makes fp32 inputs: a batch of 8, so that the largest error is one of many."""
    return lambda seed: module.make_inputs(B=8, dtype=torch.float32, seed=seed)


def _mamba3(module: Any, chunk_size: int, faults: Faults) -> Subject:
    """Return a subject whose plain formula is the whole row at once.

    The recurrence is not suitable: it adds its angles one by one, so that neighbours share their errors, and in fp32
    its y is 1.8 times as close as that of any parallel sum.
    """

    def turned(scan: Callable[..., Any]) -> Callable[..., Outputs]:
        def run(**inputs: Tensor) -> Outputs:
            y, theta, *rest = scan(**inputs)
            return y, on_circle(theta), *rest

        return run

    chunked, whole = module.SCAN.of(chunk_size), module.SCAN.of(64, impl="eager")
    common = {
        "dropped document reset": _dropped_reset,
        "bf16 state": _bf16_state(chunked, module.PER_TOKEN, module.STATE),
    }
    functions = turned(chunked), turned(whole)
    return Subject(_wide(module), *functions, common | faults, turned(module.recurrence))


def _ranks_apart(subject: Subject, inputs: Inputs, right: Outputs) -> Outputs:
    """Compute R scans of one rank, each with its own state."""
    return op_inputs.mamba3_mimo.one_rank_each(**inputs)[0], *right[1:]


def _dsa(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return dsa_attention, or its formula, for inputs that include a choice which ignores documents."""
    return lambda across_documents, **inputs: function(**inputs, **ATTENTION)


def _dsa_problem(seed: int) -> Inputs:
    """Make the choices in fp64: in fp32 a near tie may be decided differently, which is not an error of attention."""
    B, K = 4, 7
    q, k, weights, doc_ids = op_inputs.dsa_indexer.make_index_inputs(B=B, seed=seed)
    named = _named("q k v indices", op_inputs.dsa_indexer.make_inputs, B=B, K=K)(seed)
    across = dsa_indexer(q, k, weights, torch.zeros_like(doc_ids), top_k=K)
    return named | {"across_documents": across}


def _chosen_across_documents(subject: Subject, inputs: Inputs, right: Outputs) -> Outputs:
    return subject.run(inputs | {"indices": inputs["across_documents"]})


def _lost_key(subject: Subject, inputs: Inputs, right: Outputs) -> Outputs:
    """Skip the last of the chosen keys, for queries that have the maximum number."""
    indices = inputs["indices"].clone()
    indices[..., -1] = -1
    return subject.run(inputs | {"indices": indices})


def _choice_of_another(subject: Subject, inputs: Inputs, right: Outputs) -> Outputs:
    return subject.run(inputs | {"indices": inputs["indices"].roll(1, 1)})


def _next_expert(subject: Subject, inputs: Inputs, right: Outputs) -> Outputs:
    """Split the rows by the counts of other experts."""
    return subject.run(inputs | {"counts": inputs["counts"].roll(1)})


ATTENTION = {"scale": 0.4, "softcap": 2.0}
NORM = {"group_size": 16}
EXPERTS = {"num_experts": op_inputs.moe_dispatch.E, "bucket": 4}

SUBJECTS = {
    "attention": Subject(
        _named("q k v doc_ids", op_inputs.attention.make_inputs, B=4),
        partial(attention, window=7, **ATTENTION),
        partial(attention_naive, window=7, **ATTENTION),
        {"dropped document reset": _dropped_reset},
    ),
    "causal_conv1d": Subject(
        _named("x weight bias doc_ids", op_inputs.causal_conv1d.make_inputs, D=64),
        causal_conv1d,
        causal_conv1d_naive,
        {"dropped document reset": _dropped_reset},
    ),
    "cross_entropy": Subject(
        _named("logits target", op_inputs.cross_entropy.make_inputs, B=8, T=64),
        partial(cross_entropy, softcap=3.0),
        partial(cross_entropy_naive, softcap=3.0),
        {"no softcap": lambda subject, inputs, right: (cross_entropy(**inputs),)},
    ),
    "dsa_indexer": Subject(
        _dsa_problem,
        _dsa(dsa_attention),
        _dsa(dsa_attention_naive),
        {"dropped document reset": _chosen_across_documents, "a chosen key lost": _lost_key},
    ),
    "dsa_indexer's scores": Subject(
        _named("q k weights indices", op_inputs.dsa_loss.make_score_inputs),
        dsa_chosen_scores,
        dsa_chosen_scores_naive,
        {"a chosen key lost": _lost_key, "choice of the query before": _choice_of_another},
    ),
    "grouped_gemm": Subject(
        _named(
            "x weight counts", op_inputs.grouped_gemm.make_inputs, counts=(5, 0, 170, 80), D_in=20, D_out=25
        ),
        grouped_gemm,
        grouped_gemm_naive,
        {"rows of another expert": _next_expert},
    ),
    "m2rnn": _scan(op_inputs.m2rnn, m2rnn, m2rnn_recurrent, ("h0",)),
    "mamba3_mimo": _mamba3(op_inputs.mamba3_mimo, 8, {"ranks apart": _ranks_apart}),
    "mamba3_siso": _mamba3(
        op_inputs.mamba3_siso, 16, {"no diagonal term": _without_diagonal, "noconv": _noconv}
    ),
    "mla": Subject(
        _named(" ".join(op_inputs.mla.NAMES), op_inputs.mla.make_inputs, B=4),
        partial(mla, **ATTENTION),
        partial(mla_naive, **ATTENTION),
        {"dropped document reset": _dropped_reset},
    ),
    "moe_combine": Subject(
        _named("y expert slot weights bucket", op_inputs.moe_combine.make_inputs, T=64, D=32, C=64),
        moe_combine,
        moe_combine_naive,
        {"bf16 weights": _bf16_weights},
    ),
    "moe_dispatch": Subject(
        _named("x expert", op_inputs.moe_dispatch.make_inputs),
        partial(moe_dispatch, **EXPERTS),
        partial(moe_dispatch_naive, **EXPERTS),
    ),
    "rms_norm_gated": Subject(
        _named("x gate weight", op_inputs.rms_norm_gated.make_inputs),
        partial(rms_norm_gated, **NORM),
        partial(rms_norm_gated_naive, **NORM),
    ),
    "ssd_chunk_scan": _scan(
        op_inputs.ssd_chunk_scan,
        partial(ssd_chunk_scan, chunk_size=16),
        ssd_chunk_scan_recurrent,
        ("initial_state",),
    ),
}
