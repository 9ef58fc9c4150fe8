"""Every knob that the sources name, tested for its effect: effective, inert or absent in this torch.

Rules C23, C24, and section 4's names. The variables that the contract requires are in test_environment.py; here are the
names that recipes set in addition, and the threads that an assigned option reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bumpgate.process.child import side_by_side
from launch import contract as contracts
from launch.contract import load
from suites.launch.conftest import known
from suites.launch.knobs import ABSENT
from suites.support.child import run_json
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

pytestmark = [lanes("cpu", "h200"), pytest.mark.usefixtures("lane")]

TABLES = contracts.read()["environment"]
# Seen on 2.13.0, 2.14.1 and 2.15.0, and not on 2.11.0; 2.12 was not tested.
CONFIGURATION_OF_ONE_THREAD = "torch>=2.12,<2.16"
INDUCTOR, DYNAMO = "torch._inductor.config", "torch._dynamo.config"
# Variable -> its planted value, and the field that it should change; "" if suites.launch.knobs probes something else.
VARIABLES = {
    **{name: (str(1 - int(line["value"])), line["shows"]) for name, line in TABLES["always"].items()},
    **{name: (line["planted"], line.get("shows", "")) for name, line in TABLES["refused"].items()},
    **{name: ("1", line["shows"]) for name, line in TABLES["inert"].items()},
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": ("ATEN,TRITON", f"{INDUCTOR}.max_autotune_gemm_backends"),
    "TORCHINDUCTOR_CUDAGRAPHS": ("1", f"{INDUCTOR}.triton.cudagraphs"),
    "TORCHINDUCTOR_COMPILE_THREADS": ("3", f"{INDUCTOR}.compile_threads"),
    "TORCH_COMPILE_CACHE_KEY_TAG": ("x", "torch.compiler.config.cache_key_tag"),
    "TORCH_COMPILE_JOB_ID": ("x", "torch.compiler.config.job_id"),
    "TORCH_CACHING_PRECOMPILE": ("1", f"{DYNAMO}.caching_precompile"),
    "TORCH_LOGS": ("recompiles,graph_breaks,guards", ""),
    "TORCH_TRACE": ("{directory}", ""),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", ""),
}
# Options that the sources set by name. An alias changes the option that it aliases.
LINES = [
    *(f"{DYNAMO}.{name}" for name in load().dynamo),
    f"{DYNAMO}.cache_size_limit",
    f"{DYNAMO}.accumulated_cache_size_limit",
    f"{DYNAMO}.error_on_graph_break",
    f"{INDUCTOR}.autotune_in_subproc",
    f"{INDUCTOR}.max_autotune_subproc_result_timeout_seconds",
]


def moves(name: str) -> str:
    """Return what a variable is expected to change: a field, the probe that compiles, or its own probe."""
    switches_off = name.endswith("_DISABLE") or name == "TORCH_COMPILE_OVERRIDE_BACKENDS"
    return "compiling" if switches_off else VARIABLES[name][1] or name


def groups() -> list[dict[str, str]]:
    """Group the planted variables so that no two of a group change the same thing: each effect has one cause."""
    found: list[dict[str, str]] = []
    for name in VARIABLES:
        group = next((g for g in found if moves(name) not in map(moves, g)), None)
        if group is None:
            found.append(group := {})
        group[name] = VARIABLES[name][0]
    return found


def look(environment: dict[str, str]) -> dict[str, Any]:
    """Run suites.launch.knobs in a new process, in the contract's environment updated with `environment`."""
    fields = sorted({kind for _, kind in VARIABLES.values() if kind} | set(LINES))
    environment = load().variables | environment
    return run_json("suites.launch.knobs", *fields, environment=environment, timeout=120)


