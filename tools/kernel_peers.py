"""Times of torch's own attention kernels: cuDNN and flash through SDPA, and FlexAttention.

    python -m tools.kernel_peers [--out tools/kernel_peers.json]

The cases are those of suites/ops/attention.py, one document a row, in one process; SDPA has no softcap. Written as
JSON, which tools.op_table shows. Exit codes: 0 written; 2 usage error; 3 no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bumpgate.plugin.provenance import driver, versions
from bumpgate.process.host import gpu_models
from suites.support.tables import publish

FILE = Path(__file__).with_suffix(".json")
WAYS = ("forward", "both")
CASES = ("attention-P128", "attention-P128-softcap30", "attention-P64", "attention-P64-softcap30")
# Of an output against ours: two roundings to bf16.
LARGEST_DIFFERENCE = 1e-2


def calls(softcap: float) -> dict[str, Callable[..., Any]]:
    """Return the implementations by name, each with the arguments of the op; B batch, T tokens."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from kernels.attention.upstream import attention_sdpa
    from suites.ops.spec import T

    fused = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cuda")

    def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    def flex(q: Any, k: Any, v: Any, doc_ids: Any) -> Any:
        heads = (t.transpose(1, 2) for t in (q, k, v))
        options = {"score_mod": capped if softcap else None, "block_mask": mask, "enable_gqa": True}
        return fused(*heads, **options).transpose(1, 2)

    def sdpa(backend: SDPBackend) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            with sdpa_kernel(backend):
                return attention_sdpa(*inputs)

        return call

    own = {"cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION), "flash": sdpa(SDPBackend.FLASH_ATTENTION)}
    return {**({} if softcap else own), "FlexAttention": flex}


def measure(name: str) -> dict[str, list[float]]:
    """Return implementation -> milliseconds of each of WAYS.

    Raises ValueError if one computes another result than ours.
    """
    import torch

    from bumpgate.plugin.instruments import reset_dynamo
    from suites.ops import timed_cases
    from suites.support.gpu_timing import forward_and_backward, milliseconds

    torch.manual_seed(0)
    reset_dynamo()
    case = timed_cases()[name].make(4)
    expected = case.op(*case.inputs).float()
    found = {}
    for which, call in calls(case.op.keywords["softcap"]).items():
        difference = float((call(*case.inputs).float() - expected).norm() / expected.norm())
        if not difference < LARGEST_DIFFERENCE:
            raise ValueError(f"{name}: {which} differs from the op by {difference:.2g}")
        ways = forward_and_backward(call, case.inputs)
        found[which] = [round(milliseconds(way).median, 4) for way in ways]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code; argparse itself exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m tools.kernel_peers", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="writes the JSON there instead of printing it")
    given = parser.parse_args(arguments)
    if not gpu_models():
        print("the NVIDIA driver lists no GPU: run this on a machine with one", file=sys.stderr)
        return 3
    times = {name: measure(name) for name in CASES}
    made = {"device": gpu_models()[0], "driver": driver(), **versions()}
    result = {"made_with": made, "ways": WAYS, "milliseconds": times}
    return publish(json.dumps(result, indent=1) + "\n", given.out)


if __name__ == "__main__":
    sys.exit(main())
