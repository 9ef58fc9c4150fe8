"""Facts of torch 2.12 and later that this stack relies on, each checked by running it. Rule R1.

Facts that only another device shows are listed by name in one row, which turns red if such a device is present.

N matrices, D their side.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import io
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from suites.release.programs import branch
from suites.support.child import ROOT, run_json
from suites.support.comparison import error_ratio
from suites.support.gpu_timing import CALLS, alternately, median
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

PROGRAMS = "suites.release.programs"
OURS = ("bumpgate", "fixtures", "kernels", "launch", "model", "suites")


def fact(row: Any, name: str, shown: dict[str, bool], *evidence: str) -> None:
    """Report a row of parts that all must hold."""
    missing, id = (
        [part for part, holds in shown.items() if not holds],
        f"release/{name}/parts_that_do_not_hold",
    )
    row.count(id, missing, expected=0, rule="R1", seen=shown, evidence=evidence)


def present(row: Any, name: str, found: bool, refusal: str = "") -> bool:
    """Report 1 if this torch has the feature, else 0: a build that loses it is red, one that gains it a WIN."""
    shared = {"rule": "R1", "seen": 1, "evidence": [refusal or f"torch {torch.__version__}"]}
    row.cost(f"release/{name}/capability", int(found), "capability", better="higher", **shared)
    return found


def symmetric(N: int, D: int, device: str) -> Tensor:
    """(N,D,D) fp32."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(N, D, D, generator=generator)
    return (a + a.mT).to(device)


def residual(a: Tensor, values: Tensor, vectors: Tensor) -> float:
    """Return |A V - V diag(w)| over |A|, in fp64."""
    a, values, vectors = a.double(), values.double(), vectors.double()
    return float((a @ vectors - vectors * values.unsqueeze(-2)).norm() / a.norm())


@lanes("cpu", "h200")
@planted("R1", "an eigenvector that is another matrix's")
def test_batched_eigh(lane: Lane, row) -> None:
    a = symmetric(64, 32, lane.device)
    values, vectors = torch.linalg.eigh(a)
    # Rounding of a backward stable method: a few units in the last place times sqrt(D).
    bound = 8 * 32**0.5 * torch.finfo(torch.float32).eps
    found = residual(a, values, vectors)
    row.bound("release/batched_eigh/residual", found, "ratio", at_most=bound, rule="R1", seen=a)
    one_by_one = torch.stack([torch.linalg.eigvalsh(matrix) for matrix in a])
    torch.testing.assert_close(values, one_by_one, rtol=1e-4, atol=1e-4)
    assert residual(a, values, vectors.roll(1, 0)) > 100 * bound


def adagrad(device: str, fused: bool, dtype: torch.dtype) -> Tensor:
    """Return two parameters after ten steps, concatenated."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(size, generator=generator) for _ in range(11) for size in (231, 5)]
    parameters = [nn.Parameter(t.to(device, dtype)) for t in draws[:2]]
    options = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01, "foreach": False, "fused": fused}
    optimizer = torch.optim.Adagrad(parameters, **options)
    for step in range(1, 11):
        for p, gradient in zip(parameters, draws[2 * step : 2 * step + 2]):
            p.grad = gradient.to(device, dtype)
        optimizer.step()
    return torch.cat([p.detach() for p in parameters])


@lanes("cpu", "h200")
def test_fused_adagrad(lane: Lane, row) -> None:
    """Not bitwise: the fused one rounds in another order. Uses the ratio rule of suites/support/comparison.py.

    On CUDA since torch 2.12; an older one reports the devices that it supports.
    """
    refusal = ""
    try:
        adagrad(lane.device, True, torch.float32)
    except RuntimeError as error:
        refusal = str(error)
    assert (
        not refusal or "requires all the params to be floating point Tensors of supported devices" in refusal
    )
    if not present(row, "fused_adagrad", not refusal, refusal):
        return
    oracle = adagrad(lane.device, False, torch.float64)
    fused, plain = (adagrad(lane.device, each, torch.float32) for each in (True, False))
    ratio, seen = error_ratio(fused, plain, oracle), oracle.numel()
    row.bound("release/fused_adagrad/error_ratio", ratio, "ratio", at_most=2.0, rule="R1", seen=seen)


@lanes("cpu", "h200")
def test_cond_in_eager(lane: Lane, row) -> None:
    x = torch.linspace(-2, 2, 8, device=lane.device, requires_grad=True)
    shown = {}
    for chosen, plain in ((True, x.sin()), (False, 2 * x.cos())):
        found = branch(torch.tensor(chosen, device=lane.device), x)
        shown[f"{chosen}: value"] = torch.equal(found, plain)
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (found, plain)]
        shown[f"{chosen}: gradient"] = torch.equal(*gradients)
    fact(row, "cond", shown)


class Scaled(nn.Module):
    """x times block scales of MX formats."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5, 1, 2, 4]).to(torch.float8_e8m0fnu))

    def forward(self, x: Tensor) -> Tensor:
        """x (B,4) -> (B,4)."""
        return x * self.scale.to(x.dtype)


