"""Runs both sides of a paired session at once, each on a share of the cores (bumpgate/plugin/duet.py runs in them).

A busy neighbour on a shared machine slows everything else: within three minutes the CPU time of one training step
varied from 155 to 235 ms, almost equally in two processes at the same time. Run at once, both sides slow down alike.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import replace

from bumpgate.process.runner import LaneCall, LaneRun, run_lanes

VARIABLE = "BUMPGATE_DUET"
# Rounds that each process times: enough that few of them are disturbed by a neighbour.
ROUNDS = 30


def shares() -> list[list[int]]:
    """Return the cores of this process in two halves; empty if there is a single core, or they cannot be queried."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    half = len(cores) // 2
    return [cores[:half], cores[half : 2 * half]] if half else []


def run_duet(calls: Sequence[LaneCall], flip: bool, timeout: float | None) -> list[LaneRun]:
    """Run two lanes at once, synchronized over a socket.

    flip: the first of them starts on the cores of the second. A call's own $BUMPGATE_ROUNDS overrides ROUNDS.
    """
    links = [end.detach() for end in socket.socketpair()]
    halves = shares()[::-1] if flip else shares()
    return run_lanes(
        [
            replace(
                call,
                environment={
                    "BUMPGATE_ROUNDS": str(ROUNDS),
                    **call.environment,
                    VARIABLE: _settings(link, cores, leads),
                },
                keep_open=(link,),
            )
            for call, link, cores, leads in zip(calls, links, (halves, halves[::-1]), (True, False))
        ],
        timeout,
    )


def _settings(link: int, cores: Sequence[Sequence[int]], leads: bool) -> str:
    return json.dumps({"socket": link, "cores": cores, "leads": leads})
