"""torch's logs, read in process. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _TraceHandler(logging.Handler):
    """Collects (artifact name, payload text) from torch's structured trace log, in process."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(logging.DEBUG)
        self.names = names
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None) or {}
        name = metadata.get("artifact", {}).get("name") if "artifact" in metadata else None
        name = name or next((w for w in self.names if w in metadata), None)
        if name in self.names:
            payload = getattr(record, "payload", "")
            self.found.append((name, str(payload() if callable(payload) else payload)))


@contextmanager
def trace_artifacts(*names: str) -> Iterator[list[tuple[str, str]]]:
    """Yield the named artifacts of torch's structured trace log that appear inside the block, in order."""
    handler = _TraceHandler(set(names))
    log = logging.getLogger("torch.__trace")
    level, propagate = log.level, log.propagate
    # pytest 9.2 listens to loggers that do not propagate: thousands of lines under every red row.
    shown = [other for other in log.handlers if type(other).__module__.startswith("_pytest.")]
    for other in shown:
        log.removeHandler(other)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield handler.found
    finally:
        log.removeHandler(handler)
        for other in shown:
            log.addHandler(other)
        log.setLevel(level)
        log.propagate = propagate


def count_bytes_accessed() -> None:
    """Make Inductor count bytes from here on; it does so only while this log is enabled.

    A cache entry holds the bytes only if they were counted when it was written, so the count stays enabled for every
    compile of a process, not just around a measurement. The log lines themselves are discarded.
    """
    log = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers[:] = [logging.NullHandler()]
