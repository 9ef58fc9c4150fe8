"""Programs for fresh processes: `python -m suites.xla.programs NAME [ARGUMENT]` prints one JSON object.

They measure what is decided once per process (the environment, the persistent cache) or may end it (a crash).
"""

from __future__ import annotations

import os
from typing import Any

import torch

from launch.xla import environment as xla_environment
from suites.support.child import Programs

xla_environment.enter(os.environ)

program = Programs()


@program
def cached_step(directory: str) -> dict[str, Any]:
    """Run two training steps of a small hybrid on a persistent cache."""
    import torch_xla.runtime as runtime

    runtime.initialize_cache(directory)
    from launch.xla.steps import TrainStep
    from model import preset
    from suites.xla import support

    made = support.on_device(preset("nam12", "narrow", layer_pattern="A", depth=1))
    step = TrainStep(made.model, made.optimizer)
    counts = support.each_step(step, [[made.batch()], [made.batch(seed=2)]])
    return {"compiles": sum(c.compiles for c in counts), **support.cache_counters()}


@program
def rate_schedule() -> dict[str, Any]:
    """Count compiles of a step whose learning rate, a device tensor, takes the values 0.5, 1, 0 and 2 by fill_."""
    import torch_xla

    from suites.xla import support

    x, rate = torch.ones(7, 3).to(torch_xla.device()), torch.tensor(0.25).to(torch_xla.device())
    torch_xla.sync()
    compiles = []
    for value in (0.5, 1.0, 0.0, 2.0):
        with support.counted() as counts:
            rate.fill_(value)
            x.mul_(rate)
            torch_xla.sync()
        compiles.append(counts.compiles)
    return {"compiles": compiles}


@program
def defects() -> dict[str, Any]:
    """Run small programs that give another result, or take another path, than on the CPU."""
    import torch_xla

    from suites.xla import support

    @torch.library.custom_op("bumpgate_test::first_row", mutates_args=())
    def first_row(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0] += 2.5
        return y

    x = torch.arange(6.0).view(2, 3)
    on_device = x.to(torch_xla.device())
    torch_xla.sync()
    with support.counted() as counts:
        torch.searchsorted(on_device[1], on_device[0])
        torch_xla.sync()
    found = {"fallbacks": sum(counts.fallbacks.values()), "downloads": counts.downloads}
    unchanged = x.tolist()
    return {
        "searchsorted_on_host": [found, dict.fromkeys(found, 1), dict.fromkeys(found, 0)],
        "amax_without_dimension": [on_device.amax().cpu().tolist(), unchanged, x.amax().tolist()],
        "view_write_in_custom_op": [first_row(on_device).cpu().tolist(), unchanged, first_row(x).tolist()],
    }


@program
def grouped_mm() -> dict[str, Any]:
    """Multiply two groups of two rows each."""
    import torch_xla

    from suites.support.instruments import grouped_mm as product

    a, b = (
        torch.ones(*shape, dtype=torch.bfloat16).to(torch_xla.device()) for shape in ((4, 16), (2, 16, 16))
    )
    ends = torch.tensor([2, 4], dtype=torch.int32).to(torch_xla.device())
    return {"sum": product(a, b, ends).float().sum().item()}


@program
def jax_cache(directory: str, change: str) -> dict[str, Any]:
    """Return hits and misses of JAX's own persistent cache, and the hits of the last compiled function alone.

    change: what differs from other runs: "program", "jaxlib", "flags", "topology", or "" for nothing.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    if change == "flags":
        os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=true"
    import jax
    import jax.numpy as jnp
    from jax._src import cache_key
    from jax.sharding import NamedSharding, PartitionSpec

    if change == "topology":
        jax.config.update("jax_num_cpu_devices", 4)
    if change == "jaxlib":
        cache_key.jaxlib_version_str = "0.0.0"

    assert jax.config.jax_compilation_cache_dir == directory, "JAX did not read JAX_COMPILATION_CACHE_DIR"
    seen = {"hits": 0, "misses": 0}

    def listen(event: str, **_: Any) -> None:
        kind = event.rpartition("/cache_")[2]
        if event.startswith("/jax/compilation_cache/") and kind in seen:
            seen[kind] += 1

    jax.monitoring.register_event_listener(listen)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    everywhere = NamedSharding(jax.make_mesh((len(jax.devices()),), ("data",)), PartitionSpec())
    x = jax.device_put(jnp.ones((37, 37)), everywhere)
    before = seen["hits"]
    last = jnp.sin if change == "program" else jnp.tanh
    jax.jit(lambda x: last(x @ x).sum())(x).block_until_ready()
    return seen | {"last_hits": seen["hits"] - before, "devices": len(jax.devices())}


if __name__ == "__main__":
    program.main()
