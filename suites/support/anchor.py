"""The anchor workload: what a train step's time is divided by, so that rows of two hosts can be compared."""

from __future__ import annotations

import time

import numpy as np


def anchor() -> None:
    """A fixed workload that no torch can change: small NumPy arrays and interpreter work, about 40 CPU ms."""
    for i in range(0, len(_ARRAYS), 2):
        pair = np.concatenate([_ARRAYS[i], _ARRAYS[i + 1]], axis=1).reshape(256, 64)
        mixed = np.tanh(pair @ _WEIGHTS[i % len(_WEIGHTS)])
        sum(k & 7 for k in range(500))
        _ARRAYS[i], _ARRAYS[i + 1] = mixed[:128], mixed[128:]


_GENERATOR = np.random.default_rng(0)
_ARRAYS = [_GENERATOR.standard_normal((128, 64), dtype=np.float32) for _ in range(600)]
_WEIGHTS = [_GENERATOR.standard_normal((64, 64), dtype=np.float32) / 8 for _ in range(52)]


def anchor_milliseconds() -> float:
    """Wall time of the anchor's quickest of five runs: how fast this host is at the moment."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        anchor()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)
