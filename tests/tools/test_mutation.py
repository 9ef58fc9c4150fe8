"""The mutation tester: its sample, the tests that it chooses, its outcomes on a small repository, and its table."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.affected import graph_of
from tests.support.project import PLUGINS
from tests.support.tree import ROOT
from tools.mutation import __main__ as command
from tools.mutation import sample, trial
from tools.mutation.__main__ import groups, main, work_of
from tools.mutation.report import merged, open_survivors, table
from tools.mutation.trial import (
    KILLED,
    SURVIVED,
    UNDECIDED,
    UNTESTED,
    PytestRun,
    Result,
    Trials,
    Work,
)

SOURCE = """from __future__ import annotations

def total(prices: list[int] | None, tax: int) -> int:
    if not prices:
        return 0
    while tax > 100:
        tax -= 1
    return sum(prices) + tax
"""
# Without the plugins that happen to be installed: `-n 0` needs xdist.
RUN = PytestRun(env_vars=PLUGINS)
GIT = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]
FILES = {
    "shop.py": SOURCE,
    "alone.py": "LIMIT = 3 + 4\n",
    "middle.py": "import shop\n",
    "test_far.py": "import middle\n\ndef test_tax():\n    assert middle.shop.total([1], 2) == 3\n",
    "test_near.py": "import shop\n\ndef test_empty():\n    assert shop.total([], 5) == 0\n",
    "test_red.py": "import shop\n\ndef test_red():\n    assert shop.total([1], 1) == 3\n",
}


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A small committed repository with passing tests near and far, a test that is always red, and an untested file."""
    root = tmp_path / "shop"
    root.mkdir()
    for name, text in FILES.items():
        (root / name).write_text(text)
    git = [*GIT, "-C", str(root)]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "Add a shop"]):
        subprocess.run([*git, *arguments], check=True)
    return root


def mutation(path: str, source: str, operator: str, line: int) -> sample.Mutation:
    """Return the mutation of a line by an operator."""
    return next(m for m in sample.mutations(path, source) if (m.operator, m.line) == (operator, line))


def test_sample_depends_on_seed_and_sources_only() -> None:
    sources = {"shop.py": SOURCE, "alone.py": FILES["alone.py"]}
    first = sample.sample(sources, 5, seed=1)
    assert first == sample.sample(dict(reversed(sources.items())), 5, seed=1)
    assert len(first) == len({(m.path, m.line, m.column) for m in first}) == 5
    assert {tuple(sample.sample(sources, 5, seed)) for seed in range(8)} != {tuple(first)}


def test_sample_has_no_equivalent_mutants() -> None:
    everything = sample.sample({"shop.py": SOURCE}, 1000, seed=3)
    assert all(not sample.equivalent(SOURCE, m.apply(SOURCE)) for m in everything)
    annotation = [m for m in sample.mutations("shop.py", SOURCE) if m.line == 3]
    assert annotation
    assert all(sample.equivalent(SOURCE, m.apply(SOURCE)) for m in annotation)


def test_sample_leaves_out_what_cosmic_ray_cannot_edit() -> None:
    source = "import os\n\ntry:\n    pass\nexcept (KeyError, os.error):\n    pass\n"
    found = [m for m in sample.mutations("shop.py", source) if m.operator == "ExceptionReplacer"]
    with pytest.raises(ValueError, match="does not apply"):
        found[-1].apply(source)
    assert found[-1] not in sample.sample({"shop.py": source}, 100, seed=1)


def test_mutation_refuses_a_file_that_has_changed() -> None:
    made = mutation("shop.py", SOURCE, "ReplaceBinaryOperator_Add_Sub", 8)
    assert "sum(prices) - tax" in made.apply(SOURCE)
    with pytest.raises(ValueError, match="does not apply to this version"):
        made.apply("x = 1\n")


def test_groups_share_a_number_by_size() -> None:
    assert sample.shares({"a": 100, "b": 300, "c": 1, "empty": 0}, 40) == {"a": 10, "b": 29, "c": 1}


def test_nearest_tests_come_first(shop: Path) -> None:
    tests = {name for name in FILES if name.startswith("test_")}
    assert trial.nearest(graph_of(shop), "shop.py", tests) == ["test_near.py", "test_red.py", "test_far.py"]


