"""One process of the conditional's check: torch.cond in a CUDA graph, captured and replayed.

`python -m suites.release.cond_in_cuda_graph DEVICE`; the last line of output is JSON: the result of each call, and the
error of a torch that cannot capture it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from suites.support.child import print_result


def branch(chosen: Tensor, x: Tensor) -> Tensor:
    return torch.cond(chosen, lambda x: x.sin(), lambda x: 2 * x.cos(), (x,))


def main(device: str) -> dict[str, Any]:
    """shown: call -> whether it took the branch that the value selects. refusal: "" if it was captured."""
    x, chosen = torch.linspace(-2, 2, 8, device=device), torch.tensor(True, device=device)
    plain = {True: x.sin(), False: 2 * x.cos()}
    compiled = torch.compile(branch, backend="cudagraphs")
    shown: dict[str, bool] = {}
    try:
        for value in (True, False, True, False, True):
            chosen.fill_(value)
            shown[f"call {len(shown)}, {value}"] = torch.equal(compiled(chosen, x), plain[value])
    except RuntimeError as error:
        return {"shown": shown, "refusal": str(error).splitlines()[0]}
    return {"shown": shown, "refusal": ""}


if __name__ == "__main__":
    print_result(main(sys.argv[1]))
