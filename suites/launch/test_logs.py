"""Log classification (rule C26): each wording has a line in the corpus, nothing alarming is dropped, ranks interleave.

The corpus is fixtures/logs; its NOTICE lists which lines were measured and which restate public reports.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from launch import contract
from launch.contract import ContractError
from launch.logs import ALERT, CLEAN, UNKNOWN, LogClass, classify, load_classes, read_lines
from launch.logs.__main__ import main
from launch.logs.classes import compile_pattern
from launch.logs.reader import LINE, MEMO, ZERO, _Reader
from model import preset
from suites.support.child import ROOT
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

FILES = {
    path.stem: [line for line in read_lines(path) if not line.startswith("# ")]
    for path in sorted((ROOT / "fixtures" / "logs").glob("*.log"))
}
CLASSES = load_classes()
NAMES = [c.name for c in CLASSES]
EITHER = "{recompile|cache_size}_limit"
HERE = "W0102 03:04:05.006000 7 torch/_dynamo/x.py:8] [0/0] "

# The classes that do not alert at once -> action, bound and companions, as reviewed.
NOT_AT_ONCE = {
    "autotune_candidate": (
        "correlate",
        None,
        ("cuda_out_of_memory", "collective_timeout", "device_assert", "compile_worker"),
    ),
    "graph_break": ("count", 13, ()),
    "recompile": ("count", 8, ()),
    "xla_compile": ("count", 2, ()),
    "triton_builtin": ("ignore", None, ()),
    "advice": ("ignore", None, ()),
}

# A line that is close to each class but does not belong to it.
NEAR = {
    "disk_full": "OSError: [Errno 13] Permission denied: 'no space left for names'",
    "autotune_candidate": "E0102 03:04:05.006000 7 x.py:8] Runtime error during benchmarking",
    "autotune_no_choice": "No choice to make: SingleProcess AUTOTUNE benchmarking takes 0.1 seconds",
    "accumulated_recompile_limit": HERE + "torch._dynamo hit config.recompile_limit (8)",
    "recompile_limit": "torch._dynamo.config.recompile_limit = 64",
    "scalar_break": HERE + "Graph break from `Tensor.tolist()`, consider setting:",
    "graph_break": "0 graph breaks in user code at step 5",
    "recompile": "V0102 03:04:05.006000 7 x.py:8] Compiling function step in train.py:5",
    "cache_bypass": "I0102 03:04:05.006000 7 x.py:8] FX Graph Cache hit for key abc",
    "cuda_out_of_memory": "CUDA memory 12.5 GiB allocated, 3.5 GiB free",
    "hbm_out_of_memory": "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 32.42M of 16.00M vmem.",
    "host_out_of_memory": "DefaultCPUAllocator: 12 blocks in use",
    "collective_timeout": "I0102 03:04:05.006000 7 x.cpp:8] Watchdog thread started, timeout 600000 ms",
    "watchdog_stuck": "I0102 03:04:05.006000 7 x.cpp:8] the watchdog is stuck to its interval of 4 seconds",
    "bootstrap": "curl: (7) Failed to connect to 127.0.0.1 port 80: Connection refused",
    "device_assert": "device-side checks are on",
    "non_finite": "step 3 loss nancy 0.1, infinite horizon, loss 2.5 info",
    "anomaly_mode": "Anomaly Detection is off",
    "triton_resources": "resources: shared memory 100 of 200",
    "compile_worker": "ProcessPool: 8 processes in the process pool",
    "kernel_wheel": "ModuleNotFoundError: No module named 'tritonclient_demo'",
    "rank_failed": "Sending batch 7 to process 3",
    "xla_compile": "Counter: CachedCompile",
    "triton_builtin": HERE + "Dynamo does not know how to trace the builtin `mylib.frob.` This function is",
    "advice": "UserWarning: optimizer.step() was never called",
}


def corpus() -> list[str]:
    return [line for lines in FILES.values() for line in lines]


def counted(lines: list[str], classes: tuple[LogClass, ...] = CLASSES) -> dict[str, dict[int | None, int]]:
    """Count records by class and rank; unknown ones under "unknown"."""
    report = classify(lines, classes)
    out = {f.log_class.name: dict(f.by_rank) for f in report.findings}
    return out | {"unknown": {None: report.unknown_count}}


def without(name: str, wording: str, instead: str = "") -> tuple[LogClass, ...]:
    """Return the contract with one wording of one class removed or replaced by `instead`."""
    old = next(c for c in CLASSES if c.name == name)
    assert any(wording in p for p in old.patterns), f"{name} has no wording {wording!r}"
    patterns = tuple(p.replace(wording, instead) if instead else p for p in old.patterns)
    kept = patterns if instead else tuple(p for p in old.patterns if wording not in p)
    return tuple(replace(c, patterns=kept) if c.name == name else c for c in CLASSES)


@lanes("cpu")
def test_log_corpus_has_no_unclassified_line(lane: Lane, row) -> None:
    reports = {name: classify(lines) for name, lines in FILES.items()}
    lines = sum(r.lines for r in reports.values())
    row(
        f"launch/logs-{lane.name}/unclassified_lines",
        sum(r.unknown_count for r in reports.values()),
        unit="count",
        witness=lines,
        rule="C26",
        expected=0,
        evidence=[f"{name}: {text}" for name, r in reports.items() for text in r.unknown],
    )
    seen = {f.log_class.name for r in reports.values() for f in r.findings}
    row(
        f"launch/logs-{lane.name}/classes_seen",
        len(seen),
        unit="count",
        witness=sum(f.count for r in reports.values() for f in r.findings),
        rule="C26",
        expected=len(CLASSES),
        evidence=[f"no line of {name}" for name in NAMES if name not in seen],
    )


@lanes("cpu")
def test_every_pattern_has_a_corpus_line(lane: Lane) -> None:
    lines = [line.translate(ZERO) for line in corpus()]
    missing = [
        (c.name, pattern)
        for c in CLASSES
        for pattern in c.patterns
        if not any(compile_pattern(pattern)[1].search(line) for line in lines)
    ]
    assert missing == []


@lanes("cpu")
def test_classes_alert_as_reviewed(lane: Lane) -> None:
    """The other tests of a class take its action and its bound from the contract."""
    stated = {c.name: (c.action, c.bound, c.companions) for c in CLASSES}
    assert stated == dict.fromkeys(NEAR, ("alert", None, ())) | NOT_AT_ONCE


@lanes("cpu")
@planted("C26", "a line that is close to a class")
@pytest.mark.parametrize("name", NAMES)
def test_near_miss_line_is_not_in_the_class(lane: Lane, name: str) -> None:
    assert set(NEAR) == set(NAMES)
    assert name not in counted([NEAR[name] + "\n"])


@lanes("cpu")
@planted("C26", "a wording dropped from its class")
@pytest.mark.parametrize(
    ("name", "wording", "instead", "old"),
    [
        ("recompile_limit", EITHER + " (*)", "recompile_limit (*)", "cache_size_limit (8)"),
        ("recompile_limit", EITHER + " (*)", "cache_size_limit (*)", "recompile_limit (3)"),
        ("accumulated_recompile_limit", EITHER, "recompile_limit", "accumulated_cache_size_limit"),
        ("graph_break", "Graph break: * from", "", "Graph break: setattr"),
        ("cache_bypass", "Bypassing autograd", "", "[WARNING]:Bypassing autograd cache"),
        ("autotune_candidate", "select_algorithm.py", "", "select_algorithm.py:1997"),
        ("compile_worker", "subprocess exited", "", "A compilation subprocess exited"),
        ("disk_full", "No space left", "", "No space left"),
    ],
)
def test_dropped_wording_is_detected(lane: Lane, name: str, wording: str, instead: str, old: str) -> None:
    """The mutant that the corpus exists for: a contract without the wording of one version of torch."""
    lines = [line for line in corpus() if old in line]
    assert lines
    assert sum(counted(lines)[name].values()) == len(lines)
    found = counted(lines, without(name, wording, instead))
    assert sum(found.get(name, {}).values()) < len(lines)


@lanes("cpu")
@planted("C26", "a line that belongs to no class")
@pytest.mark.parametrize(
    "line",
    [
        HERE + "an unknown text",
        "[2026-01-02 03:04:05,006] torch._inductor.x: [ERROR] something new",
        "[rank3]:[E102 03:04:05.006007008 Frob.cpp:12] [Rank 3] something new",
        "2026-01-02T03:04:05Z CRITICAL something new",
        "train.py:3: UserWarning: something new",
        "SomeNewError: text",
        "terminate called after throwing an instance of 'frob'",
        "Segmentation fault (core dumped)",
    ],
)
def test_line_of_no_class_is_reported_as_unknown(lane: Lane, line: str) -> None:
    report = classify(["step 1 loss 2.5\n", line + "\n", "step 2 loss 2.4\n"])
    (count, first), *others = report.unknown.values()
    assert (count, others, first.line, report.exit_code) == (1, [], 2, UNKNOWN)
    assert first.rank == (3 if "rank3" in line else None)
    assert first.text in line
    assert bool(first.time) == line.startswith(("W0102", "[2026", "[rank3", "2026"))
    below = ["  warnings.warn('x', UserWarning)\n", "  OtherError: indented\n"]
    assert classify(["train.py:3: UserWarning: x\n", *below]).unknown_count == 2


@lanes("cpu")
@planted("X13", "a loss with a prefix, a capital letter or two spaces")
@pytest.mark.parametrize(
    "line", ["train_loss: nan", "{'eval_loss': inf}", "val_loss=-inf", "Loss: nan", "step 3 loss:  NaN"]
)
def test_non_finite_loss_is_found_by_any_name(lane: Lane, line: str) -> None:
    (finding,) = classify([line + "\n", line.replace("oss", "osses").replace("nan", "nancy") + "\n"]).findings
    assert (finding.log_class.name, finding.alert) == ("non_finite", True)


@lanes("cpu")
def test_progress_lines_are_not_unknown(lane: Lane) -> None:
    quiet = [
        "step 100 loss 2.5012 0 errors error_ratio 0.51",
        " 12%|###   | 12/100 [00:03<00:20,  4.1it/s, loss=2.5]\r",
        '{"step": 7, "loss": 5.5, "lr": 0.003}',
        "I0102 03:04:05.006000 7 x.py:8] Error handling is on: RuntimeError: is retried",
        "2026-01-02 03:04:05,006 INFO retry after TimeoutError: none",
        "[rank5]: epoch 3 done, no failures",
        "",
    ]
    report = classify(line + "\n" for line in quiet)
    assert (report.exit_code, report.lines, report.findings) == (CLEAN, len(quiet), ())


@lanes("cpu")
def test_interleaved_ranks_give_the_same_counts(lane: Lane) -> None:
    plain = [lines for name, lines in FILES.items() if not any("[rank" in line for line in lines)]
    assert len(plain) >= 10
    choose = random.Random(0)
    for _ in range(25):
        order = choose.sample(plain, 4)
        queues = [[f"[rank{rank}]:{line}" for line in lines] for rank, lines in enumerate(order)]
        alone = [counted(queue) for queue in queues]
        mixed = []
        while any(queues):
            mixed.append(choose.choice([q for q in queues if q]).pop(0))
        together = counted(mixed)
        for name in [*NAMES, "unknown"]:
            total: Counter[int | None] = Counter()
            for one in alone:
                total.update(one.get(name, {}))
            assert together.get(name, {}) == dict(total), name


@lanes("cpu")
def test_order_of_logs_does_not_matter(lane: Lane) -> None:
    files = list(FILES.values())
    expected = counted([line for lines in files for line in lines])
    for seed in range(5):
        random.Random(seed).shuffle(files)
        assert counted([line for lines in files for line in lines]) == expected


@lanes("cpu")
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(("name", "over"), [("recompile", 0), ("recompile", 1), ("graph_break", 1)])
def test_bound_applies_to_each_rank(lane: Lane, ranks: int, name: str, over: int) -> None:
    text = {
        "recompile": "Recompiling function f in a.py:1",
        "graph_break": "Graph break in user code at a.py:1",
    }
    bound = next(c.bound for c in CLASSES if c.name == name)
    lines = [
        f"[rank{r}]:V0102 03:04:{n:02}.000000 {r} a.py:1] [0/1] [__x] {text[name]}\n"
        for n in range(bound + over)
        for r in range(ranks)
    ]
    report = classify(lines)
    assert report.count(name) == ranks * (bound + over)
    assert report.exit_code == (ALERT if over else CLEAN)


@lanes("cpu")
def test_events_with_one_timestamp_are_all_counted(lane: Lane) -> None:
    line = "V0102 03:04:05.006000 7 a.py:1] [0/1] [__recompiles] Recompiling function f in a.py:1\n"
    assert classify([line] * 5).count("recompile") == 5


@lanes("cpu")
def test_graph_break_bound_follows_from_the_model(lane: Lane) -> None:
    letters = contract.load().disabled_letters("whole_disabled")
    derived = sum(letter in letters for letter in preset("nam52").letters)
    assert next(c.bound for c in CLASSES if c.name == "graph_break") == derived


@lanes("cpu")
@pytest.mark.parametrize("first", ["candidate", "failure"])
@pytest.mark.parametrize(
    ("gap", "rank", "alert"), [(0, 0, True), (199, 0, True), (200, 0, False), (0, 1, False)]
)
def test_correlation_needs_the_same_rank_and_few_lines(
    lane: Lane, first: str, gap: int, rank: int, alert: bool
) -> None:
    candidate = "[rank0]:E0102 03:04:05.006000 7 s.py:8] Runtime error during autotuning: \n"
    failure = f"[rank{rank}]:RuntimeError: A compilation subprocess exited unexpectedly.\n"
    own, other = "[rank0]: step 1 loss 2.5\n", "[rank2]: step 1 loss 2.5\n"
    ends = [candidate, failure] if first == "candidate" else [failure, candidate]
    report = classify([ends[0], *[own, other] * gap, ends[1]])
    found = {f.log_class.name: f.alert for f in report.findings}
    assert found == {"autotune_candidate": alert, "compile_worker": True}


@lanes("cpu")
def test_single_failing_candidate_is_no_alert(lane: Lane) -> None:
    assert classify(FILES["autotune"]).exit_code == CLEAN
    assert classify(FILES["no_choice"]).exit_code == ALERT


@lanes("cpu")
def test_traceback_is_one_record_without_its_source_lines(lane: Lane) -> None:
    lines = [
        "Traceback (most recent call last):\n",
        '  File "a.py", line 3, in f\n',
        '    raise RuntimeError("the loss is nan")\n',
        "step 7 loss 2.5 of another writer\n",
        "RuntimeError: backend='inductor' raised:\n",
        "OSError: [Errno 28] No space left on device\n",
        "\n",
        "The above exception was the direct cause of the following exception:\n",
        "\n",
        "Traceback (most recent call last):\n",
        '  File "b.py", line 4, in g\n',
        "RuntimeError: the step failed\n",
        "step 8 loss 2.4\n",
    ]
    assert counted(lines) == {"disk_full": {None: 1}, "unknown": {None: 0}}
    assert counted(lines[:5] + lines[-1:]) == {"unknown": {None: 1}}
    quoted = ["SubprocException: An exception occurred in a subprocess:\n", "\n", *lines[:2], lines[5]]
    assert counted([*lines[:2], *quoted]) == {"disk_full": {None: 1}, "unknown": {None: 0}}
    assert counted([*lines[:2], *lines[4:7], "SomeNewError: after it\n"])["unknown"] == {None: 1}
    memory = [line for line in FILES["restated"] if "hbm" in line]
    assert counted(memory) == {"hbm_out_of_memory": {None: 1}, "unknown": {None: 0}}


@lanes("cpu")
def test_restart_after_torchrun_summary_is_read(lane: Lane) -> None:
    once, twice = counted(FILES["ranks"]), counted(FILES["ranks"] * 2)
    assert twice == {name: {rank: 2 * n for rank, n in of.items()} for name, of in once.items()}


@lanes("cpu")
@pytest.mark.parametrize("name", ["full", "file_limit"])
def test_full_disk_is_its_own_log_class(lane: Lane, name: str) -> None:
    """Rule C19: Inductor's traceback from a full cache is neither a model bug nor a compile error."""
    assert counted(FILES[name]) == {"disk_full": {None: 1}, "unknown": {None: 0}}


