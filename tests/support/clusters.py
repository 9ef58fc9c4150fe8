"""A real Ray cluster on this machine: each node is what `ray start` starts on a host, and can be killed like one.

with RayCluster(folder, env) as cluster:
    head = cluster.start("lane_cpu", slots=2)
    cluster.address
    head.kill()             # kill -9 of the host
    head.workers()          # processes that run tasks, to be killed one by one
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.support.tree import ROOT

START_SECONDS = 180
# A worker that runs a task has the name of its function; others are idle.
BUSY = "ray::on_worker"


@dataclass
class Node:
    """The processes of one node, from its `ray start --block` on."""

    process: subprocess.Popen[str]

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def workers(self) -> list[int]:
        """Return the processes that run a task now."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:1] and process.cmdline()[0].startswith(BUSY):
                    found.append(process.pid)
        return found

    def kill(self) -> None:
        """Kill every process with SIGKILL at once, as a power cut does."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class RayCluster:
    """folder: of logs; env: environment variables of the hosts."""

    folder: Path
    env: Mapping[str, str]
    nodes: list[Node] = field(default_factory=list)
    address: str = ""

    def __post_init__(self) -> None:
        if find_spec("ray") is None:
            pytest.skip("ray is not installed: pip install 'bumpgate[fleet]'")
        # Ray's default is a token in the user's home folder.
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def start(self, *features: str, slots: int = 1, **env: str) -> Node:
        """Start a node, the first one as the head of the cluster."""
        resources = json.dumps(dict.fromkeys(features, 1))
        options = ["--num-cpus", str(slots), "--resources", resources, "--node-ip-address=127.0.0.1"]
        options += ["--object-store-memory=80000000", "--disable-usage-stats"]
        if not self.address:
            self.address = f"127.0.0.1:{free_port()}"
            options += ["--head", "--include-dashboard=false", f"--port={self.address.split(':')[1]}"]
        else:
            options += [f"--address={self.address}"]
        log = self.folder / f"node{len(self.nodes)}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--block"],
                env={**self.env, **self.variables, "PYTHONPATH": str(ROOT), **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        node = Node(process)
        self.nodes.append(node)
        deadline = time.monotonic() + START_SECONDS
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return node

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *error: object) -> None:
        for node in reversed(self.nodes):
            node.kill()
