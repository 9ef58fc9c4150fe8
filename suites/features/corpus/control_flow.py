"""Higher-order operators and regions: scan, nested compile regions."""

from __future__ import annotations

import torch
from torch import Tensor

from suites.features.corpus.case import differences, regression


@regression(
    "control_flow-scan_gradient",
    "The gradient of a scan leaves out what passes through the carry, if the first carry requires none",
    issue=184528,
    bad="2.11.0 2.12.0",
    good="2.13.0 2.14.1 2.15.0",
)
def scan_gradient() -> list[str]:
    from suites.support.instruments import scan  # some of the instruments do not import on torch 2.8

    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return carry * 0.5 + x, carry * x

    def looped(xs: Tensor) -> Tensor:
        carry, outputs = torch.ones(3), []
        for x in xs:
            carry, y = step(carry, x)
            outputs.append(y)
        return torch.stack(outputs)

    def scanned(xs: Tensor) -> Tensor:
        return scan(step, torch.ones(3), xs)[1]

    xs = torch.randn(5, 3, requires_grad=True)
    compiled = torch.compile(scanned, backend="aot_eager", fullgraph=True)
    gradients = [torch.autograd.grad(run(xs).sum(), xs)[0] for run in (looped, compiled)]
    return differences("gradient", *gradients)


state = torch.tensor(0)


@regression(
    "control_flow-region_reads_global",
    "A nested compile region that is called twice reads the first value of a global that changed in between",
    issue=191821,
    bad="2.12.0 2.13.0",
    good="2.11.0 2.14.1 2.15.0",
)
def region_reads_global() -> list[str]:
    @torch.compiler.nested_compile_region
    def incremented() -> Tensor:
        return state + 1

    def twice(x: Tensor) -> Tensor:
        global state
        for _ in range(2):
            state = x
            x = incremented()
        return x

    compiled = torch.compile(twice, backend="eager", fullgraph=True)
    return differences("output", torch.tensor(2), compiled(torch.tensor(0)))