@lanes("cpu")
def test_export_of_float8_e8m0fnu(lane: Lane, row) -> None:
    model, x, file = Scaled(), torch.randn(3, 4), io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    shown = {
        "dtype": loaded.scale.dtype is torch.float8_e8m0fnu,
        "bytes": torch.equal(loaded.scale.view(torch.uint8), model.scale.view(torch.uint8)),
        "result": torch.equal(loaded(x), model(x)),
    }
    fact(row, "export_float8_e8m0fnu", shown)


@lanes("cpu")
def test_profiler_events(lane: Lane, row) -> None:
    """Events carry what the trace file always had: flows, kinds of activity, Python functions, unfinished events."""
    unfinished = torch.profiler.record_function("unfinished")
    with torch.profiler.profile(with_stack=True) as profile:
        unfinished.__enter__()
        torch.randn(8, 8, requires_grad=True).matmul(torch.randn(8, 8)).sum().backward()
    unfinished.__exit__(None, None, None)
    events = profile.events()
    kinds = {event.activity_type for event in events}
    shown = {
        "flow_id": any(event.flow_id for event in events),
        "flow_type": any(event.flow_type for event in events),
        "activity_type": "cpu_op" in kinds,
        "python functions": any(event.is_python_function for event in events),
        "unfinished": any(event.name == "unfinished" for event in events),
    }
    fact(row, "profiler_events", shown, f"{len(events)} events of kinds {sorted(map(str, kinds))}")


@lanes("cpu")
def test_names_of_device_features_exist(lane: Lane, row) -> None:
    """This lane can only check that they are present; their effect is checked on h200."""
    graph = inspect.signature(torch.cuda.graph).parameters
    shown = {
        "torch.accelerator.Graph": hasattr(torch.accelerator, "Graph"),
        "torch.Stream.is_capturing": callable(getattr(torch.Stream, "is_capturing", None)),
        "torch.cuda.graph(enable_annotations=)": "enable_annotations" in graph,
    }
    fact(row, "names", shown)


