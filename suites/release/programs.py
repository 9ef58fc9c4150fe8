"""Programs for fresh processes: `python -m suites.release.programs NAME [ARGUMENT]` prints JSON on its last line."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from suites.support.child import Programs

program = Programs()


def branch(chosen: Tensor, x: Tensor) -> Tensor:
    return torch.cond(chosen, lambda x: x.sin(), lambda x: 2 * x.cos(), (x,))


@program
def cond_in_cuda_graph(device: str) -> dict[str, Any]:
    """Capture torch.cond in a CUDA graph and replay it. In a process of its own: a failed capture breaks the generator.

    shown: call -> whether it took the branch that the value selects. refusal: "" if it was captured.
    """
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


@program
def graph_annotations() -> dict[str, Any]:
    """Replay a CUDA graph whose kernels have names. Annotations may subscribe to CUPTI, which ends other traces.

    kernels: name of each kernel of the trace, "" for an unnamed one; refusal.
    """
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


# name -> arguments
CONTEXTS: dict[str, dict[str, Any]] = {
    "sms": {"num_sms": 16},
    "work_queue": {"num_sms": 16, "workqueue_scope": "balanced", "workqueue_concurrency_limit": 2},
}


def attempt(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return whether a product on a stream of the context equals that of the whole GPU, or the refusal."""
    a = torch.arange(4096.0, device="cuda").reshape(64, 64) / 4096
    whole = a @ a
    torch.cuda.synchronize()
    try:
        from torch.cuda.green_contexts import GreenContext

        context = GreenContext.create(**arguments)  # the only form of torch 2.13, an alias in 2.15
        stream = context.Stream()
    except (
        ImportError,
        AttributeError,
        RuntimeError,
        TypeError,
    ) as error:  # a torch without them, or a driver
        return {"equal": False, "refusal": str(error).splitlines()[0]}
    with torch.cuda.stream(stream):
        part = a @ a
    stream.synchronize()
    return {"equal": torch.equal(part, whole), "refusal": ""}


@program
def green_context() -> dict[str, Any]:
    """context -> result of `attempt`. A context that could not be created may leave another one current."""
    return {name: attempt(arguments) for name, arguments in CONTEXTS.items()}


@program
def profiled_twice(first: str) -> dict[str, Any]:
    """kernels: their number in a trace after a profile of `first`, cpu or gpu, which decides for all later ones."""
    x = torch.ones(64, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA if first == "gpu" else ProfilerActivity.CPU]):
        x.sin()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        x.sin()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return {"kernels": sum(event.device_type == on_device for event in trace.events())}


if __name__ == "__main__":
    program.main()
