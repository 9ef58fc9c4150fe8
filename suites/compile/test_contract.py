"""The contract's effect on the compiler: six Dynamo options at the first backend call, declared disable points only.

Rules C1 (six options before the first compile), C7 (each disable point declared with a reason).
"""

from __future__ import annotations

import pytest

from bumpgate.plugin.instruments import read_dynamo_config
from launch.contract import load
from launch.policies import POLICIES, apply
from model import preset
from suites.support.hybrids import build, token_batch, watched_hybrid
from suites.support.instruments import disabled_functions
from suites.support.lanes import Lane, lanes


@lanes("cpu", "h200")
def test_dynamo_options_at_first_backend_call(lane: Lane, row, canaries) -> None:
    canaries("graphs")
    contract = load()
    met: list[dict[str, object]] = []
    with watched_hybrid("nam12", "eager", device=lane.device) as hybrid:
        inner = hybrid.watch.backend("eager")

        def reading(graph, inputs):
            met.append(read_dynamo_config(contract.dynamo))
            return inner(graph, inputs)

        ids = token_batch(hybrid.config, 2, device=lane.device)
        apply(hybrid.model, "regional", contract, reading)(ids).backward()
        calls = hybrid.report().calls
    first = met[0] if met else {}
    row.exact(
        "compile/contract/dynamo_lines_at_first_compile",
        ", ".join(f"{name}={value}" for name, value in sorted(first.items())), "config", rule="C1",
        seen=calls,
    )  # fmt: skip
    stale = [name for name, value in contract.dynamo.items() if any(seen.get(name) != value for seen in met)]
    row.count("compile/contract/dynamo_lines_not_held", stale, expected=0, rule="C1", seen=met)


@lanes("cpu", "h200")
@pytest.mark.parametrize("policy", POLICIES)
def test_model_has_only_declared_disable_points(lane: Lane, policy: str, row) -> None:
    contract = load()
    model = build(preset("nam56r"), lane.device)
    apply(model, policy, contract, "eager")
    letters = contract.disabled_letters(policy)
    kinds = zip(model.config.letters, model.blocks)
    declared = {
        f"{type(b).__module__}.{type(b).__qualname__}.forward" for letter, b in kinds if letter in letters
    }
    found = disabled_functions(model)
    row.count(
        f"compile/nam56r-{policy}/undeclared_disable_points",
        len(found ^ declared),
        expected=0,
        rule="C7",
        seen=list(model.modules()),
        evidence=[f"undeclared: {name}" for name in sorted(found - declared)]
        + [f"declared but not live: {name}" for name in sorted(declared - found)],
    )
