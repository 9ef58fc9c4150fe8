"""The parts of an OpSpec: what the generic tests need to know of one op.

B batch, T tokens, H heads. `Named` maps the names of an op's arguments to tensors and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter, signature
from types import ModuleType
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from suites.support.comparison import (
    AT_MOST,
    DTYPES,
    doubled,
    error_ratio,
    outputs_of,
    outside,
    pooled,
    random_weights,
    trained,
)
from suites.support.operands import OperandsIn
from suites.support.reduce import largest
from suites.support.scans import carried, cut

Named = dict[str, Any]
Outputs = Sequence[Tensor]
Scan = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One case of a law.

    inputs: arguments of the spec's `inputs`.
    options: keyword arguments of the op and of its plain formula.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class Work(NamedTuple):
    """The minimum of a call: bytes moved, and FLOP of its matrix products; for forward, and for both passes."""

    forward_bytes: float
    both_bytes: float
    forward_flops: float = 0.0
    both_flops: float = 0.0


class OtherPeer(NamedTuple):
    """A further implementation to time. package: the distribution that it needs besides torch, "" for none."""

    name: str
    package: str
    function: Callable[..., Any]


class Workload(NamedTuple):
    """An op at a shape of the model, on CUDA.

    op(*inputs) returns a tensor, or a tuple that begins with one; so do the reference (eager.py) and any peer.
    """

    op: Callable[..., Any]
    reference: Callable[..., Any]
    peer: Callable[..., Any] | None
    inputs: tuple[Tensor, ...]
    work: Work
    others: tuple[OtherPeer, ...] = ()


@dataclass(frozen=True)
class Timed:
    """A case at the model's shapes.

    make: B -> the workload. B 4 is timed; B 1 is what an fp64 oracle of attention can hold.
    oracle_gib: GiB that the op, its peer and its reference need in turn, also in fp64 and with gradients, at B 1, as
        reserved by torch on an H200.
    """

    make: Callable[[int], Workload]
    oracle_gib: int = 11


class Peer(NamedTuple):
    """A comparison with impl="upstream": the op's function, and its inputs on a device, in bf16."""

    function: Callable[..., Tensor]
    inputs: Callable[[str], tuple[Tensor, ...]]