def test_tests_that_name_the_mutated_place_come_first() -> None:
    texts = {
        "tests/a/test_far.py": "assert totals([1])",
        "tests/a/test_total.py": "assert total([1])",
        "tests/shop/test_all.py": "import shop",
        "tests/shop/test_price.py": "import shop",
        "tests/shop/test_price_total.py": "assert total([1])",
    }
    ordered = trial.by_mention([*texts], texts, "shop/price.py", "total")
    assert [Path(f).stem for f in ordered] == [
        "test_price_total",
        "test_price",
        "test_all",
        "test_total",
        "test_far",
    ]
    assert trial.by_mention([*texts][:2], texts, "shop/price.py", "") == [*texts][:2], "nothing is named"


@pytest.mark.parametrize(
    ("operator", "line", "outcome", "killer"),
    [
        ("AddNot", 4, KILLED, "test_near.py"),
        ("ReplaceBinaryOperator_Add_Sub", 8, KILLED, "test_far.py"),
        ("ReplaceComparisonOperator_Gt_GtE", 6, SURVIVED, ""),
        ("ReplaceComparisonOperator_Gt_NotEq", 6, KILLED, "test_far.py"),  # never ends
    ],
)
def test_outcome_of_a_mutant(
    shop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operator: str,
    line: int,
    outcome: str,
    killer: str,
) -> None:
    monkeypatch.setattr(trial, "START_SECONDS", 4)
    monkeypatch.setattr(trial, "SLOWER", 1)
    (result,), clone = run(shop, tmp_path, mutation("shop.py", SOURCE, operator, line))
    assert (result.outcome, result.killer) == (outcome, killer)
    assert (clone / "shop.py").read_text() == SOURCE
    # The test that is red without the mutant is no witness.
    assert "test_red.py" not in result.digests


def test_failure_that_does_not_repeat_kills_no_mutant(shop: Path, tmp_path: Path) -> None:
    flaky = "from pathlib import Path\nimport shop\n\ndef test_flaky():\n    seen = Path('seen')\n"
    flaky += (
        "    count = int(seen.read_text()) if seen.exists() else 0\n    seen.write_text(str(count + 1))\n"
    )
    flaky += "    assert count != 1 and shop\n"  # passes without the mutant, fails once with it
    (shop / "test_near.py").write_text(flaky)
    subprocess.run([*GIT, "-C", str(shop), "commit", "-qam", "Add a flaky test"], check=True)
    survivor = mutation("shop.py", SOURCE, "ReplaceComparisonOperator_Gt_GtE", 6)
    (result,), clone = run(shop, tmp_path, survivor)
    assert (result.outcome, (clone / "seen").read_text()) == (SURVIVED, "3")


def test_child_processes_in_other_folders_import_the_mutant(shop: Path, tmp_path: Path) -> None:
    child = "import subprocess, sys\n\ndef test_child(tmp_path):\n    import shop\n"
    child += "    code = 'import shop; assert shop.total([1], 2) == 3'\n"
    child += "    subprocess.run([sys.executable, '-c', code], cwd=tmp_path, check=True)\n"
    (shop / "test_far.py").write_text(child)
    subprocess.run([*GIT, "-C", str(shop), "commit", "-qam", "Test total in a child process"], check=True)
    (result,), _ = run(shop, tmp_path, mutation("shop.py", SOURCE, "ReplaceBinaryOperator_Add_Sub", 8))
    assert (result.outcome, result.killer) == (KILLED, "test_far.py")


