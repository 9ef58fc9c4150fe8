"""dsa_indexer: an indexer that chooses keys, attention over the chosen keys, and the indexer's training loss.

B batch, T tokens, J index heads, K chosen keys per query, Hq and Hkv heads, P head dim.
The oracle is the reference in fp64, which must agree with the plain formula (naive.py) in fp64 first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.dsa_indexer import (
    dsa_attention,
    dsa_chosen_scores,
    dsa_distribution,
    dsa_indexer,
    dsa_indexer_loss,
)
from kernels.dsa_indexer.eager import (
    dsa_attention_backward_eager,
    dsa_attention_forward_with_lse,
    dsa_chosen_scores_backward_eager,
    dsa_chosen_scores_eager,
    dsa_distribution_eager,
)
from suites.ops import spec
from suites.ops.spec import Named, Outputs

NAMES = "q k v indices"
INDEX = "q k weights doc_ids"
SCORES = "q k weights indices"
SCALED = {"scale": 0.4, "softcap": 2.0}
UNCAPPED = {"scale": 0.25, "softcap": 0.0}


def make_index_inputs(
    B=2, T=33, J=3, width=16, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random q, k, weights of either sign, and documents."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, T, J, width), (B, T, width), (B, T, J)
    tensors = (torch.randn(*shape, generator=g, dtype=torch.float64).to(device, dtype) for shape in shapes)
    return *tensors, spec.packed_documents(B, T).to(device)


def make_inputs(
    B=2, T=33, Hq=4, Hkv=2, P=16, K=7, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random q, k, v and the indexer's choice of K keys, so that early queries of a document have fewer."""
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(B, T, H, P, generator=g, dtype=torch.float64) for H in (Hq, Hkv, Hkv)]
    indices = dsa_indexer(*make_index_inputs(B=B, T=T, seed=seed), top_k=K).to(device)
    return *(t.to(device, dtype) for t in tensors), indices


