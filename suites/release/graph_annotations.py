"""One process of the check of annotated kernels: a CUDA graph whose kernels have names, replayed under the profiler.

`python -m suites.release.graph_annotations`; the last line of output is JSON. A process of its own, because annotations
may subscribe to CUPTI, and then torch's profiler records nothing in that process.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from suites.support.child import print_result


def main() -> dict[str, Any]:
    """kernels: category and name of each kernel of the trace that has a stream, "" for an unnamed one; refusal."""
    try:
        from torch.cuda.graph_annotations import get_kernel_annotations, is_available, mark_kernels
    except ImportError as error:  # public since torch 2.15
        return {"kernels": [], "refusal": str(error)}
    if not is_available():
        return {"kernels": [], "refusal": "needs cuda-bindings and a driver of CUDA 13.1 or later"}
    graph, x = torch.cuda.CUDAGraph(), torch.ones(64, device="cuda")
    x.sin().cos()
    torch.cuda.synchronize()
    # Without threads of autograd, which a capture with annotations requires.
    with (
        torch.autograd.grad_mode.set_multithreading_enabled(False),
        torch.cuda.graph(graph, enable_annotations=True, annotation_config={"backend": "edge_walk"}),
    ):
        with mark_kernels("named"):
            y = x.sin()
        y.cos()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file), cuda_graph_annotations=get_kernel_annotations())
        events = json.loads(file.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    return {"kernels": ["named" if "named" in str(e["args"]) else "" for e in kernels], "refusal": ""}


if __name__ == "__main__":
    print_result(main())