class Golden(NamedTuple):
    """The golden arrays of an op: a function that draws its inputs by name, its output names, and its function.

    The function runs every custom op of the op, so that the laws of custom ops run it, too.
    """

    inputs: Callable[[], Named]
    outputs: tuple[str, ...]
    function: Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """Wrong arguments.

    change: name -> the wrong value, or a function of the right one.
    spares: indices of the outputs that stay right.
    unseen: indices of the outputs that are not compared.
    """

    change: Mapping[str, Any]
    spares: Sequence[int] = ()
    unseen: Sequence[int] = ()

    def planted(self, arguments: Named) -> Named:
        return arguments | {n: v(arguments[n]) if callable(v) else v for n, v in self.change.items()}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A function next to its plain formula, on the same inputs by name, with the formula in fp64 as the oracle.

    inputs: the sizes of a case, dtype, device and seed -> inputs by name.
    cases: the last one is also run with each fault.
    seeds: how many draws of each case are pooled. The maximum of few errors is random.
    id: of its rows without their metric, with {torch} for the dtype; "" for kernels/<op>-<lane>-<dtype>, followed
        by the name of the comparison.
    rows: metric -> the largest ratio. Its first word selects the outputs or the gradients, any other word both.
    operands: on a GPU the plain formula for 16-bit inputs, whose products then have 16-bit operands, too.
    angles: indices of outputs that are equal up to full turns.
    only_on_gpu: whether the cases are of a GPU's own paths for 16-bit inputs.
    """

    op: Callable[..., Any]
    inputs: Callable[..., Named]
    # The formula that the errors are relative to, if it is not impl="naive", which then is the oracle alone.
    other: Callable[..., Any] | None = None
    cases: Mapping[str, Case] = field(default_factory=lambda: {"": Case()})
    seeds: int = 1
    id: str = ""
    rows: Mapping[str, float] = field(
        default_factory=lambda: {f"{way}_error_ratio": factor for way, factor in AT_MOST.items()}
    )
    only_on_gpu: bool = False
    operands: Callable[..., Any] | None = None
    angles: Sequence[int] = ()
    # Wrong results that the ratio rule must reject: (comparison, inputs, right outputs) -> wrong outputs.
    faults: Mapping[str, Callable[[Comparison, Named, Outputs], Outputs]] = field(default_factory=dict)
    # Bounds in fp32, and faults of the arguments that exceed them in `share` of the entries of each bounded output:
    # (inputs, outputs and gradients of the oracle) -> bounds by the name of an output ("0", "1" ...) or an input.
    bound: Callable[[Named, Named], Named] | None = None
    wrong: Mapping[str, Fault] = field(default_factory=dict)
    share: float = 0.0
    # Other functions that meet the bound.
    forms: Sequence[Callable[..., Any]] = ()

    @property
    def exact(self) -> Callable[..., Any]:
        """The formula that in fp64 is the oracle."""
        return partial(self.op, impl="naive")

    @property
    def plain(self) -> Callable[..., Any]:
        return self.other or self.exact

    def draw(self, case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Named:
        return self.inputs(**case.inputs, dtype=dtype, device=device, seed=seed) | dict(case.options)

    @property
    def trains(self) -> bool:
        return not all(metric.startswith("forward") for metric in self.rows)

    def example(self, seed: int) -> Named:
        return self.draw([*self.cases.values()][-1], torch.float32, seed=seed)

    def run(self, arguments: Named) -> Outputs:
        return outputs_of(self.op(**arguments))

    def compared(self, outputs: Outputs) -> list[Tensor]:
        """Return the outputs, angles as points on the circle."""
        return [on_circle(t) if i in self.angles else t for i, t in enumerate(outputs)]

    def judge(self, arguments: Named) -> Callable[[Outputs], float]:
        """Return a function of outputs that computes their worst error ratio for these arguments."""
        functions = (self.plain, arguments), (self.exact, doubled(arguments))
        plain, oracle = (self.compared(outputs_of(function(**given))) for function, given in functions)
        return lambda found: largest(
            error_ratio(*three) for three in zip(self.compared(found), plain, oracle, strict=True)
        )

    def named(self, outputs: Outputs, grads: Named) -> Named:
        return {str(i): t for i, t in enumerate(self.compared(outputs)) if not _is_integer(t)} | grads

    def errors(self, case: Case, dtype: torch.dtype, device: str) -> tuple[Named, Named, Named]:
        """Return the results of op, plain formula and oracle, pooled over the seeds."""
        runs: list[tuple[Named, Named, Named]] = []
        narrow = self.operands if device == "cuda" and dtype != torch.float32 else None
        for seed in range(self.seeds):
            arguments = self.draw(case, dtype, device, seed)
            found = trained(self.op, arguments)
            # Rounded like the op's own: the rounding of a weight is no error of either side. A GPU's kernel may round a
            # weight's products to 16 bits before it sums them, so there this rounding counts for both sides.
            weights = None
            if device != "cuda" or dtype == torch.float32:
                weights = random_weights(t for t in found[0] if self.trains and not _is_integer(t))
            with OperandsIn(dtype) if narrow else nullcontext():
                plain = trained(narrow or self.plain, arguments)
            oracle = trained(self.exact, doubled(arguments), weights)
            runs.append(tuple(self.named(*side) for side in (found, plain, oracle)))
            for name, t in runs[-1][0].items():
                assert t.dtype == (arguments[name] if name in arguments else runs[-1][1][name]).dtype, name
        return tuple(map(pooled, zip(*runs)))


def _is_integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex())


@dataclass(frozen=True, kw_only=True)
class Documents:
    """How an op that is no scan treats packed documents.

    inputs: T tokens, seed, dtype and device -> inputs by name.
    per_token: the inputs with an axis of tokens, doc_ids last.
    keys: the inputs whose tokens others see.
    sees: arguments -> which queries see which keys (B,T,T).
    cases: options.
    rounding: the largest difference of a packed document from the document alone.
    """

    inputs: Callable[..., Named]
    per_token: tuple[str, ...]
    keys: tuple[str, ...]
    sees: Callable[[Named], Tensor]
    cases: Mapping[str, Mapping[str, Any]]
    rounding: float


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """One op, and what is particular to it.

    name: the folder in kernels/.
    run: the op's function of named inputs, with `impl`.
    inputs: sizes, dtype, device and seed -> its inputs: a tuple in the order of `names`, or a dict.
    custom_op: its name in torch.ops.bumpgate without its direction, and in error messages; `name` if empty.
    """

    name: str
    run: Callable[..., Any]
    inputs: Callable[..., Any]
    names: str
    custom_op: str = ""
    # In fp64 each of `forms`, values of `impl`, equals the plain formula within `rounding`.
    cases: Mapping[str, Case] = field(default_factory=dict)
    forms: Sequence[str] = ("op", "eager")
    rounding: float = 1e-12
    gradcheck: Mapping[str, Case] = field(default_factory=dict)
    # Arguments of `inputs` that are drawn where the op is compared with its plain formula at any size.
    sizes: Mapping[str, st.SearchStrategy[Any]] = field(default_factory=dict)
    # One compiled graph serves all these inputs, whose arguments `dynamic` have another first axis.
    batches: Sequence[Mapping[str, Any]] = ()
    dynamic: str = ""
    compiled: Mapping[str, Any] = field(default_factory=dict)
    # Inputs of the sizes `bad`, by name -> what is changed in them, and words of the error.
    refusals: Callable[..., Sequence[tuple[Named, str]]]
    bad: Mapping[str, Any] = field(default_factory=dict)
    # Whether the op would lose digits under autocast.
    loses_digits: bool = False
    # Inputs that no dtype but fp32 (or fp64) fits, inputs whose dtype is free, and inputs whose gradient in 16 bits
    # also has the rounding of the output that the backward reads.
    stays_fp32: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    from_output: tuple[str, ...] = ()
    # Whether the kernel has no matrix product, so that it rounds only its results, on a GPU as well.
    elementwise: bool = False
    # More calls of the custom ops than the golden one.
    contract: Mapping[str, Case] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison]
    documents: Documents | None = None
    golden: Golden
    timed: Mapping[str, Timed] = field(default_factory=dict)
    # The peer of impl="upstream": its name, the packages that it is imported from, its comparisons with the op, and
    # whether it uses recorded winners of autotuning.
    peer: str = ""
    packages: tuple[str, ...] = ()
    peers: Mapping[str, Peer] = field(default_factory=dict)
    tuned_peer: bool = False
    # Row of a timed case -> the target, and why it is missed ("" if it is not).
    marks: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    interpreter: Callable[[], Sequence[KernelOp]] | None = None

    @property
    def registered(self) -> str:
        return self.custom_op or self.name

    @property
    def naive(self) -> Callable[..., Any]:
        """The plain formula, differentiated by autograd."""
        return partial(self.run, impl="naive")

    def named(self, **sizes: Any) -> Named:
        return by_name(self.names, self.inputs(**sizes))


def by_name(names: str, inputs: Any) -> Named:
    """Return inputs by name; a mapping has names already."""
    return dict(inputs) if isinstance(inputs, Mapping) else dict(zip(names.split(), inputs, strict=True))


def naming(names: str, make: Callable[..., Any], **sizes: Any) -> Callable[..., Named]:
    """Return the maker of inputs with these sizes, by name."""
    return lambda **more: by_name(names, make(**{**sizes, **more}))


def packed_documents(B: int, T: int) -> Tensor:
    """Return doc_ids (B,T) int32: documents 5, 1 and 3 in row 0, two in the others, then padding (-1)."""
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T // 2 :] = 3
    doc_ids[:, T - T // 8 :] = -1
    return doc_ids


def one_row(ids: Tensor) -> Tensor:
    """A fault: treat the whole row as one document."""
    return torch.zeros_like(ids)


def changed(**change: Any) -> Callable[[Comparison, Named, Outputs], Outputs]:
    """Return the fault of these wrong arguments: values, or functions of the right ones."""
    return lambda comparison, arguments, right: comparison.run(Fault(change).planted(arguments))


DROPPED_RESET = {"dropped document reset": changed(doc_ids=one_row)}


def largest_norm(t: Tensor) -> float:
    """Return the largest norm along the last axis."""
    return float(t.double().norm(dim=-1).max())


# Workloads, on CUDA. B batch, T tokens.

T = 4096
BF16 = torch.bfloat16


def by_impl(function: Callable[..., Any], peer: bool = True, **options: Any) -> tuple[Any, ...]:
    """Return op, reference and peer of a public function with these options."""
    own = [partial(function, impl=impl, **options) for impl in ("op", "eager")]
    return *own, partial(function, impl="upstream", **options) if peer else None


def draw(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def one_document(B: int) -> Tensor:
    return torch.zeros(B, T, dtype=torch.int32, device="cuda")


def routing(B: int, E: int, K: int) -> Tensor:
    """Return a uniform routing: K different experts per token, (B,T,K) int64."""
    return torch.rand(B, T, E, device="cuda").topk(K, dim=-1).indices


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def streaming(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], flops: float = 0.0) -> Work:
    """Count inputs read and outputs written; the backward reads both again and writes the inputs' gradients."""
    forward, floats = size(*inputs, *outputs), [t for t in inputs if t.is_floating_point()]
    return Work(forward, forward + size(*inputs, *outputs, *floats), flops, 3 * flops)