@lanes("cpu")
def test_memory_does_not_grow_with_the_log(lane: Lane) -> None:
    words = [f"w{chr(97 + i)}{chr(97 + j)}" for i in range(26) for j in range(26)]
    pick = random.Random(0)
    reader = _Reader(CLASSES)
    lines = (f"[rank{n % 9}]:Error: {' '.join(pick.choices(words, k=9))}\n" for n in range(2 * MEMO))
    assert reader.read(lines) == 2 * MEMO
    assert len(reader.memo) <= MEMO
    assert (
        sum(n for n, _ in reader.unknown.values()) == 2 * MEMO
    )  # each is counted, though few are stored separately
    assert len(reader.unknown) < 300
    assert len(reader.first) + len(reader.last) == 0


@lanes("cpu")
def test_line_without_end_is_read_in_pieces(lane: Lane, tmp_path: Path) -> None:
    (path := tmp_path / "x.log").write_text("a" * 3 * LINE)
    assert [len(piece) for piece in read_lines(path)] == [LINE] * 3


@lanes("cpu")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'action = "count"\nbound = 13\n',
            'action = "count"\n',
            "[logs.graph_break] has a wrong or missing 'bound'",
        ),
        ('action = "correlate"', 'action = "guess"', "'action'"),
        ("within = 200", "within = 0", "'within'"),
        ('"compile_worker"]', '"no_such_class"]', "no_such_class"),
        ("float00", "float32", "[logs.advice] has a wrong or missing 'patterns'"),
        ('rule = "C19"', 'rule = "disk"', "'rule'"),
        ('"BrokenProcessPool", ', "1, ", "[logs.compile_worker]"),
    ],
)
def test_invalid_log_classes_are_refused(lane: Lane, old: str, new: str, words: str, tmp_path: Path) -> None:
    text = contract.PATH.read_text()
    assert old in text
    (path := tmp_path / "contract.toml").write_text(text.replace(old, new))
    with pytest.raises(ContractError, match=re.escape(words)) as caught:
        load_classes(path)
    assert "\n" not in str(caught.value)


