"""One process of the CUDA-graph check: a block that cannot be captured, and what the process can still do after it.

`python -m suites.compile.failed_recording DEVICE`; the last line of output is JSON. It needs a new process, since torch
does not guarantee that the process survives.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from launch.cuda_graphs import CaptureError, capture
from suites.support.child import print_result


class ReadsOnTheHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def main(device: str) -> dict[str, object]:
    """refusal: the error in one line. drawn, replayed: whether random numbers and another block's replay are right."""
    x, refusal = torch.ones(4, device=device), ""
    try:
        capture(ReadsOnTheHost(), (x,))
    except CaptureError as error:
        refusal = str(error)
    drawn = torch.randn(1000, device=device).std()
    (doubled,) = capture(Doubles(), (x,))(x + 1)
    return {
        "refusal": refusal,
        "drawn": bool(0.8 < drawn < 1.2),
        "replayed": torch.equal(doubled, 2 * (x + 1)),
    }


if __name__ == "__main__":
    print_result(main(sys.argv[1]))
