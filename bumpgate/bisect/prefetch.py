"""Builds the environments that a bisect may need next, in a child process while the current probe runs.

A process rather than a thread: it runs at low priority, ends with its process group, and its builds are in the cache
under the same keys. Errors are ignored: they recur, and are reported, when the environment is actually requested.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from bumpgate.core.errors import BumpgateError
from bumpgate.env.build import build
from bumpgate.env.cached import NOTE
from bumpgate.env.request import Request, request_key
from bumpgate.process.child import end_group, start
from bumpgate.process.home import home

# Size of two CUDA builds of torch, unpacked and in uv's cache: nothing is prefetched with less free space.
FREE_BYTES = 24 << 30
PATHS = ("lock", "prefer", "overrides", "script")


class Prefetch:
    """Background builder with one child process. free: bytes that must be free on the disk of the cache."""

    def __init__(self, free: int = FREE_BYTES) -> None:
        self.free = free
        self._child: subprocess.Popen[bytes] | None = None
        self._payload = ""

    def start(self, requests: Iterable[Request]) -> None:
        """Build those of the requests that are not built yet; stop a running child with another list.

        Builds nothing if the disk is nearly full.
        """
        root = home() / "environments"
        new = [request for request in requests if not (root / request_key(request, None) / NOTE).exists()]
        payload = json.dumps([asdict(request) for request in new], default=str)
        if payload == self._payload:
            return
        self.stop()
        self._payload = payload
        place = home()
        place.mkdir(parents=True, exist_ok=True)
        if payload == "[]" or shutil.disk_usage(place).free < self.free:
            return
        source = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", __name__, payload]
        self._child = start(command, environment=os.environ | {"PYTHONPATH": path}, supervised=True)

    def stop(self) -> None:
        """Kill the child. An unfinished environment is not in the cache, and its lock is released."""
        self._payload = ""
        if self._child is None:
            return
        end_group(self._child)
        self._child = None


def main(text: str) -> None:
    os.nice(10)
    for raw in json.loads(text):
        paths = {name: Path(raw[name]) if raw[name] else None for name in PATHS}
        lists = {name: tuple(raw[name]) for name in ("requirements", "find_links", "forced")}
        try:
            build(Request(**raw | paths | lists))
        except BumpgateError:
            continue


if __name__ == "__main__":
    main(sys.argv[1])
