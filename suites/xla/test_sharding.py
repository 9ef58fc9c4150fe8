"""Every parameter carries its annotation, metrics are verified to be global, memory has no silent zero (X14, X12).

One process with 8 virtual devices, 15 s of CPU; the plan itself is tested on the CPU for every feature of the model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla
from torch import nn

from launch.xla import sharding, tpu_memory
from model import preset
from suites.model.programs import FEATURES, VARIANTS
from suites.support.child import run_json
from suites.support.hybrids import build
from suites.support.lanes import lanes
from suites.support.planted import planted
from suites.xla.mesh_programs import everything_on

pytestmark = [lanes("v6e"), pytest.mark.usefixtures("lane")]


# torch_xla's messages for the virtual device, and for a physical one by the runtime's name.
VIRTUAL = "MemoryInfo not supported for SPMD virtual device"
PHYSICAL = "device type at start of device string"


@pytest.fixture(scope="module")
def audit() -> dict[str, Any]:
    environment = {"CPU_NUM_DEVICES": "8"}
    return run_json("suites.xla.mesh_programs", "audited", environment=environment, timeout=570)


@pytest.mark.fresh_process
@planted("X14", "an Engram weight without an annotation")
def test_every_parameter_is_annotated(row, audit: dict[str, Any]) -> None:
    receipt = audit["receipt"]
    row.count(
        "sharding/everything-on/unannotated", len(audit["after"]), expected=0,
        seen=min(audit["before"], receipt["cut"], audit["states"]), rule="X14",
        evidence=[*audit["after"], f"before: {audit['before']}", f"receipt {receipt}"],
    )  # fmt: skip
    assert audit["planted"] == ["blocks.0.block.engram.mix"], "what surgery replaced has none, and is found"
    assert "1 parameters without an annotation: blocks.0.block.engram.mix" in audit["refusal"]


@pytest.mark.fresh_process
def test_fingerprint_covers_the_annotations(row, audit: dict[str, Any]) -> None:
    assert audit["receipt"] == audit["again"]
    row.exact(
        "sharding/everything-on/fingerprint", audit["receipt"]["fingerprint"], "hash",
        seen=audit["receipt"]["cut"], rule="X14", evidence=[f"receipt {audit['receipt']}"],
    )  # fmt: skip


@pytest.mark.fresh_process
@planted("X14", "an all_reduce whose error is swallowed")
@planted("X14", "an all_reduce that SPMD leaves out")
def test_metrics_are_proved_to_be_global(row, audit: dict[str, Any]) -> None:
    found = audit["reductions"]
    devices, refused = found["devices"], found["refusals"]
    row.bound(
        "sharding/metrics/sum_over_devices", found["sum"], "sum", expected=float(sum(range(devices))),
        seen=devices - 1, rule="X14", evidence=[f"{name}: {words}" for name, words in refused.items()],
    )  # fmt: skip
    local = f"the reduction covered 1 of {devices} parts"
    assert local in refused["swallowed"]
    assert local in refused["stock"], (
        "xm.all_reduce reduces under SPMD now: document it in launch/xla/sharding.py"
    )
    assert "the metrics were not reduced: the other hosts are gone" in refused["raised"]


@pytest.mark.fresh_process
def test_missing_memory_reading_under_spmd_raises(row, audit: dict[str, Any]) -> None:
    readings = audit["memory"]
    loud = [VIRTUAL in readings["SPMD:0"], PHYSICAL in readings["physical"]]
    loud += [] if readings["has_binding"] else ["has no _xla_runtime_memory_info" in readings["binding"]]
    row.count(
        "sharding/memory/loud_refusals", sum(loud), expected=len(loud), seen=loud, rule="X12",
        evidence=[f"{name}: {words}" for name, words in readings.items()],
    )  # fmt: skip


@planted("X12", "zero returned silently")
def test_zero_memory_reading_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = {"TPU:0": {"bytes_used": 7, "bytes_limit": 9}, "TPU:1": {"bytes_used": 0, "bytes_limit": 9}}
    monkeypatch.setattr(torch_xla._XLAC, tpu_memory.BINDING, readings.__getitem__, raising=False)
    assert tpu_memory.chip_memory("TPU:0") == readings["TPU:0"]
    with pytest.raises(tpu_memory.MemoryReadingError, match="TPU:1: the runtime returned"):
        tpu_memory.chip_memory("TPU:1")


@pytest.mark.parametrize("feature", [*FEATURES, *VARIANTS])
def test_sharding_plan_covers_every_parameter(feature: str) -> None:
    changes = (FEATURES | VARIANTS)[feature]
    for name in ("nam12", "nam52"):
        model = build(preset(name, "narrow", **{"depth": 12, **changes}))
        plan = sharding.plan(model)
        assert {path: p.ndim for path, p in model.named_parameters()} == {p: len(s) for p, s in plan.items()}
    assert any("expert" in spec for spec in plan.values())


@planted("X14", "a parameter that no line of the plan names")
def test_parameter_missing_in_the_plan_is_refused() -> None:
    model = build(everything_on())
    sharding.plan(model)
    model.blocks[0].side_door = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(sharding.ShardingError, match=r"blocks\.0\.side_door .* no line for 'side_door'"):
        sharding.plan(model)