@lanes("cpu")
def test_logs_command(lane: Lane, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(lines: list[str], *flags: str) -> tuple[int, str]:
        (path := tmp_path / "x.log").write_text("".join(lines))
        return main([str(path), *flags]), capsys.readouterr().out

    assert run(["step 1 loss 2.5\n"]) == (CLEAN, "1 lines, 0 unknown records\n")
    code, text = run(FILES["ranks"])
    assert code == ALERT
    assert re.search(r"ALERT +recompile_limit +2 +alert +line \d+ rank [01]", text)
    code, text = run([HERE + "new\n"], "--json")
    assert (code, json.loads(text)["unknown"][0]["first"]["level"]) == (UNKNOWN, "W")
    assert run(FILES["builtin"], "--bound", "recompile=0")[0] == CLEAN
    breaks = [line for line in FILES["breaks"] if "Tensor.item()" not in line]
    assert run(breaks, "--bound", "graph_break=4")[0] != ALERT
    assert run(breaks, "--bound", "graph_break=3")[0] == ALERT
    for wrong in (["/absent/x.log"], [], [str(tmp_path / "x.log"), "--bound", "disk_full=1"]):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2


@lanes("cpu")
def test_logs_command_does_not_import_torch(lane: Lane) -> None:
    code = "import sys, launch.logs.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@lanes("cpu")
@planted("C26", "an unknown warning behind the tag of a launcher, an exception's source line behind two tags")
@pytest.mark.parametrize("tag", ["[run]: ", "[rank3]: ", "[rank3]: [rank3]:", "[default0]:[rank3]: "])
def test_tags_hide_no_record(lane: Lane, tag: str) -> None:
    """launch.retry tags a run without ranks, too, and torch tags the lines of a rank once more."""
    warning = f"{tag}W1121 13:02:28.314000 31449 torch/x.py:17] a warning that no class knows\n"
    trace = [
        "Traceback (most recent call last):",
        "  File 'a'",
        "    f('CUDA out of memory. Tried to allocate')",
    ]
    report = classify([warning, *(f"{tag}{line}\n" for line in [*trace, "ValueError: b"])])
    assert [first.text for _, first in report.unknown.values()] == [
        "a warning that no class knows",
        "ValueError: b",
    ]
    assert {first.rank for _, first in report.unknown.values()} == {None if "run" in tag else 3}
    assert report.findings == ()