def test_file_that_another_worker_measures_is_postponed(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = mutation("shop.py", SOURCE, "ReplaceComparisonOperator_Gt_GtE", 6)
    trials, asked = Trials(shop, tmp_path, {}, 60, 1), []

    def unchanged(clone: Path, file: str, tests: PytestRun) -> tuple[int, float]:
        asked.append(file)
        return trial.TIMED_OUT, 60.0

    monkeypatch.setattr(trials, "unchanged", unchanged)
    with trials._lock_of(("test_near.py", ())):
        trials.run([Work(made, "shop", RUN, ["test_near.py", "test_far.py"])], lambda result: None)
    assert asked == ["test_far.py", "test_near.py"]


def test_mutant_without_a_test_is_untested(shop: Path, tmp_path: Path) -> None:
    made = mutation("alone.py", FILES["alone.py"], "ReplaceBinaryOperator_Add_Mul", 1)
    (result,), _ = run(shop, tmp_path, made)
    assert (result.outcome, result.diff) == (UNTESTED, "LIMIT = 3 + 4 => LIMIT = 3 * 4")


def test_mutant_is_undecided_if_time_ends(shop: Path, tmp_path: Path) -> None:
    survivor = mutation("shop.py", SOURCE, "ReplaceComparisonOperator_Gt_GtE", 6)
    (result,), _ = run(shop, tmp_path, survivor, budget=0.01)
    assert (result.outcome, result.left) == (UNDECIDED, 3)


def run(
    shop: Path, folder: Path, made: sample.Mutation, budget: float = 60, tests: list[str] | None = None
) -> tuple[list[Result], Path]:
    """Try one mutant in the small repository, first by `tests`; return the results and the clone."""
    graph = graph_of(shop)
    files = trial.nearest(graph, made.path, {name for name in FILES if name.startswith("test_")})
    results: list[Result] = []
    folder.mkdir(exist_ok=True)
    work = Work(made, "shop", RUN, files, tests or (), 1.0)
    Trials(shop, folder, graph, budget, 1).run([work], results.append)
    return results, folder / "clone0"


@pytest.mark.parametrize(
    ("tests", "killer"),
    [
        (["test_near.py::test_empty", "test_far.py::test_tax"], "test_far.py, test_near.py"),
        (["test_near.py::test_empty"], "test_far.py"),  # passes, so that the files decide
        (["test_red.py::test_red"], "test_far.py"),  # red without the mutant
        (["test_near.py::test_gone"], "test_far.py"),
    ],
)
def test_tests_that_execute_the_line_come_first(
    shop: Path, tmp_path: Path, tests: list[str], killer: str
) -> None:
    mutant = mutation("shop.py", SOURCE, "ReplaceBinaryOperator_Add_Sub", 8)
    (result,), _ = run(shop, tmp_path, mutant, tests=tests)
    assert (result.outcome, result.killer) == (KILLED, killer)
    assert result.valid(shop, mutant.apply(SOURCE))


def test_result_is_valid_until_source_or_tests_change(shop: Path, tmp_path: Path) -> None:
    made = mutation("shop.py", SOURCE, "ReplaceBinaryOperator_Add_Sub", 8)
    (result,), _ = run(shop, tmp_path, made)
    results = tmp_path / "mutation.jsonl"
    trial.append(results, result)
    with results.open("a") as f:
        f.write('{"name": "cut o')
    (loaded,) = trial.load(results)
    assert loaded == result
    assert loaded.valid(shop, made.apply(SOURCE))
    assert not loaded.valid(shop, SOURCE)
    (shop / "test_far.py").write_text("")
    assert not loaded.valid(shop, made.apply(SOURCE))


def test_undecided_mutant_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shop: Path, tmp_path: Path
) -> None:
    made = mutation("shop.py", SOURCE, "ReplaceBinaryOperator_Add_Sub", 8)
    digests = {"": trial.digest(made.apply(SOURCE))}
    diff = sample.changed_lines(SOURCE, made.apply(SOURCE))
    results = tmp_path / "mutation.jsonl"
    monkeypatch.setattr(command, "chosen", lambda root, options: [(made, "self")])
    monkeypatch.setattr(command, "work_of", lambda *_: Work(made, "self", PytestRun(), ["test_far.py"]))
    options = command.parser().parse_args(["--results", str(results), "--workers", "1"])
    trial.append(results, Result(made.name, "self", diff, UNDECIDED, "", 1.0, 3, digests))
    assert [r.outcome for r in command.run(shop, options)] == [KILLED]
    assert [r.outcome for r in command.run(shop, options)] == [KILLED], "the kept result"
    assert capsys.readouterr().out.count("killed") == 1


def made(outcome: str, number: int, group: str = "model") -> list[Result]:
    return [
        Result(f"a.py:{n}:0 AddNot", group, f"{outcome} {n} => ", outcome, "", 1.0, 0, {"": "0"})
        for n in range(number)
    ]


def test_score_leaves_out_equivalent_and_undecided_mutants() -> None:
    results = [*made(KILLED, 18), *made(SURVIVED, 3), *made(UNDECIDED, 2)]
    reasons = {("a.py", "survived 0 => "): "logs only"}
    page = table(results, reasons, "python -m tools.mutation")
    assert "| model | 23 | 18 | 2 | 0 | 2 | 1 | 90.0% (69.9% to 97.2%) |" in page
    assert "| a.py:0:0 AddNot | `survived 0 => ` | 0 | logs only |" in page
    assert [r.diff for r in open_survivors(results, reasons)] == ["survived 1 => ", "survived 2 => "]


