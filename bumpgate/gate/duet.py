"""Both sides of a paired session at once, a share of the cores each (bumpgate/plugin/duet.py is their end of it).

A neighbour of a shared machine slows whatever runs while it is busy: within three minutes the CPU time of one
training step wandered from 155 to 235 ms there, in two processes at the same time nearly alike. Run together they
suffer together.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bumpgate.processes.runner import LaneCall, LaneRun, run_lanes

VARIABLE = "BUMPGATE_DUET"
# What each of the two times: enough that the rounds that one neighbour spoilt are few.
ROUNDS = 30


def shares() -> list[list[int]]:
    """The cores of this process in two halves; none where there is one core alone, or no way to ask."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    half = len(cores) // 2
    return [cores[:half], cores[half : 2 * half]] if half else []


def run_duet(calls: Sequence[LaneCall], flip: bool, timeout: float | None) -> list[LaneRun]:
    """Runs two lanes at once, linked by a socket over which they keep step.

    flip: the first of them begins on the cores of the second.
    """
    links = [end.detach() for end in socket.socketpair()]
    halves = shares()[::-1] if flip else shares()
    return run_lanes(
        [
            replace(
                call,
                environment={**call.environment, **_told(link, cores, leads)},
                keep_open=(link,),
            )
            for call, link, cores, leads in zip(calls, links, (halves, halves[::-1]), (True, False))
        ],
        timeout,
    )


def _told(link: int, cores: Sequence[Sequence[int]], leads: bool) -> Mapping[str, str]:
    return {
        VARIABLE: json.dumps({"socket": link, "cores": cores, "leads": leads}),
        "BUMPGATE_ROUNDS": str(ROUNDS),
    }