def scripted(source: str) -> list[str]:
    """Return the uses of TorchScript in a file's text, as spelled there."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        found += [name for name in names if name.startswith("torch.jit")]
    return found


@lanes("cpu")
@planted("R1", "a module of ours uses TorchScript")
def test_no_torchscript(lane: Lane, row) -> None:
    files = [path for room in OURS for path in sorted((ROOT / room).rglob("*.py"))]
    # This file and the program of a healthy log call it once, for its warning.
    warned = (Path(__file__), ROOT / "fixtures" / "logs" / "healthy" / "deprecated.py")
    found = {path: uses for path in files if path not in warned and (uses := scripted(path.read_text()))}
    row.count(
        "release/torchscript/uses", sum(map(len, found.values())), expected=0, rule="R1", seen=files,
        evidence=[f"{path.relative_to(ROOT)}: {', '.join(uses)}" for path, uses in found.items()],
    )  # fmt: skip
    for source in ("import torch\ntorch.jit.script(f)", "from torch import jit", "import torch.jit as j"):
        assert scripted(source), source


@lanes("cpu")
def test_torchscript_warns_of_its_deprecation(lane: Lane, row) -> None:
    """The category decides who sees it: Python shows a DeprecationWarning only to the caller's own module."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.jit.script(nn.ReLU())
    warned = [w for w in caught if "torch.jit.script` is deprecated" in str(w.message)]
    row.exact(
        "release/torchscript/deprecation_category", warned[0].category.__name__ if warned else "none",
        "category", rule="R1", seen=1 + len(caught), evidence=[str(w.message) for w in warned],
    )  # fmt: skip


@lanes("h200")
def test_accelerator_graph(lane: Lane, row) -> None:
    """Captured once and replayed on new values: bitwise equal to eager; the stream reports that it is capturing."""
    graph, refusal = None, ""
    try:
        graph = torch.accelerator.Graph() if hasattr(torch.accelerator, "Graph") else None
    except RuntimeError as error:  # PyPI's 2.13.0 and 2.15.0 have the class and register no CUDA graph for it
        if "not supported on device type" not in str(error):
            raise
        refusal = str(error)
    if not present(row, "accelerator_graph", graph is not None, refusal):
        return
    x, y = torch.zeros(64, device=lane.device), torch.zeros(64, device=lane.device)
    stream, capturing = torch.Stream(device=lane.device), []
    y.copy_(x.sin() * 2)
    with stream, graph:
        capturing.append(stream.is_capturing())
        y.copy_(x.sin() * 2)
    capturing.append(stream.is_capturing())
    x.copy_(torch.linspace(-3, 3, 64))
    torch.accelerator.synchronize()
    graph.replay()
    torch.accelerator.synchronize()
    shown = {"replay": torch.equal(y, x.sin() * 2), "is_capturing": capturing == [True, False]}
    fact(row, "accelerator_graph", shown)


@lanes("h200")
def test_cond_inside_a_cuda_graph(lane: Lane, row) -> None:
    """Warm-up, capture, then replays that take the branch which the capture did not: the device decides.

    In a new process, because a torch without this feature leaves its random generator broken.
    """
    result = run_json(PROGRAMS, "cond_in_cuda_graph", lane.device, environment={}, timeout=120)
    refusal = result["refusal"]
    assert not refusal or "captur" in refusal, refusal
    if present(row, "cond_in_cuda_graph", not refusal, refusal):
        fact(row, "cond_in_cuda_graph", result["shown"])


@lanes("h200")
def test_time_of_batched_eigh(lane: Lane, row, exclusive_machine) -> None:
    """Since torch 2.12 one call of cuSOLVER solves a batch; before, each matrix was a call."""
    a = symmetric(256, 32, lane.device)
    ways = [lambda: torch.linalg.eigh(a), lambda: [torch.linalg.eigh(matrix) for matrix in a]]
    together, one_by_one = (median(times) for times in alternately(ways))
    row.bound(
        "release/batched_eigh/time_over_one_by_one", together.median / one_by_one.median, "ratio",
        at_most=0.2, rule="R1", seen=CALLS,
        evidence=[f"{len(a)} matrices: {together.median:.3f} ms, one by one {one_by_one.median:.3f} ms"],
    )  # fmt: skip


@lanes("h200")
def test_names_of_annotated_kernels_in_a_trace(lane: Lane, row) -> None:
    result = run_json(PROGRAMS, "graph_annotations", environment={}, timeout=120)
    refusal, kernels = result["refusal"], result["kernels"]
    if present(row, "graph_annotations", not refusal, refusal):
        shown = {"one of two kernels is named": sorted(kernels) == ["", "named"]}
        fact(row, "graph_annotations", shown, f"kernels of the trace: {kernels}")