def scan_flops(P: int, N: int, L: int = 64) -> float:
    """Return the FLOP of a chunked scan per token and head.

    They are half a triangle of scores, their use, and the state in and out.
    """
    return 2 * (L / 2 * N + L / 2 * P + 2 * P * N)


# Scans.


@dataclass(frozen=True, kw_only=True)
class ScanSpec(OpSpec):
    """An op that carries a state from token to token. Inputs go by name; results are y (B,T,H,...) and the final state.

    run also takes chunk_size if the scan is chunked; naive is the recurrence.
    step: the inputs of one token and the state before it -> y and the state after it.
    per_token: the inputs with an axis of tokens, doc_ids last.
    state: the inputs that hold the state before the first token.
    turns: states that are angles, equal up to full turns.
    """

    step: Callable[[Named, tuple[Tensor, ...]], tuple[Tensor, ...]]
    per_token: tuple[str, ...]
    state: tuple[str, ...]
    turns: tuple[str, ...] = ()
    chunked: bool = True
    # A scan with a fault: without one of its terms.
    fault: Scan
    # Replaces inputs, in place, by values at which a naive form of the op overflows.
    overflow: Callable[[Named], None]
    # Arguments of `inputs`: the smallest that gradcheck needs, and odd sizes for drawn lengths.
    smallest: Mapping[str, Any]
    odd: Mapping[str, Any]
    # Arguments of `inputs` that are drawn where the op is compared with its recurrence.
    drawn: Mapping[str, st.SearchStrategy[Any]] = field(default_factory=dict)
    # A document that follows another one: the length of the other, the chunk size, the dtype; its own tokens.
    packed: Mapping[str, st.SearchStrategy[Any]]
    packed_tokens: int = 64
    # Devices on which a document that begins at the border of a chunk has the same bits as alone.
    same_bits_on: tuple[str, ...] = ("cpu", "cuda")
    # (inputs of a document, its y) -> the largest difference of y if its sums are in another order; None: not bounded.
    reordered: Callable[[Named, Tensor], Tensor | None] = lambda inputs, y: None
    longest: int = 60
    rounding_32: float = 2e-5

    @property
    def results(self) -> tuple[str, ...]:
        return "y", *(f"final {n}" for n in self.state)

    @property
    def floats(self) -> tuple[str, ...]:
        return tuple(n for n in self.names.split() if n != "doc_ids")

    def of(self, chunk_size: int, **options: Any) -> Scan:
        """Return the scan with this chunk size, if it is chunked."""
        return partial(self.run, **options, **({"chunk_size": chunk_size} if self.chunked else {}))

    def trained(self, scan: Scan, inputs: Named) -> Named:
        """Return the results of a scan, angles as points on the circle, and the gradients of a weighting of them."""
        outputs, grads = trained(scan, inputs)
        found = dict(zip(self.results, outputs)) | grads
        return found | {f"final {n}": on_circle(found[f"final {n}"]) for n in self.turns}

    def values(self, scan: Scan, inputs: Named) -> Named:
        """Return the results of a scan that are not empty, angles as points on the circle."""
        found = dict(zip(self.results, scan(**inputs)))
        found |= {f"final {n}": on_circle(found[f"final {n}"]) for n in self.turns}
        return {n: t for n, t in found.items() if t.numel()}

    def before(self, inputs: Named) -> tuple[Tensor, ...]:
        """Return the state before the first token."""
        return tuple(inputs[n] for n in self.state)

    def segment(self, inputs: Named, tokens: slice, state: tuple[Tensor, ...]) -> Named:
        """Return some of the tokens, with this state before them."""
        return cut(inputs, tokens, self.per_token) | dict(zip(self.state, state))

    def alone(self, inputs: Named, begin: int) -> Named:
        """Return the tokens from `begin` on, with no token before them."""
        zeros = tuple(torch.zeros_like(t) for t in self.before(inputs))
        return self.segment(inputs, slice(begin, None), zeros)


