"""One process of the knob checks: the values of torch's configuration and switches in this environment, as JSON.

`python -m suites.launch.knobs NAME...` with dotted names of configuration fields; "absent" if torch has none. The
output also has `lost`, the fields that read differently in a new thread after they were assigned here, and `probes`,
for variables that change no field.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import warnings
from typing import Any

from suites.support.child import print_result

ABSENT = "absent"


def resolve(name: str) -> tuple[Any, str]:
    """Resolve a dotted name to its object and field. Raises AttributeError if torch lacks it."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            holder = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:-1]:
            holder = getattr(holder, part)
        getattr(holder, parts[-1])
        return holder, parts[-1]
    raise AttributeError(name)


def read(name: str) -> Any:
    try:
        holder, field = resolve(name)
    except AttributeError:
        return ABSENT
    return getattr(holder, field)


def lost_in_threads(name: str) -> bool:
    """Return whether another thread does not see a value assigned here: autotuning and the backward have their own
    threads.

    A field that is overridden by an environment variable accepts no assignment; that is not a difference of threads.
    """
    holder, field = resolve(name)
    before = getattr(holder, field)
    other = not before if isinstance(before, bool) else before + 1
    setattr(holder, field, other)
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(getattr(holder, field)))
    thread.start()
    thread.join()
    here = getattr(holder, field)
    setattr(holder, field, before)
    return seen != [here]


def probes() -> dict[str, Any]:
    """Return variable -> the value that it changes."""
    import torch

    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        calls.append(len(inputs))
        return graph.forward

    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(4))
    recompiles = logging.getLogger("torch._dynamo.guards.__recompiles")
    return {
        "TORCH_COMPILE_DISABLE": len(calls),
        "TORCHDYNAMO_DISABLE": len(calls),
        "TORCH_LOGS": recompiles.isEnabledFor(logging.DEBUG),
        "TORCH_TRACE": len(logging.getLogger("torch.__trace").handlers),
        "TORCH_DISTRIBUTED_DEBUG": str(torch.distributed.get_debug_level()),
    }


def main(*names: str) -> dict[str, Any]:
    """Return the fields, the probes, and the fields whose assignment does not reach another thread."""
    warnings.simplefilter("ignore")
    fields = {name: read(name) for name in names}
    kinds = {name: type(value) for name, value in fields.items() if value != ABSENT}
    lost = [name for name, kind in kinds.items() if kind in (bool, int, float) and lost_in_threads(name)]
    return {"fields": fields, "probes": probes(), "lost": lost}


if __name__ == "__main__":
    print_result(main(*sys.argv[1:]))
