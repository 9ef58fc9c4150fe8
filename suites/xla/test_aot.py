"""The aot tier: the hybrid's train step through the real v6e compiler, without a TPU. 40 s of CPU, two processes.

The step is complete (forward, backward, AdamW), of the real model with its reference ops. Its resources on a chip are
judged by value; the program itself belongs to one libtpu, whose version is in each row.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from launch.xla import libtpu
from suites.support.child import run_json
from suites.support.lanes import V6E_AOT, lanes
from suites.support.planted import planted
from suites.xla import aot
from suites.xla.mesh_programs import on_meshes

PROGRAM = "nam12"
FITS, DOES_NOT = "1", "40"  # GiB of a result; a v6e has 32
GROWTH = 0.02  # of bytes; from libtpu 0.0.37 to 0.0.51 the temporaries of a dense step halved

pytestmark = [
    lanes("v6e"),
    pytest.mark.usefixtures("lane"),
    pytest.mark.fresh_process,
    pytest.mark.measured_on(V6E_AOT),
]


@pytest.fixture(scope="module")
def one_chip() -> dict[str, Any]:
    arguments = ("compiled_for_one_chip", PROGRAM, FITS, DOES_NOT)
    return run_json("suites.xla.mesh_programs", *arguments, environment=aot.ENVIRONMENT, timeout=570)


def report(row, name: str, found: dict[str, Any], rule: str) -> None:
    """Report the rows of one compiled program."""
    evidence = [f"libtpu {libtpu.installed()}, {found['code_bytes']} bytes of code, {found['collectives']}"]
    shared = {"seen": found["instructions"], "rule": rule, "evidence": evidence}
    row.bound(f"aot/{name}/chip", found["chip"], "name", expected="TPU v6 lite", **shared)
    for bytes_of in ("temporary", "argument"):
        metric = f"{bytes_of}_bytes"
        row.cost(f"aot/{name}/{metric}", found[metric], "bytes", tolerance=GROWTH, **shared)
    # Another compiler gives another program: only one that is larger by GROWTH counts.
    for metric in ("fusions", "instructions"):
        row.cost(f"aot/{name}/{metric}", found[metric], "count", tolerance=GROWTH, **shared)


def test_train_step_compiles_for_one_chip(row, one_chip: dict[str, Any]) -> None:
    """All twelve layers of narrow nam12, including experts and M2RNN, as one program."""
    report(row, f"{PROGRAM}-narrow-v6e-1x1", one_chip, rule="X11")
    assert one_chip["collectives"] == {}, "one chip has no collectives"


def test_train_step_compiles_for_four_chips(row) -> None:
    """A small hybrid over (data, expert): one program, partitioned four ways."""
    found = on_meshes("CPU")["meshes"]["data-expert"]["aot"]
    report(row, "small-moe-v6e-2x2", found, rule="X9")
    row.exact(
        "aot/small-moe-v6e-2x2/collectives",
        ", ".join(f"{count} {kind}" for kind, count in sorted(found["collectives"].items())), "kinds",
        seen=sum(found["collectives"].values()), rule="X9",
    )  # fmt: skip
    assert found["collectives"]["all-reduce"] > 0, "gradients over the data axis are summed"


@planted("X12", "a program that needs more than the chip's memory")
def test_program_over_memory_budget_fails_to_compile(row, one_chip) -> None:
    assert one_chip["refusals"][FITS] == "", "a program within the budget compiles"
    refusal = one_chip["refusals"][DOES_NOT]
    assert "CompileTimeHbmOom" in refusal, refusal
    available = re.search(r"available HBM \(([\d.]+)G\)|of ([\d.]+)G hbm", refusal)
    assert available, refusal
    row.exact(
        "aot/over-budget/available_gib", float(available[1] or available[2]), "GiB",
        seen=one_chip["refusals"], rule="X12", evidence=[refusal[:300]],
    )  # fmt: skip


def test_opcodes_are_read_from_a_dump() -> None:
    """The parser on lines as the compiler writes them: layouts, tuples, asynchronous collectives."""
    text = """ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:T(256)} parameter(0)
  %s = (f32[4]{0}, f32[8]{0:T(256)S(1)}) all-gather-start(%p), channel_id=1, dimensions={0}
  %d = f32[8]{0} all-gather-done(%s)
  %r = f32[]{:T(128)} all-reduce(%d), to_apply=%add
  ROOT %f = f32[8]{0} fusion(%d, %r), kind=kLoop, calls=%fused (1)
}"""
    counts = aot.opcode_counts(text)
    assert counts.total() == 5
    assert counts["fusion"] == 1
    assert aot.collectives(counts) == {"all-gather": 1, "all-reduce": 1}
