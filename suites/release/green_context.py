"""One process of the check of green contexts: a part of the GPU's SMs, and a limit of its work queues.

`python -m suites.release.green_context`; the last line of output is JSON. A process of its own: a context that could
not be created may leave another one current.
"""

from __future__ import annotations

from typing import Any

import torch

from suites.support.child import print_result

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


def main() -> dict[str, Any]:
    """context -> result of `attempt`."""
    return {name: attempt(arguments) for name, arguments in CONTEXTS.items()}


if __name__ == "__main__":
    print_result(main())
