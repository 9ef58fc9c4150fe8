"""One process of the autotuning checks: trains a batched product whose kernel Inductor searches for.

`python -m suites.cache.search DEVICE CASE...` with TORCHINDUCTOR_CACHE_DIR set. A case is SIZE=CANDIDATE[=GRAPH]: the
inner size of the product, how its template candidates behave, and "transposed" for another graph around the same
product. The last line of output is JSON: for each case the losses, the searches, and whether ATen's product was chosen.
"""

from __future__ import annotations

import sys

from suites.cache.candidates import CANDIDATES
from suites.support.child import print_result

STEPS = 3


def train(device: str, size: int, candidate: str, graph: str) -> dict[str, object]:
    """Run STEPS steps of SGD on the sum of x @ w, x (2,8,size) and w (2,size,32). Only the product is compiled."""
    import torch

    from bumpgate.plugin.instruments import reset_dynamo, trace_artifacts
    from suites.support.instruments import autotuning

    reset_dynamo()
    torch.manual_seed(0)
    x = torch.randn(2, 8, size, device=device)
    w = torch.randn(2, size, 32, device=device, requires_grad=True)

    @torch.compile
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.bmm(x, w)
        return y.transpose(1, 2) if graph == "transposed" else y

    losses = []
    with autotuning(CANDIDATES[candidate]) as searches, trace_artifacts("inductor_output_code") as found:
        for _ in range(STEPS):
            loss = product(x, w).sum()
            loss.backward()
            with torch.no_grad():
                w -= 0.01 * w.grad
            w.grad = None
            losses.append(float(loss))
    first = found[0][1]  # the forward's code: the backward's product has its own search
    return {"losses": losses, "searches": searches, "aten": "extern_kernels.bmm(" in first}


def main(device: str, *cases: str) -> dict[str, object]:
    """Return case -> its result."""
    parts = {case: (*case.split("="), "")[:3] for case in cases}
    return {case: train(device, int(size), fault, graph) for case, (size, fault, graph) in parts.items()}


if __name__ == "__main__":
    try:
        print_result(main(*sys.argv[1:]))
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {str(error).splitlines()[0]}") from None
