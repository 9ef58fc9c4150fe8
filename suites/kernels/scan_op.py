"""What the laws of the scan ops (suites/kernels/test_scans.py) need to know of one of them.

B batch, T tokens, H heads. Inputs go by name; results are y (B,T,H,...) and the final state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from suites.support.comparison import DTYPES, Named, values_and_gradients
from suites.support.scans import cut

Scan = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class ScanOp:
    """One scan op: how it is called, and what is particular to it.

    scan, recurrence: keyword tensors -> y and the final state; scan also takes impl, and chunk_size if it is chunked.
    step: the inputs of one token and the state before it -> y and the state after it. per_token: the inputs with an
    axis of tokens, doc_ids last. state: the inputs that hold the state before the first token. turns: those that are
    angles, equal up to full turns.
    """

    name: str
    scan: Scan
    recurrence: Scan
    step: Callable[[Named, tuple[Tensor, ...]], tuple[Tensor, ...]]
    make_inputs: Callable[..., Named]
    names: tuple[str, ...]
    per_token: tuple[str, ...]
    state: tuple[str, ...]
    turns: tuple[str, ...] = ()
    chunked: bool = True
    # A scan with a fault: without one of its terms.
    fault: Scan
    # Replaces inputs, in place, by values at which a naive form of the op overflows.
    overflow: Callable[[Named], None]
    # Case -> the inputs that it replaces, and words of the error.
    bad: Mapping[str, tuple[Callable[[Named], dict[str, Any]], str]]
    # Arguments of make_inputs: the smallest that gradcheck and opcheck need, and odd sizes for drawn lengths.
    gradcheck: Mapping[str, Any]
    opcheck: Mapping[str, Any]
    odd: Mapping[str, Any]
    # Arguments of make_inputs that are drawn where the op is compared with its recurrence.
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
    rounding: float = 1e-12  # in fp64, relative
    rounding_32: float = 2e-5

    @property
    def results(self) -> tuple[str, ...]:
        return "y", *(f"final {n}" for n in self.state)

    @property
    def floats(self) -> tuple[str, ...]:
        return tuple(n for n in self.names if n != "doc_ids")

    def of(self, chunk_size: int, **options: Any) -> Scan:
        """Return the scan with this chunk size, if it is chunked."""
        return partial(self.scan, **options, **({"chunk_size": chunk_size} if self.chunked else {}))

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
        return self.segment(
            inputs, slice(begin, None), tuple(torch.zeros_like(t) for t in self.before(inputs))
        )


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
    """Return the strategies of ScanOp.packed."""
    return {"length": length, "chunk_size": chunk_size, "dtype": st.sampled_from(dtypes or [*DTYPES])}
