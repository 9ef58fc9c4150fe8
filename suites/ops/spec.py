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

from suites.support.comparison import DTYPES, doubled, error_ratio, values_and_gradients
from suites.support.operands import OperandsIn
from suites.support.reduce import largest
from suites.support.scans import carried, cut

Named = dict[str, Any]
Outputs = Sequence[Tensor]
Scan = Callable[..., tuple[Tensor, ...]]


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    """Return the outputs of an op as a tuple."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


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


class Workload(NamedTuple):
    """An op at a shape of the model, on CUDA.

    op(*inputs) returns a tensor, or a tuple that begins with one; so do the reference (eager.py) and any peer.
    """

    op: Callable[..., Any]
    reference: Callable[..., Any]
    peer: Callable[..., Any] | None
    inputs: tuple[Tensor, ...]
    work: Work


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
    """The golden arrays of an op: a function that draws its inputs by name, its output names, and its function."""

    inputs: Callable[[], Named]
    outputs: tuple[str, ...]
    function: Callable[..., Any]


class Subject(NamedTuple):
    """An op whose wrong results the ratio rule must reject.

    inputs: seed -> fp32 inputs by name.
    op, plain: the op and its plain formula, of named inputs.
    faults: name -> (subject, inputs, right outputs) -> wrong outputs, so that all faults share one oracle.
    exact: the formula that in fp64 is the oracle, if it is not the plain one.
    """

    inputs: Callable[[int], Named]
    op: Callable[..., Any]
    plain: Callable[..., Any]
    faults: Mapping[str, Callable[[Subject, Named, Outputs], Outputs]] = {}
    exact: Callable[..., Any] | None = None

    def run(self, inputs: Named) -> Outputs:
        return outputs_of(self.op(**inputs))

    def judge(self, inputs: Named) -> Callable[[Outputs], float]:
        """Return a function of outputs that computes their worst error ratio for these inputs."""
        plain = outputs_of(self.plain(**inputs))
        oracle = outputs_of((self.exact or self.plain)(**doubled(inputs)))
        return lambda found: largest(error_ratio(*three) for three in zip(found, plain, oracle, strict=True))


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """One op, and what is particular to it.

    name: the folder in kernels/.
    run: the op's function of named inputs, with `impl`.
    naive: its plain formula, differentiated by autograd.
    inputs: sizes, dtype, device and seed -> its inputs: a tuple in the order of `names`, or a dict.
    custom_op: its name in torch.ops.bumpgate without its direction, and in error messages; `name` if empty.
    """

    name: str
    run: Callable[..., Any]
    naive: Callable[..., Any]
    inputs: Callable[..., Any]
    names: str
    custom_op: str = ""
    # In fp64 each of `forms`, values of `impl`, equals the plain formula within `rounding`.
    cases: Mapping[str, Case] = field(default_factory=dict)
    forms: Sequence[str] = ("op", "eager")
    rounding: float = 1e-12
    gradcheck: Mapping[str, Case] = field(default_factory=dict)
    # One compiled graph serves all these inputs, whose arguments in the positions `dynamic` have another first axis.
    batches: Sequence[Mapping[str, Any]] = ()
    dynamic: Sequence[int] = ()
    compiled: Mapping[str, Any] = field(default_factory=dict)
    # Inputs of the sizes `bad`, by name -> what is changed in them, and words of the error.
    refusals: Callable[..., Sequence[tuple[Named, str]]]
    bad: Mapping[str, Any] = field(default_factory=dict)
    # Whether the op is tested under autocast, with these options, and whether it would lose digits there.
    under_autocast: bool = True
    loses_digits: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    subjects: Mapping[str, Subject]
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

    def named(self, **sizes: Any) -> Named:
        """Return inputs by name."""
        return by_name(self.names, self.inputs(**sizes))


def by_name(names: str, inputs: Any) -> Named:
    """Return inputs by name; a mapping has names already."""
    return dict(inputs) if isinstance(inputs, Mapping) else dict(zip(names.split(), inputs, strict=True))


def fp32(names: str, make: Callable[..., Any], **sizes: Any) -> Callable[[int], Named]:
    """Return a function of the seed that makes fp32 inputs by name."""
    return lambda seed: by_name(names, make(dtype=torch.float32, seed=seed, **sizes))


def packed_documents(B: int, T: int) -> Tensor:
    """Return doc_ids (B,T) int32: documents 5, 1 and 3 in row 0, two in the others, then padding (-1)."""
    doc_ids = torch.ones(B, T, dtype=torch.int32)
    doc_ids[0, : T // 3] = 5
    doc_ids[:, T // 2 :] = 3
    doc_ids[:, T - T // 8 :] = -1
    return doc_ids


def dropped_reset(subject: Subject, inputs: Named, right: Outputs) -> Outputs:
    """A fault: treat the whole row as one document."""
    return subject.run(inputs | {"doc_ids": torch.zeros_like(inputs["doc_ids"])})


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
    # Arguments of `inputs`: the smallest that gradcheck and opcheck need, and odd sizes for drawn lengths.
    smallest: Mapping[str, Any]
    opcheck: Mapping[str, Any]
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
    batch_tokens: int = 20
    # Outputs of the forward op that the backward op takes before the gradients.
    saved: int = 0
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
        found = values_and_gradients(self.results, scan, inputs)
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
    """Return the point at an angle."""
    return torch.polar(torch.ones_like(angle), angle)


def flat(scan: Callable[..., tuple[Tensor, Any]], state: Callable[..., Any], **options: Any) -> Scan:
    """Wrap a scan with a named tuple of states: flat keyword tensors -> y and the final state in one tuple."""

    def run(**inputs: Any) -> tuple[Tensor, ...]:
        given = state(*(inputs.pop(n) for n in state._fields))
        y, final = scan(**inputs, state=given, **options)
        return y, *final

    return run


def stepped(step: Callable[..., tuple[Tensor, Any]], state: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step with a named tuple of states: inputs by name, states in order -> y and the states in one tuple."""

    def run(token: Named, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        y, after = step(**token, state=state(*before))
        return y, *after

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

    def fault(subject: Subject, inputs: Named, right: Outputs) -> Outputs:
        half = inputs["doc_ids"].shape[1] // 2
        early = {n: t[:, :half] if n in per_token else t for n, t in inputs.items()}
        late = {n: t[:, half:] if n in per_token else t for n, t in inputs.items()}
        y0, *middle = scan(**early)
        narrow = (carried(s.bfloat16().float(), inputs["doc_ids"], half) for s in middle)
        y1, *final = subject.op(**late | dict(zip(state, narrow, strict=True)))
        return torch.cat((y0, y1), 1), *final

    return fault


def mamba3_subject(
    make: Callable[..., Named],
    run: Scan,
    recurrence: Scan,
    chunk_size: int,
    per_token: Sequence[str],
    state: Sequence[str],
    faults: Mapping[str, Any],
) -> Subject:
    """Return a subject whose plain formula is the whole row at once.

    The recurrence is not suitable: it adds its angles one by one, so that neighbours share their errors, and in fp32
    its y is 1.8 times as close as that of any parallel sum.
    """

    def turned(scan: Scan) -> Scan:
        def turn(**inputs: Tensor) -> tuple[Tensor, ...]:
            y, theta, *rest = scan(**inputs)
            return y, on_circle(theta), *rest

        return turn

    chunked, whole = partial(run, chunk_size=chunk_size), partial(run, chunk_size=64, impl="eager")
    common = {"dropped document reset": dropped_reset, "bf16 state": bf16_state(chunked, per_token, state)}
    inputs = fp32("", make, B=8)
    return Subject(inputs, turned(chunked), turned(whole), {**common, **faults}, turned(recurrence))


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


@dataclass(frozen=True)
class Fault:
    """Wrong arguments of a launch.

    change: name -> the wrong value, or a function of the right one.
    spares: indices of the outputs that stay right.
    unseen: indices of the outputs that are not compared.
    """

    change: Mapping[str, Any]
    spares: Sequence[int] = ()
    unseen: Sequence[int] = ()

    def planted(self, arguments: Named) -> Named:
        """Return the arguments with the fault."""
        return arguments | {n: v(arguments[n]) if callable(v) else v for n, v in self.change.items()}


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
    # Results of the oracle -> the minimum size of an output's terms (interpret/ratio.py).
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
        """Return the arguments of one case."""
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
        from suites.kernels.interpret.ratio import outside

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
