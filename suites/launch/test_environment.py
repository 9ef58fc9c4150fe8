"""A launcher exports the contract's environment before Python starts, and rejects violations.

Rules C17, C21, C22, C23, C24, C29, C32. `pytest --launcher "command"` judges any other launcher by the same rows.
"""

from __future__ import annotations

import ast
import importlib.util
import mmap
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from bumpgate.plugin.instruments import DynamoWatch, dynamo_config, reset_dynamo
from launch import contract as contracts
from launch.contract import ContractError, load
from launch.environment import check, child_environment
from launch.retry import load_retry
from launch.warmup import load_warmup
from suites.launch.conftest import Checkout, Launcher, known
from suites.launch.trainers import smoke_trainer
from suites.support.child import ROOT
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted, report_fault

# Any free port: a gate runs this test on both sides at once.
RANK = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
TABLES = contracts.read()["environment"]
REFUSED = {
    "TORCHDYNAMO_DISABLE",
    "TORCHDYNAMO_SUPPRESS_ERRORS",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
    "TORCH_COMPILE_DISABLE",
    "TORCH_COMPILE_FORCE_DISABLE_CACHES",
    "TORCH_COMPILE_OVERRIDE_BACKENDS",
    "TORCH_COMPILE_OVERRIDE_DYNAMO_CONFIGS",
    "TORCH_COMPILE_OVERRIDE_INDUCTOR_CONFIGS",
}


def violations(file: Path) -> dict[str, tuple[str, dict[str, str]]]:
    """Return case -> the variable that the error must name, and the planted environment. `file` is not a directory."""
    cases = {}
    for name, line in TABLES["always"].items():
        cases[f"{name} flipped"] = name, {name: str(1 - int(line["value"]))}
    for name, line in TABLES["rank"].items():
        cases[f"{name} alone"] = name, {name: line["value"]}
        cases[f"{name} differs"] = name, {**RANK, name: "600"}
    for name, line in TABLES["refused"].items():
        cases[name] = name, {name: line["planted"]}
    for name in load().cache_folders:
        # /proc is a directory in which no user can create a file; mode bits would not stop root.
        for place in (str(file), str(file.with_name("missing")), "/proc", ""):
            cases[f"{name}={place}"] = name, {name: place}
    return cases


def rule_of(variable: str) -> str:
    """Return the rule that a wrong value of this variable breaks."""
    words = {"CACHE": "C17", "AUTOTUNE": "C24", "SUPPRESS": "C22", "OVERRIDE": "C1", "DISABLE": "C32"}
    found = (rule for word, rule in words.items() if word in variable)
    return "C23" if variable in TABLES["rank"] else next(found)


def refusals(launcher: Launcher, cases: Mapping[str, tuple[str, dict[str, str]]]) -> dict[str, str]:
    """Return case -> the last line, if rejected per the rule: exit 3, its variable named, no device initialized."""
    found = {}
    for case, (variable, given) in cases.items():
        run = launcher(given)
        if run.code == 3 and variable in run.line and not any(one["device"] for one in run.trained):
            found[case] = run.line
    return found


def exported(environment: Mapping[str, str], rank: bool) -> list[str]:
    """Return what a training process's environment lacks or has in excess, as lines."""
    expected = {name: line["value"] for name, line in TABLES["always"].items()}
    expected |= {name: line["value"] if rank else None for name, line in TABLES["rank"].items()}
    lines = [f"{n}={environment.get(n)}" for n, value in expected.items() if environment.get(n) != value]
    folders = ((n, environment.get(n)) for n in load().cache_folders)
    return lines + [
        f"{n} names no directory" for n, place in folders if not place or not Path(place).is_dir()
    ]


