"""torch's structured trace log, read in process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _TraceHandler(logging.Handler):
    """Collects (artifact name, payload text) from torch's structured trace log, in process."""

    def __init__(self, wanted: set[str]) -> None:
        super().__init__(logging.DEBUG)
        self.wanted = wanted
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None) or {}
        name = metadata.get("artifact", {}).get("name") if "artifact" in metadata else None
        name = name or next((w for w in self.wanted if w in metadata), None)
        if name in self.wanted:
            payload = getattr(record, "payload", "")
            self.found.append((name, str(payload() if callable(payload) else payload)))


@contextmanager
def trace_artifacts(*names: str) -> Iterator[list[tuple[str, str]]]:
    """Yield the named artifacts of torch's structured trace log that appear inside the block, in order."""
    handler = _TraceHandler(set(names))
    log = logging.getLogger("torch.__trace")
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False  # thousands of lines, which pytest would print for every red row
    try:
        yield handler.found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
