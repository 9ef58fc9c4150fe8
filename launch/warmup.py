"""Whether a run compiles in an explicit warm-up or in its first steps (rule C30): contract.toml's [warmup]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.contract import PATH, ContractError, section

MONITORING = "TORCH_NCCL_ENABLE_MONITORING"


@dataclass(frozen=True)
class Start:
    """What decides. device: the torch device type. regional, moe, fsdp, compiled: the run's. asked: the user's word."""

    device: str
    regional: bool
    moe: bool
    fsdp: bool = False
    compiled: bool = True
    asked: bool = True


@dataclass(frozen=True)
class WarmUp:
    """[warmup] of the contract. skip: name -> the values of Start that all hold where it applies, in order.

    monitoring: NCCL's variable for the groups that are made after the warm-up.
    """

    skip: Mapping[str, Mapping[str, Any]]
    monitoring: str

    def skipped(self, start: Start) -> str:
        """The name of the first table that skips the warm-up, "" where there is one."""
        values = asdict(start)
        fits = (
            n for n, when in self.skip.items() if all(values[field] == want for field, want in when.items())
        )
        return next(fits, "")


def load_warmup(path: Path = PATH) -> WarmUp:
    """Raises ContractError, one line, where a table is misshapen, names no field of Start, or asks for nothing."""

    def build(table: dict) -> WarmUp:
        skip = {name: line["when"] for name, line in table["skip"].items() if line["reason"]}
        return WarmUp(skip, table["monitoring"]["value"])

    warmup = section("warmup", build, path)
    for name, when in warmup.skip.items():
        if not when or set(when) - set(Start.__dataclass_fields__):
            raise ContractError(f"{path.name}: [warmup.skip.{name}]: `when` names no field of a start")
    return warmup
