"""contract.toml as typed records: read once, checked, applied before the first compile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
PATH = Path(__file__).resolve().parent / "contract.toml"


class ContractError(ValueError):
    """contract.toml is invalid, or the process violates it. The message is one line."""


@dataclass(frozen=True)
class DisablePoint:
    """Code to hide from Dynamo: active under the named compile policies, for the named block letters."""

    name: str
    letters: str
    policies: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Contract:
    """The whole contract. `dynamo` maps a torch._dynamo.config name to its value.

    Environment variables: `variables` for every training process, `rank_variables` for ranks only, `refused_variables`
    for none; `cache_folders` maps the variable of a cache directory to its default folder's name; `reasons` has the
    reason for every variable.
    """

    path: Path
    dynamo: dict[str, Any]
    dynamic_dim: int
    warmup_minimum: int
    recompiles_after_warmup: int
    default_policy: str
    disable_points: tuple[DisablePoint, ...]
    combine_dtype: str
    deterministic_steps: int
    recompile_budget_steps: int
    variables: dict[str, str]
    rank_variables: dict[str, str]
    refused_variables: tuple[str, ...]
    cache_folders: dict[str, str]
    unusable_cache: Literal["refuse", "private"]
    minimum_free_bytes: int
    reasons: dict[str, str]

    def disabled_letters(self, policy: str) -> str:
        """Block letters that run outside Dynamo under `policy`, each by a declared disable point."""
        return "".join(p.letters for p in self.disable_points if policy in p.policies)


def read(path: Path = PATH) -> dict[str, Any]:
    """The tables of a contract file. Raises ContractError with one line if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise _broken(path, f"cannot be read ({error.strerror})") from None
    except tomllib.TOMLDecodeError as error:
        raise _broken(path, f"not TOML ({error})") from None


def _broken(path: Path, why: str) -> ContractError:
    return ContractError(f"{path.name}: {why}; restore it: git checkout launch/{path.name}")


def section(name: str, build: Callable[[Any], T], path: Path = PATH) -> T:
    """Return `build` of the table `name`. Raises ContractError, one line, if the table is invalid."""
    try:
        return build(read(path)[name])
    except (KeyError, TypeError, AttributeError) as error:
        raise _broken(path, f"[{name}] is missing or misshapen ({error})") from None


def load(path: Path = PATH) -> Contract:
    """Read and check a contract file. Raises ContractError with one line on any error."""
    raw = read(path)
    try:
        environment, caches = raw["environment"], raw["caches"]
        if caches["unusable"] not in ("refuse", "private"):
            raise ContractError(f"{path.name}: caches.unusable is neither refuse nor private")
        tables = environment["always"], environment["rank"], environment["refused"], caches["directory"]
        return Contract(
            path=path,
            dynamo={name: line["value"] for name, line in raw["dynamo"].items() if line["reason"]},
            dynamic_dim=raw["dynamic_axis"]["dim"],
            warmup_minimum=raw["dynamic_axis"]["warmup_minimum"],
            recompiles_after_warmup=raw["recompiles"]["after_warmup"],
            default_policy=raw["policy"]["default"],
            disable_points=tuple(
                DisablePoint(**{**point, "policies": tuple(point["policies"])})
                for point in raw["disable_point"]
            ),
            combine_dtype=raw["moe"]["combine_dtype"],
            deterministic_steps=raw["step"]["deterministic_steps"],
            recompile_budget_steps=raw["step"]["recompile_budget_steps"],
            variables={name: line["value"] for name, line in environment["always"].items()},
            rank_variables={name: line["value"] for name, line in environment["rank"].items()},
            refused_variables=tuple(environment["refused"]),
            cache_folders={name: line["folder"] for name, line in caches["directory"].items()},
            unusable_cache=caches["unusable"],
            minimum_free_bytes=caches["minimum_free_bytes"],
            reasons={name: line["reason"] for table in tables for name, line in table.items()},
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise _broken(path, f"field {error} is missing or misshapen") from None


def apply_dynamo(contract: Contract) -> None:
    """Set the contract's torch._dynamo.config values, before anything compiles.

    Raises ContractError if this torch does not have an option.
    """
    import torch._dynamo

    for name, value in contract.dynamo.items():
        if not hasattr(torch._dynamo.config, name):
            raise ContractError(
                f"torch {torch.__version__} has no torch._dynamo.config.{name}: the contract cannot be obeyed"
            )
        setattr(torch._dynamo.config, name, value)