def scan_dtypes(inputs: Named, dtype: torch.dtype, device: str, narrow: Sequence[str]) -> Named:
    """Return the inputs on the device: `narrow` in this dtype, the other floats in fp32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = {n: dtype if n in narrow else wide for n in inputs if n != "doc_ids"}
    return {n: t.to(device, dtypes.get(n, t.dtype)) for n, t in inputs.items()}


def on_circle(angle: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angle), angle)


def flat(scan: Callable[..., tuple[Tensor, Any]], inputs: Any, state: Any = None) -> Scan:
    """Wrap a scan of a named tuple of inputs: keyword tensors and options -> y and the final state in one tuple.

    state: the class of its state; None if the state is the tensor `initial_state`.
    """

    def run(**given: Any) -> tuple[Tensor, ...]:
        i = inputs(**{n: given.pop(n) for n in inputs._fields})
        before = state(*(given.pop(n) for n in state._fields)) if state else given.pop("initial_state")
        y, final = scan(i, before, **given)
        return y, *(final if state else (final,))

    return run


def stepped(step: Callable[..., tuple[Tensor, Any]], inputs: Any, state: Any = None) -> Callable[..., Any]:
    """Wrap a step: inputs of a token by name, states in order -> y and the states in one tuple."""

    def run(token: Named, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        y, after = step(inputs(**token), state(*before) if state else before[0])
        return y, *(after if state else (after,))

    return run


def packed(
    length: st.SearchStrategy[int], chunk_size: st.SearchStrategy[int], *dtypes: str
) -> dict[str, Any]:
    """Return the strategies of ScanSpec.packed."""
    return {"length": length, "chunk_size": chunk_size, "dtype": st.sampled_from(dtypes or [*DTYPES])}


def bf16_state(scan: Scan, per_token: Sequence[str], state: Sequence[str]) -> Callable[..., Outputs]:
    """Return the fault that stores the state between two halves of the row in bf16.

    scan: the op, whose final states are not changed by the comparison.
    state: the names of the states, in the order of the outputs of `scan`.
    """

    def fault(comparison: Comparison, inputs: Named, right: Outputs) -> Outputs:
        half = inputs["doc_ids"].shape[1] // 2
        early = {n: t[:, :half] if n in per_token else t for n, t in inputs.items()}
        late = {n: t[:, half:] if n in per_token else t for n, t in inputs.items()}
        y0, *middle = scan(**early)
        narrow = (carried(s.bfloat16().float(), inputs["doc_ids"], half) for s in middle)
        y1, *final = comparison.op(**late | dict(zip(state, narrow, strict=True)))
        return torch.cat((y0, y1), 1), *final

    return fault


def scan_comparison(
    make: Callable[..., Named],
    scan: Scan,
    per_token: Sequence[str],
    state: Sequence[str],
    faults: Mapping[str, Any],
    **more: Any,
) -> dict[str, Comparison]:
    """Return the comparison of a scan: on 8 rows, with the faults that every scan can have."""
    return {
        "": Comparison(
            op=scan,
            inputs=naming("", make, B=8),
            seeds=8,
            faults=DROPPED_RESET | {"bf16 state": bf16_state(scan, per_token, state)} | dict(faults),
            **more,
        )
    }


# Triton's interpreter.

# Never bf16: the interpreter computes on its raw bits without a warning.
INTERPRETED_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class KernelCase:
    """One case of interpreted kernels.

    sizes: values of the sizes that KernelOp names.
    options: further arguments of the kernels and of the eager functions.
    inputs: further arguments of KernelOp.inputs.
    dtypes: the dtypes of the op if empty.
    gpu_blocks: whether the kernels keep the blocks that they have on a GPU.
    error: words of the error that is raised.
    """

    sizes: Sequence[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Sequence[str] = ()
    gpu_blocks: bool = False
    error: str = ""

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in {**self.options, **self.inputs}.items()]
        return " ".join([str(self.sizes), *options, *(["GPU blocks"] if self.gpu_blocks else [])])


@dataclass(frozen=True, kw_only=True)
class KernelOp:
    """How the kernels of one op run in Triton's interpreter, next to its eager functions.

    inputs: sizes and dtype by name -> tensors by name, in the order of the op.
    sizes: the names of the sizes.
    kernels, eager: the forward pass, or the forward and the backward pass. Each gets the arguments that it names.
    results: names of the forward's outputs that the backward takes.
    gradients: names of the gradients of the forward's first outputs; random ones are drawn unless `inputs` has them.
    blocks: (module, name) -> a value with which small inputs need several blocks, the last ones not full.
    """

    name: str
    inputs: Callable[..., Named]
    sizes: str
    kernels: Sequence[Callable[..., Any]]
    eager: Sequence[Callable[..., Any]]
    results: str = ""
    gradients: str = "dy"
    options: Mapping[str, Any] = field(default_factory=dict)
    blocks: Mapping[tuple[ModuleType, str], Any] = field(default_factory=dict)
    dtypes: Sequence[str] = ("fp32", "fp16")
    cases: Sequence[KernelCase]
    # In each case of `faulty` each fault must be rejected.
    faulty: Sequence[KernelCase]
    faults: Mapping[str, Fault]
    # Cases of the other laws.
    layouts: Sequence[KernelCase] = ()
    refused: Sequence[KernelCase] = ()
    expanded: Sequence[KernelCase] = ()
    one_key: Sequence[KernelCase] = ()
    poisoned: Sequence[KernelCase] = ()
    two_documents: Sequence[KernelCase] = ()
    # The largest difference of the results of other layouts.
    layout_rounding: float = 0.0
    # The inputs with an axis of tokens, and those with the state before the first one.
    per_token: Sequence[str] = ()
    state: Sequence[str] = ()
    # A 16-bit kernel is compared with the reference with 16-bit operands of its products.
    narrow_products: bool = False
    # The second output is a logsumexp under the option "softcap".
    lse: bool = False
    # Arguments of `inputs` over which the errors of a case are pooled.
    pooled: Sequence[Mapping[str, Any]] = ({},)
    # Results of the oracle -> the minimum size of an output's terms (comparison.outside).
    terms: Callable[[Outputs], float] = lambda oracle: 0.0
    # Arguments and outputs -> parts of the outputs that are exactly 0.
    zeros: Callable[..., Sequence[Tensor]] = lambda arguments, *outputs: ()

    def arguments(self, dtype: str, case: KernelCase) -> list[Named]:
        """Return the arguments of a case, one set for each entry of `pooled`."""
        sizes = dict(zip(self.sizes.split(), case.sizes, strict=True)) | dict(case.inputs)
        return [
            self._with_gradients(
                self.inputs(**sizes, dtype=INTERPRETED_DTYPES[dtype], **more)
                | {**self.options, **case.options}
            )
            for more in self.pooled
        ]

    def example(self, dtype: str, *sizes: Any, **inputs: Any) -> Named:
        return self.arguments(dtype, KernelCase(sizes, inputs=inputs))[0]

    def _with_gradients(self, arguments: Named) -> Named:
        missing = [name for name in self.gradients.split() if name not in arguments]
        if missing:
            g = torch.Generator().manual_seed(1)
            outputs = outputs_of(_call(self.eager[0], arguments))
            arguments |= {
                name: torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype)
                for name, t in zip(missing, outputs)
            }
        return arguments

    def launched(self, **arguments: Any) -> Outputs:
        """Run the kernels. Returns the outputs and the gradients."""
        return self._passes(self.kernels, arguments)

    def reference(self, **arguments: Any) -> Outputs:
        """Run the eager functions. Returns the outputs and the gradients."""
        return self._passes(self.eager, arguments)

    def _passes(self, passes: Sequence[Callable[..., Any]], arguments: Named) -> Outputs:
        found: list[Tensor] = []
        for one in passes:
            found += outputs_of(_call(one, arguments | dict(zip(self.results.split(), found))))
        return found

    def rule(self, runs: Sequence[Named]) -> Callable[..., dict[int, list[str]]]:
        """Return the ratio rule for these arguments: the outputs of a launch with each -> what breaks it, by index."""
        first = next(iter(runs[0].values()))
        with OperandsIn(first.dtype) if self.narrow_products else nullcontext():
            plain = _stacked([self.reference(**arguments) for arguments in runs])
        oracle = _stacked([self.reference(**doubled(arguments)) for arguments in runs])
        softcap = runs[0].get("softcap", 0.0) if self.lse else None

        def broken(found: Sequence[Outputs], unseen: Sequence[int] = ()) -> dict[int, list[str]]:
            pairs = zip(_stacked(found), plain, strict=True)
            seen = [theirs if i in unseen else ours for i, (ours, theirs) in enumerate(pairs)]
            return outside(seen, plain, oracle, self.terms(oracle), softcap)

        return broken


def _call(function: Callable[..., Any], arguments: Named) -> Any:
    """Call a function with the arguments that it names, or with all of them if it takes any."""
    parameters = signature(function).parameters
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
        return function(**arguments)
    return function(**{n: arguments[n] for n in parameters if n in arguments})


def _stacked(runs: Sequence[Outputs]) -> Outputs:
    return runs[0] if len(runs) == 1 else [torch.stack(outputs) for outputs in zip(*runs, strict=True)]
