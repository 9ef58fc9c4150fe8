"""Decide whether a run compiles in an explicit warm-up or in its first steps (rule C30): [warmup] in contract.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.contract import PATH, ContractError, section

MONITORING = "TORCH_NCCL_ENABLE_MONITORING"


@dataclass(frozen=True)
class Start:
    """Inputs of the decision.

    device: torch device type. regional, compiled: of the compile policy. moe: whether the model has experts. fsdp:
    whether its weights are sharded. requested: whether the user requested the warm-up.
    """

    device: str
    regional: bool
    moe: bool
    fsdp: bool = False
    compiled: bool = True
    requested: bool = True


@dataclass(frozen=True)
class WarmUp:
    """[warmup] of the contract. skip: name -> the values of Start that must all match, in order.

    monitoring: NCCL's variable for the groups that are created after the warm-up.
    """

    skip: Mapping[str, Mapping[str, Any]]
    monitoring: str

    def skipped(self, start: Start) -> str:
        """Return the name of the first table that skips the warm-up, "" if the warm-up runs."""
        given = asdict(start).items()
        return next((name for name, when in self.skip.items() if when.items() <= given), "")


def load_warmup(path: Path = PATH) -> WarmUp:
    """Load [warmup]. Raises ContractError, one line, on a table that is malformed, empty, or has an unknown field."""

    def build(table: dict) -> WarmUp:
        skip = {name: line["when"] for name, line in table["skip"].items() if line["reason"]}
        return WarmUp(skip, table["monitoring"]["value"])

    warmup = section("warmup", build, path)
    for name, when in warmup.skip.items():
        if not when or set(when) - set(Start.__dataclass_fields__):
            raise ContractError(f"{path.name}: [warmup.skip.{name}]: `when` names no field of a start")
    return warmup