@lanes("h200")
def test_gpu_is_traced_after_a_profile_of_the_cpu(lane: Lane, row) -> None:
    """The suites profile with the GPU's activities at all times: present_activities."""
    kernels = {
        first: run_json(PROGRAMS, "profiled_twice", first, environment={}, timeout=120)["kernels"]
        for first in ("gpu", "cpu")
    }
    assert kernels["gpu"] > 0
    row.defect(
        "release/profiled_twice/kernels_missing_after_cpu",
        kernels["cpu"] == 0,
        known_in="torch>=2.15,<2.16",
        reason="the first profile of a process decides whether Kineto records a GPU (pytorch#186036, pytorch#186970)",
        rule="R1",
        seen=kernels["gpu"],
        evidence=[f"kernels of the second trace by the first: {kernels}"],
    )


@lanes("h200")
def test_green_contexts(lane: Lane, row) -> None:
    """Since torch 2.12 with a limit of the work queues, which needs a driver of CUDA 13.1 or later."""
    for name, found in run_json(PROGRAMS, "green_context", environment={}, timeout=120).items():
        refusal = found["refusal"]
        if present(row, f"green_context_{name}", not refusal, refusal):
            fact(row, f"green_context_{name}", {"product": found["equal"]})


@lanes("h200")
def test_compiled_addcdiv_equals_eager(lane: Lane, row) -> None:
    """Since torch 2.12 Inductor multiplies and adds in one rounding, as the eager kernel does. On CPU it does not."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(4096, generator=generator).to(lane.device) for _ in range(3))

    def update(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.addcdiv(a, b, c.abs() + 1, value=-0.37)

    differing = int((torch.compile(update)(a, b, c) != update(a, b, c)).sum())
    row.cost("release/addcdiv/entries_that_differ", differing, "count", rule="R1", seen=a.numel())


ROCM = bool(torch.version.hip)
TORCHCOMMS = importlib.util.find_spec("torchcomms") is not None
# Items of torch 2.12's release that no lane shows -> whether the device or package is present, and what is needed.
NOT_SHOWN: dict[str, tuple[bool, str]] = {
    "ROCm expandable segments": (ROCM, "ROCm >= 7.02"),
    "ROCm rocSHMEM": (ROCM, "ROCm"),
    "ROCm hipSPARSELt, FP8 semi-structured": (ROCM, "ROCm >= 7.12, MI350X"),
    "ROCm FlexAttention in two stages": (ROCM, "ROCm, MI350X"),
    "MPS Metal-4 shaders": (torch.backends.mps.is_built(), "macOS 26"),
    "XPU graphs and addcdiv": (torch.xpu.is_available(), "an XPU build"),
    "FlightRecorder of ncclx": (TORCHCOMMS, "torchcomms"),
    "torchcomms as the default": (TORCHCOMMS, "torchcomms"),
}


def parked(items: dict[str, tuple[bool, str]]) -> list[str]:
    """Return the items whose device or package is not present."""
    return [name for name, (here, _) in items.items() if not here]


@lanes("cpu")
@planted("R1", "the device of a parked item is here, and nothing was shown on it")
def test_parked_items_lack_their_device(lane: Lane, row) -> None:
    """The row counts what is not shown. An item whose device is present may not stay parked."""
    row.count(
        "release/parked/items_not_shown", len(parked(NOT_SHOWN)), expected=len(NOT_SHOWN), rule="R1",
        seen=NOT_SHOWN,
        evidence=[f"not shown: {name}: needs {needs}" for name, (_, needs) in NOT_SHOWN.items()],
    )  # fmt: skip
    on_a_mac = {**NOT_SHOWN, "MPS Metal-4 shaders": (True, "macOS 26")}
    assert len(parked(on_a_mac)) == len(NOT_SHOWN) - 1