def effect(name: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return effective, inert or absent, by the difference between two processes."""
    kind = VARIABLES[name][1]
    old, new = (one["fields"][kind] if kind else one["probes"][name] for one in (before, after))
    return "absent" if old == ABSENT else "inert" if old == new else "effective"


def unkept(fields: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield variables of the contract whose field has another value than the contract's line states.

    fields: under the contract. after: the field of each variable under its planted, forbidden value.
    """
    for kind in ("always", "refused", "inert"):
        for name, line in TABLES[kind].items():
            if "shows" not in line or not known(line):
                continue
            before, holds = fields[line["shows"]], line["holds"]
            right = {
                "always": (before, after[name]) == (holds, not holds),
                "refused": before in (False, "") and after[name] == holds,
                "inert": (before, after[name]) == (holds, holds),
            }
            if not right[kind]:
                yield name, f"{line['shows']} is {before} under the contract, {after[name]} without"


@pytest.fixture(scope="module")
def untouched() -> dict[str, Any]:
    return look({})


def test_every_variable_is_effective_inert_or_absent(lane: Lane, untouched, tmp_path: Path, row) -> None:
    planted = [
        {name: value.format(directory=tmp_path) for name, value in group.items()} for group in groups()
    ]
    effects, after = {}, {}
    for group, report in zip(planted, side_by_side(look, planted), strict=True):
        effects |= {name: effect(name, untouched, report) for name in group}
        after |= {name: report["fields"].get(VARIABLES[name][1]) for name in group}
    case = f"launch/knobs-{lane.name}"
    for kind in ("effective", "inert", "absent"):
        names = " ".join(sorted(name for name, found in effects.items() if found == kind))
        row.exact(f"{case}/{kind}_variables", names, "names", seen=effects, rule="C24", per_build=True)
    lines = TABLES["always"] | TABLES["refused"]
    expected = {name: "effective" if known(line) else "absent" for name, line in lines.items()}
    expected |= dict.fromkeys(TABLES["inert"], "inert")
    wrong = [
        f"{name} is {effects[name]}, the contract takes it for {claimed}"
        for name, claimed in expected.items()
        if effects[name] != claimed
    ]
    wrong += [f"{name}: {why}" for name, why in unkept(untouched["fields"], after)]
    row.count(f"{case}/variables_taken_for_another_kind", wrong, expected=0, seen=expected, rule="C24")


@planted("C24", "a variable without effect, a field that torch has not")
def test_variable_effect_is_a_difference_of_two_runs(untouched) -> None:
    """The same process twice shows none; a field that no torch has is absent and not inert."""
    assert {effect(name, untouched, untouched) for name in VARIABLES} <= {"inert", "absent"}
    name = "TORCHINDUCTOR_CUDAGRAPHS"
    without = {**untouched, "fields": {**untouched["fields"], VARIABLES[name][1]: ABSENT}}
    assert effect(name, without, without) == "absent"


def test_config_options_that_torch_has(lane: Lane, untouched, row) -> None:
    gone = [line for line in LINES if untouched["fields"][line] == ABSENT]
    about = {"seen": len(LINES) - len(gone), "rule": "C1", "per_build": True}
    row.exact(f"launch/knobs-{lane.name}/absent_lines", " ".join(gone), "names", **about)
    assert not [line for line in gone if line.split(".")[-1] in load().dynamo]


@pytest.fixture
def assigned(untouched) -> list[str]:
    """The options that this torch has: suites.launch.knobs has assigned each."""
    return [line for line in LINES if untouched["fields"][line] != ABSENT]


def test_config_options_lost_in_another_thread(lane: Lane, untouched, assigned, row) -> None:
    """How far an assignment reaches in this build; the next test compares torch with what a reader expects."""
    lost = len(set(assigned) & set(untouched["lost"]))
    about = {"seen": assigned, "rule": "C24", "per_build": True}
    row.count(f"launch/knobs-{lane.name}/lines_lost_in_another_thread", lost, **about)


def test_assigned_config_option_holds_in_every_thread(lane: Lane, untouched, assigned, row) -> None:
    """Defect present: a second thread reads the default of an option that was assigned before it started."""
    lost = sorted(set(untouched["lost"]) & set(assigned))
    row.defect(
        f"launch/knobs-{lane.name}/configuration_of_one_thread",
        bool(lost),
        known_in=CONFIGURATION_OF_ONE_THREAD,
        reason="an assigned configuration is a ContextVar of the assigning thread (torch/utils/_config_module.py): the "
        "pool that waits for an autotuning candidate reads max_autotune_subproc_result_timeout_seconds in its own "
        "thread, so that 60 s stay whatever is set",
        witness=len(assigned),
        rule="C24",
        evidence=[f"lost: {line}" for line in lost],
    )