def make_score_inputs(
    B=2, T=33, J=3, width=16, K=7, dtype=torch.float64, device="cpu", seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, weights of either sign, and the choice that they make in fp64."""
    exact = make_index_inputs(B, T, J, width, seed=seed)
    indices = dsa_indexer(*exact, top_k=K).to(device)
    return *(t.to(device, dtype) for t in exact[:3]), indices


def refusals(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> list[tuple[Named, str]]:
    return [
        ({"k": k[:, :, :1].repeat(1, 1, 3, 1)}, "4 query heads"),
        ({"q": q[0]}, "3-d"),
        ({"k": k[:, :3]}, "k has shape"),
        ({"v": v[..., :3]}, "v has shape"),
        ({"indices": indices[:, :3]}, "indices has shape"),
        ({"indices": indices.long()}, "int32"),
        ({"k": k.bfloat16()}, "one float dtype"),
        ({"v": v.bfloat16()}, "one float dtype"),
        ({"softcap": -1.0}, "softcap"),
    ]


def other_refusals() -> dict[Callable[..., Tensor], tuple[Named, list[tuple[str, Named, str]]]]:
    """Return function -> its inputs, and for each bad one: the op in the message, the changes, words of the error."""
    q, k, weights, doc_ids = make_index_inputs(B=2, T=4, dtype=torch.float32)
    index = {"q": q, "k": k, "weights": weights, "doc_ids": doc_ids, "top_k": 2}
    scores = spec.by_name(SCORES, make_score_inputs(T=4, K=3, dtype=torch.float32))
    target, indices = torch.ones(2, 4, 3), scores["indices"]
    query, key, _, chosen = make_inputs(T=4, dtype=torch.float32)
    return {
        dsa_indexer: (index, [
            ("dsa_indexer", {"q": q[0]}, "3-d"),
            ("dsa_indexer", {"k": k[:, :3]}, "k has shape"),
            ("dsa_indexer", {"weights": weights[..., :1]}, "weights has shape"),
            ("dsa_indexer", {"doc_ids": doc_ids[:, :3]}, "doc_ids has shape"),
            ("dsa_indexer", {"doc_ids": doc_ids.long()}, "int32"),
            ("dsa_indexer", {"k": k.bfloat16()}, "one float dtype"),
            ("dsa_indexer", {"weights": weights.int()}, "floating point"),
            ("dsa_indexer", {"top_k": 0}, "top_k"),
            ("dsa_indexer", {"impl": "fast"}, "choices are"),
        ]),
        dsa_indexer_loss: (scores | {"target": target}, [
            ("dsa_indexer_loss", {"target": target[..., :2]}, "target has shape"),
            ("dsa_indexer_loss", {"target": target.int()}, "floating point"),
            ("dsa_chosen_scores", {"q": scores["q"][0]}, "3-d"),
            ("dsa_chosen_scores", {"indices": indices.long()}, "int32"),
            ("dsa_chosen_scores", {"impl": "fast"}, "choices are"),
        ]),
        dsa_distribution: (
            {"q": query, "k": key, "indices": chosen},
            [("dsa_distribution", {"impl": "fast"}, "choices are")],
        ),
    }  # fmt: skip


def rounding_bound(i: Named, exact: Named) -> Named:
    """Bound the rounding error of `out` in fp32: a logit is off by (P + 4) u of its largest size, a weight by twice
    that, and the mean of v adds K + 8 roundings; all of it relative to max |v|.
    """
    P, K = i["q"].shape[3], i["indices"].shape[2]
    logit = i.get("scale", P**-0.5) * spec.largest_norm(i["q"]) * spec.largest_norm(i["k"])
    return {"0": (2 * (P + 4) * logit + K + 8) * 2**-24 * i["v"].double().abs().max()}


def lost_key(indices: Tensor) -> Tensor:
    """A fault: skip the last of the chosen keys, for queries that have the maximum number."""
    return indices.index_fill(2, torch.tensor([indices.shape[2] - 1], device=indices.device), -1)


def leaked_key(indices: Tensor) -> Tensor:
    """A fault: the last of the chosen keys is the first token, of whichever document."""
    return indices.index_fill(2, torch.tensor([indices.shape[2] - 1], device=indices.device), 0)


def of_query_before(indices: Tensor) -> Tensor:
    return indices.roll(1, 1)


def golden_inputs() -> Named:
    index = spec.by_name("index_q index_k index_weights doc_ids", make_index_inputs(T=20, width=8))
    return index | dict(zip("qkv", make_inputs(T=20, P=8)))


def golden(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, impl: str = "op", **index: Tensor) -> Outputs:
    """Return the choice, the attention over it, and the indexer's loss."""
    of_index = index["index_q"], index["index_k"], index["index_weights"]
    indices = dsa_indexer(*of_index, doc_ids, top_k=5, impl=impl)
    out = dsa_attention(q, k, v, indices, **SCALED, impl=impl)
    target = dsa_distribution(q, k, indices, **SCALED, impl=impl)
    return indices, out, dsa_indexer_loss(*of_index, indices, target, impl=impl)


HQ, HKV, P, J, K = 56, 8, 64, 32, 256


def workload(B: int, choose: bool) -> spec.Workload:
    """Attention over the chosen keys; with `choose`, the op also makes the choice, from constants."""
    T = spec.T
    index = (spec.draw(B, T, J, P), spec.draw(B, T, P), spec.draw(B, T, J), spec.one_document(B))
    indices = dsa_indexer(*index, top_k=K)
    inputs = (spec.draw(B, T, HQ, P), spec.draw(B, T, HKV, P), spec.draw(B, T, HKV, P), indices)
    moved, flops = spec.streaming(inputs, inputs[:1]), 4 * B * T * K * HQ * P
    work = spec.Work(moved.forward_bytes, moved.both_bytes, flops, 3.5 * flops)
    op, reference, peer = spec.by_impl(dsa_attention, peer=False)
    if not choose:
        return spec.Workload(op, reference, peer, inputs, work)

    def choose_and_attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return dsa_attention(q, k, v, dsa_indexer(*index, top_k=K))

    moved, flops = spec.size(*index), 2 * B * J * P * T * T / 2
    with_choice = spec.Work(*(total + more for total, more in zip(work, (moved, moved, flops, flops))))
    return spec.Workload(choose_and_attend, reference, peer, inputs, with_choice)


def loss_workload(B: int) -> spec.Workload:
    """The scores of the chosen keys and their target: what training a sparse layer adds to its attention."""
    T = spec.T
    index = spec.draw(B, T, J, P), spec.draw(B, T, P), spec.draw(B, T, J)
    indices = dsa_indexer(*index, spec.one_document(B), top_k=K)
    inputs = (*index, indices, spec.draw(B, T, HQ, P), spec.draw(B, T, HKV, P))

    def learn(
        q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, query: Tensor, key: Tensor, impl: str
    ) -> tuple[Tensor, Tensor]:
        scores = dsa_chosen_scores(q, k, weights, indices, impl=impl)
        return scores, dsa_distribution(query, key, indices, softcap=30.0, impl=impl)

    written = spec.draw(B, T, K, dtype=torch.float32)
    scored, forward = 2 * B * T * K * J * P, spec.streaming(inputs, (written, written)).forward_bytes
    flops = scored + 2 * B * T * K * HQ * P
    both = forward + spec.size(written) + 2 * spec.size(*index) + spec.size(indices)
    return spec.Workload(
        *spec.by_impl(learn, peer=False), inputs, spec.Work(forward, both, flops, flops + 3 * scored)
    )


def in_random_order(names: str, make: Callable[..., tuple[Tensor, ...]], **sizes: Any) -> Named:
    """Return inputs whose last one, the choice, is in random order."""
    made = spec.by_name(names, make(**sizes))
    order = torch.randperm(made["indices"].shape[-1], generator=torch.Generator().manual_seed(0))
    return made | {"indices": made["indices"][..., order].contiguous()}


def interpreter() -> list[spec.KernelOp]:
    """Attention over the chosen keys, then the training kernels: scores with their gradient, and the target."""
    return [interpreted_attention(), *interpreted_loss()]


def interpreted_attention() -> spec.KernelOp:
    from kernels.dsa_indexer import kernel

    # Several blocks at a small T.
    tiles = {"gather": (16, 16, 4, 1), "dkdv": (16, 32, 4, 1)}
    return spec.KernelOp(
        name="dsa_indexer",
        inputs=partial(in_random_order, NAMES, make_inputs),
        sizes="B T Hq Hkv P K",
        kernels=(kernel.dsa_attention_fwd_kernel, kernel.dsa_attention_bwd_kernel),
        eager=(dsa_attention_forward_with_lse, dsa_attention_backward_eager),
        results="out lse",
        gradients="dout",
        options=UNCAPPED,
        blocks={(kernel, "_tiles"): lambda *dims: tiles},
        cases=[
            *(spec.KernelCase((1, 22, 3, 1, 16, 18), options) for options in KERNEL_OPTIONS),
            *(spec.KernelCase(sizes, {"softcap": 2.0}) for sizes in SIZES),
            spec.KernelCase(
                (1, 66, 3, 1, 16, 65), {"scale": 0.125, "softcap": 30.0}, dtypes=("fp16",), gpu_blocks=True
            ),
        ],
        faulty=[spec.KernelCase((1, 9, 4, 2, 16, 6), {"softcap": 2.0}, dtypes=("fp16",))],
        faults={
            "softcap": spec.Fault({"softcap": 2.2}),
            "none for key 0": spec.Fault({"indices": lambda chosen: chosen.clamp(min=0)}),
            "a key too few": spec.Fault({"indices": lambda chosen: chosen[..., 1:]}),
            "the choice of another": spec.Fault({"indices": lambda chosen: chosen.roll(1, 1)}),
            "heads": spec.Fault({"k": lambda k: k.flip(2), "v": lambda v: v.flip(2)}),
        },
        layouts=[spec.KernelCase((1, 6, 2, 1, 16, 5), {"softcap": 2.0}, dtypes=("fp16",))],
        refused=[spec.KernelCase((1, 2, 1, 1, 48, 2), error=r"power of two up to 128, not 48$")],
        one_key=[spec.KernelCase((2, 1, 2, 1, 16, 1), {"softcap": 2.0})],
        narrow_products=True,
        lse=True,
    )


def interpreted_loss() -> list[spec.KernelOp]:
    from kernels.dsa_indexer import kernel_loss

    # Several blocks at a small T, and several parts of few heads.
    tiles = {"gather": (32, 16, 4, 1), "dk": (16, 32, 4, 1)}
    blocks = {(kernel_loss, "_tiles"): lambda *dims: tiles, (kernel_loss, "HEADS"): 2}
    target_cases = [spec.KernelCase(sizes, options) for options in KERNEL_OPTIONS for sizes in TARGET_SIZES]
    scores = spec.KernelOp(
        name="dsa_indexer_scores",
        inputs=partial(in_random_order, SCORES, make_score_inputs),
        sizes="B T J width K",
        kernels=(kernel_loss.dsa_chosen_scores_fwd_kernel, kernel_loss.dsa_chosen_scores_bwd_kernel),
        eager=(dsa_chosen_scores_eager, dsa_chosen_scores_backward_eager),
        gradients="dscores",
        blocks=blocks,
        cases=[
            *map(spec.KernelCase, SCORE_SIZES),
            spec.KernelCase((1, 66, 9, 16, 65), dtypes=("fp16",), gpu_blocks=True),
        ],
        faulty=[spec.KernelCase((1, 9, 4, 16, 6), dtypes=("fp16",))],
        faults={
            "none for key 0": spec.Fault({"indices": lambda chosen: chosen.clamp(min=0)}),
            "the choice of another": spec.Fault({"indices": lambda chosen: chosen.roll(1, 1)}),
            "heads": spec.Fault({"weights": lambda weights: weights.flip(2)}, spares=(3,)),
            "no relu": spec.Fault({"q": torch.abs, "k": torch.abs}),
        },
        layouts=[spec.KernelCase((1, 6, 2, 16, 5), dtypes=("fp16",))],
        refused=[
            spec.KernelCase(
                (1, 2, 1, 48, 2), error=r"index head dim must be a power of two up to 128, not 48$"
            )
        ],
        narrow_products=True,
    )
    target = spec.KernelOp(
        name="dsa_indexer_target",
        inputs=partial(in_random_order, NAMES, make_inputs),
        sizes="B T Hq Hkv P K",
        kernels=(kernel_loss.dsa_distribution_fwd_kernel,),
        eager=(dsa_distribution_eager,),
        gradients="",
        options=UNCAPPED,
        blocks=blocks,
        cases=target_cases,
        faulty=target_cases,
        faults={"keys": spec.Fault({"k": lambda k: k.flip(1)})},
        refused=[spec.KernelCase((1, 2, 1, 1, 48, 2), error=r"power of two up to 128, not 48$")],
        terms=lambda oracle: 1.0,
    )
    return [scores, target]


# At a softcap of 100 the "fast" path is off; a scale of 3 drives tanh into saturation.
KERNEL_OPTIONS = [{}, {"softcap": 2.0}, {"scale": 3.0, "softcap": 5.0}, {"softcap": 100.0}]
SIZES = [(2, 6, 4, 2, 16, 5), (1, 5, 2, 2, 4, 9)]
SCORE_SIZES = [(2, 22, 3, 16, 18), (1, 5, 2, 4, 9), (1, 1, 1, 8, 1), (1, 9, 17, 16, 4)]
TARGET_SIZES = [(2, 22, 3, 1, 16, 18), (1, 6, 4, 2, 16, 5)]
CASES = {"plain": {}, "softcap": {"softcap": 2.0}, "softcap and scale": {"softcap": 2.0, "scale": 0.4}}
SMALL = {"B": 1, "T": 6, "Hq": 4, "Hkv": 2, "P": 3, "K": 3}
SPEC = spec.OpSpec(
    name="dsa_indexer",
    custom_op="dsa_attention",
    run=dsa_attention,
    inputs=make_inputs,
    names=NAMES,
    cases={name: spec.Case(options=options) for name, options in CASES.items()},
    gradcheck={name: spec.Case(SMALL, CASES[name]) for name in ("plain", "softcap and scale")},
    batches=[{"B": B, "T": 16} for B in (2, 3, 5)],
    dynamic="q k v indices",
    compiled={"softcap": 2.0},
    refusals=refusals,
    bad={"B": 2, "T": 4, "P": 4, "K": 3, "dtype": torch.float32},
    loses_digits=True,
    free=("weights",),
    from_output=("q", "k"),
    comparisons={
        # A query with one key has a gradient of 0, and the rounding noise of either side is random.
        "": spec.Comparison(
            op=dsa_attention,
            inputs=spec.naming(NAMES, make_inputs, B=4),
            seeds=4,
            cases={
                "wide heads": spec.Case({"P": 128, "T": 70, "K": 40}, {"softcap": 2.0}),
                **{name: spec.Case(options=options) for name, options in CASES.items()},
            },
            faults={
                "a key of another document": spec.changed(indices=leaked_key),
                "a chosen key lost": spec.changed(indices=lost_key),
            },
            bound=rounding_bound,
            wrong={
                "softcap before scale": spec.Fault({"softcap": 2.0 / 0.4}),
                "no softcap": spec.Fault({"softcap": 0.0}),
                "none taken for key 0": spec.Fault({"indices": lambda chosen: chosen.clamp(min=0)}),
                "a key too few": spec.Fault({"indices": lambda chosen: chosen[..., 1:].contiguous()}),
                "choice of the query before": spec.Fault({"indices": of_query_before}),
                "heads interleaved": spec.Fault({"k": lambda k: k.flip(2), "v": lambda v: v.flip(2)}),
            },
        ),
        "scores": spec.Comparison(
            op=dsa_chosen_scores,
            inputs=spec.naming(SCORES, make_score_inputs),
            seeds=8,
            faults={
                "a chosen key lost": spec.changed(indices=lost_key),
                "choice of the query before": spec.changed(indices=of_query_before),
            },
        ),
        "target": spec.Comparison(
            op=lambda v, **inputs: dsa_distribution(**inputs),
            inputs=spec.naming(NAMES, make_inputs),
            cases={"softcap and scale": spec.Case(options=SCALED)},
            seeds=8,
            rows={"forward_error_ratio": 2.0},
            faults={"choice of the query before": spec.changed(indices=of_query_before)},
        ),
    },
    golden=spec.Golden(golden_inputs, ("indices", "out", "loss"), golden),
    timed={
        "dsa_indexer-K256": spec.Timed(partial(workload, choose=True), 18),
        "dsa_indexer-K256-attention": spec.Timed(partial(workload, choose=False), 18),
        "dsa_indexer-K256-loss": spec.Timed(loss_workload, 18),
    },
    marks={
        "dsa_indexer-K256-attention/forward_roofline_fraction": (
            0.2,
            "L2, 83 % busy: each token gathers its own 256 keys, and the roofline counts each key once; tensor cores "
            "22 %",
        ),
        "dsa_indexer-K256-attention/both_roofline_fraction": (
            0.2,
            "the keys' gradients, 3.06 of 5.49 ms: 213 registers leave 8 warps to an SM; issue slots 40 %, tensor "
            "cores 33 %, L1 51 % busy",
        ),
        "dsa_indexer-K256-loss/forward_roofline_fraction": (
            0.2,
            "instructions: the target's kernel, 1.81 of 2.00 ms, keeps 80 % of the issue slots and 48 % of the special "
            "functions busy, tensor cores 12 %",
        ),
        "dsa_indexer-K256-loss/both_roofline_fraction": (
            0.2,
            "the target's instructions (1.81 of 4.25 ms), and loads of the keys' gradient (1.51 ms), for which a warp "
            "waits 3.2 cycles",
        ),
    },
    interpreter=interpreter,
)
