"""Probe what this torch supports by trying it (rule C16): python -m launch.capabilities [FORM ...]

A kernel that reads its arguments' addresses, as a Triton launch does, is passed to Dynamo as a custom op, by
allow_in_graph and under disable. A version string is not enough: a nightly of 2.12 is older than "2.12". Prints one
JSON line per form; a form that crashes has no line.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from launch.children import Child, ChildError, moved, places, run
from launch.contract import PATH, ContractError, section

# Form -> number of graphs of a program with the kernel between two operators: opaque in one graph, or a break.
GRAPHS = {"custom_op": 1, "allow_in_graph": 1, "disable": 2}
SECONDS = 300.0
numbers = itertools.count()

Kernel = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Seen:
    """works: forward and gradient equal eager, with the expected number of graphs. why: one line on a failure."""

    works: bool
    graphs: int
    why: str = ""


def by_address(x: Tensor) -> Tensor:
    """Return 2 x in fp32, read and written by address, which a fake tensor does not have."""
    x, y = x.contiguous(), torch.empty_like(x)
    source, target = ((ctypes.c_float * x.numel()).from_address(t.data_ptr()) for t in (x, y))
    target[:] = [2 * value for value in source]
    return y


def given_as(form: str, kernel: Kernel) -> Kernel:
    """Wrap `kernel`, which is linear and its own backward, in one form. Raises ValueError on an unknown form."""

    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return kernel(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return kernel(grad)

    def call(x: Tensor) -> Tensor:
        return Opaque.apply(x)

    if form == "allow_in_graph":
        return torch.compiler.allow_in_graph(call)
    if form == "disable":
        return torch.compiler.disable(call)
    if form != "custom_op":
        raise ValueError(f"{form!r} is not one of {', '.join(GRAPHS)}")

    def opaque(x: Tensor) -> Tensor:
        return kernel(x)

    op = torch.library.custom_op(f"bumpgate_probe::opaque_{next(numbers)}", opaque, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, grad: op(grad))
    return op


def probe(form: str, kernel: Kernel = by_address) -> Seen:
    """Compile the program with `kernel` in one form, in this process: it may crash, and its graphs stay in memory."""
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    opaque = given_as(form, kernel)

    def program(x: Tensor) -> Tensor:
        return (opaque(x.sin()) * 3).sum()

    results = []
    try:
        for step in (program, *(torch.compile(program, backend=backend) for backend in (count, "aot_eager"))):
            x = torch.linspace(-1, 1, 8).requires_grad_()
            loss = step(x)
            loss.backward()
            results.append(torch.cat([loss.detach().view(1), x.grad]))
    except Exception as error:  # any exception means that the form does not work
        return Seen(False, graphs, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200])
    if not all(torch.allclose(found, results[0]) for found in results[1:]):
        return Seen(False, graphs, "compiled, it computes something else")
    if graphs != GRAPHS[form]:
        return Seen(False, graphs, f"{graphs} graphs in place of {GRAPHS[form]}")
    return Seen(True, graphs)


def probe_in_child(forms: Sequence[str] = tuple(GRAPHS), command: Sequence[str] = ()) -> dict[str, Seen]:
    """Run `probe` of each form in a child of the same venv and checkout; a form that crashes does not work.

    command: replaces this module. Raises ContractError if the child ran in another venv or checkout.
    """
    found: dict[str, Seen] = {}
    while rest := [form for form in forms if form not in found]:
        child = Child("probe", [*(command or (sys.executable, "-m", "launch.capabilities")), *rest])
        try:
            tail, why = run([child], seconds=SECONDS, cwd=PATH.parent.parent)["probe"], "no answer"
        except ChildError as error:
            tail, why = error.tail, str(error)
        for line in tail:
            if line.startswith("{"):
                reply = json.loads(line)
                if lines := list(moved(reply["places"])):
                    raise ContractError(f"the probe is about another installation: {lines[0]}")
                found[reply["form"]] = Seen(**reply["seen"])
        crashed = next((form for form in rest if form not in found), None)
        if crashed is not None:
            found[crashed] = Seen(False, 0, why)
    return found


def chosen(found: Mapping[str, Seen]) -> str:
    """Return the first of the contract's forms that works here. Raises ContractError if none does."""
    prefer = section("capability", lambda table: list(table["opaque_kernel"]["prefer"]))
    for form in prefer:
        if found[form].works:
            return form
    raise ContractError(
        f"torch {torch.__version__}: an opaque kernel works in none of the forms {', '.join(prefer)}"
    )


def at_least(label: str, release: str) -> bool:
    """Whether a build is `release` or later; a nightly or source build counts as the release it leads to.

    Use it only for decisions by version (a wheel index, a driver), not for features that can be probed.
    """
    return Version(label).release >= Version(release).release


def trained_in(wanted: str, device: str, path: Path = PATH) -> str:
    """Return the dtype of a run that asks for `wanted`: on an old GPU, another one for the contract's low precision.

    Raises ContractError; see low_precision.
    """
    place = torch.device(device)
    if place.type != "cuda" or wanted != section(
        "capability", lambda table: table["low_precision"]["dtype"], path
    ):
        return wanted
    major, minor = torch.cuda.get_device_capability(place)
    return low_precision("cuda", 10 * major + minor, path=path)


def low_precision(device: str, sm: int = 0, given: Mapping[str, str] = os.environ, path: Path = PATH) -> str:
    """The dtype of the low-precision parts. sm: the GPU's compute capability times ten, 90 for an H200.

    Raises ContractError, one line with the switch, on a GPU below the contract's minimum without an explicit request.
    """
    rule = section("capability", lambda table: dict(table["low_precision"]), path)
    if device != "cuda" or sm >= rule["minimum_sm"]:
        return rule["dtype"]
    if given.get(rule["switch"]) != "1":
        raise ContractError(
            f"sm_{sm} is below sm_{rule['minimum_sm']}: {rule['reason']}; to use {rule['below']}: {rule['switch']}=1"
        )
    return rule["below"]


def main(arguments: Sequence[str]) -> int:
    """Print one line per form and return 0."""
    for form in arguments or GRAPHS:
        line = {"form": form, "seen": asdict(probe(form)), "torch": torch.__version__, "places": places()}
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
