"""Times of torch's own attention kernels: cuDNN and flash through SDPA, and FlexAttention.

    python -m tools.kernel_peers [--out tools/kernel_peers.json]

The cases are those of suites/ops/attention.py, one document a row, in one process; SDPA has no softcap. Written as
JSON, which tools.op_table shows. Exit codes: 0 written; 2 usage error; 3 no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bumpgate.plugin.provenance import driver, versions
from bumpgate.process.host import gpu_models
from suites.support.tables import publish, table

FILE = Path(__file__).with_suffix(".json")
NOTES = """
Median milliseconds, one document a row; both: forward and backward. {machine}.

Ours are the lane's rows of this build. cuDNN and flash are SDPA's, which has no softcap; "-": not measured. To measure
again: `python -m tools.kernel_peers --out tools/kernel_peers.json`.
"""
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


def section(result: Mapping[str, Any], ours: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the lines of a Markdown section on the result of `main`; the fastest of each line is bold.

    ours: case -> milliseconds of each way of the op itself.
    """
    measured = result["milliseconds"].items()
    both = {case: ({"ours": ours[case]} if case in ours else {}) | times for case, times in measured}
    names = ["ours", *dict.fromkeys(name for times in both.values() for name in times if name != "ours")]
    rows = []
    for case, times in both.items():
        for i, way in enumerate(result["ways"]):
            values = {name: ways[i] for name, ways in times.items() if ways[i] is not None}
            cells = [f"{values[name]:.3f}" if name in values else "-" for name in names]
            fastest = names.index(min(values, key=lambda name: values[name]))
            cells[fastest] = f"**{cells[fastest]}**"
            rows.append(("" if i else f"`{case}`", way, *cells))
    notes = NOTES.format(machine=described(result["made_with"])).splitlines()
    return ["## Attention and torch's own kernels", *notes, "", *table(("op, shape", "pass", *names), rows)]


def described(made: Mapping[str, Any]) -> str:
    """Return the machine and build of a result in one line."""
    return f"{made['device']}, driver {made['driver']}, torch {made['torch']}, triton {made['triton']}"


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