def test_mutant_that_one_run_killed_is_killed() -> None:
    first = [*made(SURVIVED, 1, "h200"), *made(UNDECIDED, 1, "h200"), *made(KILLED, 1, "h200")]
    later = [replace(r, group="h200-speed", outcome=KILLED) for r in first[:1]]
    later += [replace(r, outcome=outcome) for r, outcome in zip(first[1:], (SURVIVED, UNDECIDED))]
    found = merged([*first, *later, *(replace(r, outcome=SURVIVED) for r in first[:1])])
    assert [(r.group, r.outcome) for r in found] == [("h200", KILLED), ("h200", SURVIVED), ("h200", KILLED)]


def test_command_lists_its_sample(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mutation", "--list", "--number", "3", "--group", "model"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("model     model/") and " => " in line for line in lines)


def test_survivors_of_a_run_are_tried_again_by_other_tests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["mutation", "--list", "--number", "3", "--seed", "5", "--group"]
    monkeypatch.setattr(sys, "argv", [*arguments, "h200"])
    assert main() == 0
    group, name, change = capsys.readouterr().out.splitlines()[1].split(maxsplit=2)
    operator, diff = change.split("  ", 1)
    for outcome in (SURVIVED, KILLED):
        trial.append(tmp_path / outcome, Result(f"{name} {operator}", group, diff, outcome, "", 1.0, 0))
        monkeypatch.setattr(
            sys, "argv", [*arguments, "h200-speed", "--survivors-of", str(tmp_path / outcome)]
        )
        assert main() == 0
        listed = capsys.readouterr().out.splitlines()
        assert listed == ([f"h200-speed {name} {change}"] if outcome == SURVIVED else [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--group", "modle"], "--group modle: not a group (expected model, "),
        (["--shard", "3/2"], "--shard 3/2: expected K/N with 1 <= K <= N"),
    ],
)
def test_bad_input_prints_one_line(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mutation", "--list", *arguments])
    with pytest.raises(SystemExit, match="4"):
        main()
    assert capsys.readouterr().err.startswith(words)


def test_every_python_file_of_the_product_is_in_one_group() -> None:
    """Otherwise a new package would never be mutated."""
    declared = groups(None) | groups(["xla"])  # h200 has the files of triton again
    files = [set(sample.read(ROOT, g["files"], g.get("without", ()))) for g in declared.values()]
    tracked = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "*.py"], capture_output=True, text=True
    ).stdout.splitlines()
    product = {path for path in tracked if path.split("/")[0] in ("model", "launch", "kernels", "bumpgate")}
    assert product - set().union(*files) == set()
    assert sum(map(len, files)) == len(set().union(*files))


def test_device_mutants_run_the_rows_of_their_op() -> None:
    made = sample.Mutation("kernels/attention/kernel.py", 1, 0, "AddNot", 0, "")
    work = work_of(ROOT, "h200", made, {})
    how = work.tests
    assert work.files[:2] == ["suites/kernels/test_model_shapes.py", "suites/kernels/test_attention.py"]
    assert how.arguments[:2] == ("-m", "h200")
    assert how.arguments[3].startswith("attention and (test_error or not test_model_shapes)")
    of_dsa = work_of(ROOT, "h200", replace(made, path="kernels/dsa_indexer/kernel_loss.py"), {})
    assert of_dsa.files == [f.replace("attention", "dsa_indexer") for f in work.files] + [
        "suites/kernels/test_dsa_loss.py"
    ]
    assert "h200" not in groups(None), "only a machine with the device can run it"
    assert list(groups(["h200"])) == ["h200"]


def test_device_mutants_are_refused_without_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shop: Path
) -> None:
    """Otherwise every one of them would read untested."""
    mutation = sample.mutations("shop.py", SOURCE)[0]
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    monkeypatch.setattr(command, "chosen", lambda root, options: [(mutation, "h200")])
    with pytest.raises(SystemExit, match="4"):
        command.run(shop, command.parser().parse_args(["--results", str(shop / "results.jsonl")]))
    assert capsys.readouterr().err == "group h200 needs an H200: choose others with --group\n"


def test_every_triton_kernel_is_in_a_group_of_the_interpreter() -> None:
    """The lane's CPU tests never run one, so that each mutant would survive."""
    for name, group in groups(None).items():
        if group["suites"] == "lane":
            sources = sample.read(ROOT, group["files"], group.get("without", ()))
            assert not [path for path, text in sources.items() if "@triton.jit" in text], name