@lanes("cpu", "h200")
def test_launcher_refuses_every_violation(
    lane: Lane, launcher: Launcher, tmp_path: Path, row, record_property, request
) -> None:
    (file := tmp_path / "file").touch()
    cases = violations(file)
    refused = refusals(launcher, cases)
    by_rule: dict[str, list[str]] = {}
    for case, (variable, _) in cases.items():
        by_rule.setdefault(rule_of(variable), []).append(case)
    for rule, own in by_rule.items():
        name = f"launch/environment-{lane.name}-{rule}/violations_refused"
        passed = sorted(set(own) - refused.keys())
        found = len(own) - len(passed)
        row.count(name, found, expected=len(own), seen=own, rule=rule, evidence=passed)
        for case in own:
            report_fault(record_property, rule, case.replace(str(tmp_path), "..."), name)
    assert len(set(refused.values())) == len(refused), "each violation has its own line"
    if not request.config.option.launcher:
        run = launcher({"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "NO_COLOR": "1"})
        assert len(run.err.splitlines()) == 1
        assert not run.trained, "torch itself was imported before the refusal"


@lanes("cpu", "h200")
@pytest.mark.parametrize("rank", [False, True], ids=["alone", "rank"])
def test_environment_is_set_before_python_starts(lane: Lane, launcher: Launcher, rank: bool) -> None:
    """The variables of ranks are set iff LOCAL_RANK is, in every process that imported torch; there is one."""
    run = launcher(RANK if rank else {})
    assert run.code == 0, run.err
    assert run.trained
    assert [line for witness in run.trained for line in exported(witness["environment"], rank)] == []


@lanes("cpu")
def test_faulty_launchers_are_detected(lane: Lane, tmp_path: Path) -> None:
    """One that checks nothing, one that rejects everything in the same words, one that exports in Python."""
    (file := tmp_path / "file").touch()
    cases = dict(list(violations(file).items())[:3])
    for name, program in (("careless", "pass"), ("sulky", "import os; print('refused'); os._exit(3)")):
        assert refusals(Launcher([sys.executable, "-c", program], tmp_path / name), cases) == {}
    late = "import os; os.environ['TORCHINDUCTOR_AUTOTUNE_IN_SUBPROC'] = '1'; import torch"
    witness = Launcher([sys.executable, "-c", late], tmp_path / "late")().trained[0]["environment"]
    assert len(exported(witness, rank=False)) == 8
    assert "TORCHINDUCTOR_AUTOTUNE_IN_SUBPROC=None" in exported(witness, rank=False)


def mentioned(names: set[str]) -> set[str]:
    """Return which of the names occur in the installed torch: its Python, its headers, its libraries."""
    home = Path(importlib.util.find_spec("torch").origin).parent
    found = set()
    # With links: an installation may link its folder of libraries.
    paths = (Path(folder, name) for folder, _, names in os.walk(home, followlinks=True) for name in names)
    for path in (p for p in paths if p.suffix in (".py", ".hpp", ".so") and p.stat().st_size):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            found |= {name for name in names - found if text.find(name.encode()) >= 0}
    return found


@lanes("cpu", "h200")
def test_torch_reads_exactly_the_exported_variables(lane: Lane) -> None:
    read = {n for kind in ("always", "rank", "refused") for n in TABLES[kind]} | set(load().cache_folders)
    unread = {n for n, line in TABLES["rank"].items() if not line.get("read_by_torch", True)}
    assert unread == {"TORCH_DISTRIBUTED_DEFAULT_TIMEOUT"}
    unread |= {n for n, line in TABLES["refused"].items() if not known(line)}
    either = {n for n, line in TABLES["rank"].items() if not known(line)}  # an older torch may mention it
    assert mentioned(read | set(TABLES["inert"])) - either == read - unread - either


@lanes("cpu")
def test_child_environment_overrides_nothing(lane: Lane) -> None:
    contract = load()
    assert set(contract.refused_variables) == REFUSED, "the other tests plant what the contract names"
    given = {"HOME": "/h", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TRITON_CACHE_DIR": "/t"}
    child = child_environment(contract, given)
    assert given.items() <= child.items()
    assert not set(contract.rank_variables) & set(child)
    assert child_environment(contract, child) == child
    rank = child_environment(contract, {**given, "LOCAL_RANK": "0"})
    assert contract.rank_variables.items() <= rank.items()


@lanes("cpu")
@planted("C29", "one value of the contract edited")
def test_edited_contract_is_refused_until_reviewed(lane: Lane, checkout: Checkout, row) -> None:
    check(load(checkout.contract))
    checkout.edit("minimum_free_bytes = 1_073_741_824", "minimum_free_bytes = 1_073_741_823")
    edited = r"^contract.toml: sha256 \w{12} is not the reviewed \w{12}; .*sum"
    with pytest.raises(ContractError, match=edited):
        check(load(checkout.contract))
    run = checkout.launcher()()
    assert (run.code, len(run.err.splitlines()), run.trained) == (3, 1, [])
    about = {"expected": 3, "seen": [run.line], "rule": "C29"}
    row.bound("launch/contract/exit_code_when_edited", run.code, "exit code", **about)
    checkout.lock()
    check(load(checkout.contract))
    for damage in (lambda path: path.write_text(""), Path.unlink):
        damage(checkout.contract.with_suffix(".lock"))
        with pytest.raises(ContractError, match=r"^contract.lock: no pinned sha256; after review: sha256sum"):
            check(load(checkout.contract))


SKIPS_XLA, NO_FIELD = 'when = { device = "xla" }', r"\[warmup.skip.xla\]: `when` names no field"
MISSHAPEN, ALWAYS = "field .* is missing or misshapen; restore it: git", '[environment]\nalways = "x"\n'


@lanes("cpu")
@pytest.mark.parametrize(
    ("read", "old", "new", "words"),
    [
        (load, 'unusable = "refuse"', 'unusable = "ignore"', "caches.unusable is neither"),
        (load, r"\[\[disable_point\]\]", 'disable_point = ["attention"]\n[[unused]]', MISSHAPEN),
        (load, r"\[environment\.always.*(?=\[environment\.rank\.TORCH_NCCL_ENABLE)", ALWAYS, MISSHAPEN),
        (load_retry, r"error\.bootstrap\]", "error.x]", r"\[retry.error.x\] is no family of bumpgate/logs"),
        (load_retry, r"error\.bootstrap\]", "error.graph_break]", "is no family of .* that alerts"),
        (load_retry, r"\[retry\.times\]", "[retry.often]", r"\[retry\] is missing or misshapen"),
        (load_retry, 'value = "cuda"', 'value = "x"', "lazy_groups or skip_barrier has an unknown value"),
        (load_warmup, SKIPS_XLA, "when = { }", NO_FIELD),
        (load_warmup, SKIPS_XLA, 'when = { chip = "v6e" }', NO_FIELD),
        (
            load_warmup,
            r"\[warmup\.monitoring\]",
            "[warmup.x]",
            r"\[warmup\] is .* misshapen \('monitoring'\)",
        ),
    ],
)
def test_invalid_table_of_the_contract_is_refused(
    lane: Lane, read: Callable[[Path], object], old: str, new: str, words: str, tmp_path: Path
) -> None:
    text, count = re.subn(old, new, contracts.PATH.read_text(), flags=re.DOTALL)
    assert count == 1
    (path := tmp_path / "contract.toml").write_text(text)
    with pytest.raises(ContractError, match=rf"^contract.toml: [^\n]*{words}"):
        read(path)


@lanes("cpu")
@planted("C21", "a reset among the steps")
@planted("C32", "NO_COMPILE in the environment")
def test_run_never_resets_the_compiler(lane: Lane, restored_dynamo, monkeypatch, row, canaries) -> None:
    """Steps after the warm-up compile nothing; with a reset among them they would. No variable disables compilation."""
    canaries("graphs")
    for name in ("NO_COMPILE", "TORCH_NO_COMPILE", "BUMPGATE_NO_COMPILE"):
        monkeypatch.setenv(name, "1")
    with DynamoWatch() as watch:
        run = smoke_trainer(6, policy="regional", backend=watch.backend("eager"))
        graphs = []
        for until in (2, 4, 5, 6):
            if until == 5:
                torch.compiler.reset()
                run.programs.allowed *= 2  # rule C27 would stop it: the batch axis is not marked again
            run.run(until, allow_synthetic="smoke")
            graphs.append(watch.refresh().unique_graphs)
    assert graphs[0] > 0, "NO_COMPILE was honoured"
    assert graphs[0] == graphs[1] < graphs[2] == graphs[3]
    about = {"expected": 0, "seen": graphs[0], "rule": "C21", "instruments": ("graphs",)}
    row.count("launch/train-regional/graphs_after_the_first_steps", graphs[1] - graphs[0], **about)


@lanes("cpu")
@planted("C22", "suppress_errors set globally")
def test_backend_fault_stops_the_run(lane: Lane, restored_dynamo) -> None:
    def broken(graph, inputs):
        raise ArithmeticError("planted backend fault")

    def steps() -> int:
        run = smoke_trainer(6, policy="regional", backend=broken)
        return run.run(1, allow_synthetic="smoke")["step"]

    with pytest.raises(RuntimeError, match="planted backend fault"):
        steps()
    reset_dynamo()
    with dynamo_config({"suppress_errors": True}):
        assert steps() == 1, "suppressed, the fault is not seen: so the test above can fail"


def sites(tree: ast.AST) -> tuple[list[int], list[int], list[int]]:
    """Return three lists of lines: they reset the compiler, silence or disable it, or silence it without `if`."""
    resets, silenced, guarded = [], [], set()
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Assign, ast.ImportFrom)) else ""
        if re.match(r"(torch\.)?(_dynamo|compiler)\.reset\(", text) or (
            isinstance(node, ast.ImportFrom)
            and re.match(r"from torch.(_dynamo|compiler) import .*\breset\b", text)
        ):
            resets.append(node.lineno)
        if isinstance(node, ast.Assign) and re.match(r".*config\.(suppress_errors|disable) = ", text):
            silenced.append(node.lineno)
        if isinstance(node, ast.Call) and re.search(
            r"(setattr|patch)\(.*(suppress_errors|'disable'|disable=)", text
        ):
            silenced.append(node.lineno)
        if isinstance(node, ast.If):
            guarded |= {inner.lineno for inner in ast.walk(node) if hasattr(inner, "lineno")}
    return resets, silenced, [line for line in silenced if line not in guarded]


def product_files() -> list[Path]:
    """Return every source file of launch, model and kernels."""
    files = [path for room in ("launch", "model", "kernels") for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 50
    return files


@lanes("cpu")
def test_product_has_one_reset_and_guarded_suppressions(lane: Lane) -> None:
    found = {str(path.relative_to(ROOT)): sites(ast.parse(path.read_text())) for path in product_files()}
    assert {name: len(resets) for name, (resets, _, _) in found.items() if resets} == {"launch/train.py": 1}
    assert sum(len(silenced) for _, silenced, _ in found.values()) <= 2
    assert not any(bare for _, _, bare in found.values())
    assert not {"suppress_errors", "disable"} & set(load().dynamo), "the contract would set it for every run"
    careless = """
import torch
torch._dynamo.reset(); torch.compiler.reset()
from torch._dynamo import reset
if off:
    torch._dynamo.config.suppress_errors = True
torch._dynamo.config.disable = True
setattr(torch._dynamo.config, 'suppress_errors', True)
with torch._dynamo.config.patch(suppress_errors=True): pass
"""
    assert tuple(map(len, sites(ast.parse(careless)))) == (3, 4, 3)


@lanes("cpu")
@planted("C32", "a product file that reads NO_COMPILE")
def test_no_switch_disables_compilation(lane: Lane) -> None:
    """Rule C32: the word occurs in no product file; the run above has it in its environment and still compiles."""
    pattern = re.compile(r"no_?compile|(skip|disable)_?compile", re.IGNORECASE)
    assert pattern.search("if os.environ.get('NO_COMPILE'):")
    assert [str(path) for path in product_files() if pattern.search(path.read_text())] == []
