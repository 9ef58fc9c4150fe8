"""Log classification (rule C26): each wording has a line in the corpus, nothing alarming is dropped, ranks interleave.

The corpus is fixtures/logs; its NOTICE lists which lines were measured and which restate public reports.
"""

from __future__ import annotations

import gzip
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.core.toml import tomllib
from bumpgate.logs import (
    ALERT,
    CLEAN,
    TRACEBACK,
    UNKNOWN,
    Family,
    LogsError,
    classify,
    classify_files,
    load_families,
)
from bumpgate.logs.families import FAMILIES as FAMILIES_FILE
from bumpgate.logs.families import ZERO, compile_pattern, load_issues
from bumpgate.logs.reader import LINE, MEMO, Reader, pieces
from bumpgate.logs.report import Event, LogFinding, Report, compare
from launch import contract
from model import preset
from suites.support.child import ROOT
from suites.support.lanes import lanes
from suites.support.planted import planted

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane")]


def logs(pattern: str) -> dict[str, list[str]]:
    """Return the lines of the matching logs in fixtures/logs, by stem, without the lines that state their origin."""
    paths = sorted((ROOT / "fixtures" / "logs").glob(pattern))
    return {path.stem: [line for line in path.open() if not line.startswith("# ")] for path in paths}


FAILED, HEALTHY = logs("failed/*.log"), logs("healthy/*.log")
FILES = logs("*.log") | FAILED
FAMILIES = load_families()
NAMES = [c.name for c in FAMILIES]
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
    "cuda_graphs": ("count", 8, ()),
    "triton_builtin": ("ignore", None, ()),
    "advice": ("ignore", None, ()),
}

# Single lines; "near" has one for each class that does not belong to it.
LINES = tomllib.loads((ROOT / "fixtures" / "logs" / "lines.toml").read_text())
NEAR = LINES["near"]


def corpus() -> list[str]:
    return [line for lines in FILES.values() for line in lines]


def counted(lines: list[str], classes: tuple[Family, ...] = FAMILIES) -> dict[str, dict[int | None, int]]:
    """Count records by class and rank; unknown ones under "unknown"."""
    report = classify(lines, classes)
    out = {f.family.name: dict(f.by_rank) for f in report.findings}
    return out | {"unknown": {None: report.unknown_count}}


def without(name: str, wording: str, instead: str = "") -> tuple[Family, ...]:
    """Return the contract with one wording of one class removed or replaced by `instead`."""
    old = next(c for c in FAMILIES if c.name == name)
    assert any(wording in p for p in old.patterns), f"{name} has no wording {wording!r}"
    patterns = tuple(p.replace(wording, instead) if instead else p for p in old.patterns)
    kept = patterns if instead else tuple(p for p in old.patterns if wording not in p)
    return tuple(replace(c, patterns=kept) if c.name == name else c for c in FAMILIES)


def test_log_corpus_has_no_unclassified_line(row) -> None:
    reports = {name: classify(lines) for name, lines in FILES.items()}
    unknown = [f"{name}: {text}" for name, report in reports.items() for text in report.unknown]
    findings = [finding for report in reports.values() for finding in report.findings]
    lines = sum(report.lines for report in reports.values())
    row.count("launch/logs-cpu/unclassified_lines", unknown, expected=0, seen=lines, rule="C26")
    seen = {finding.family.name for finding in findings}
    about = {"seen": sum(finding.count for finding in findings), "rule": "C26"}
    about["evidence"] = [f"no line of {name}" for name in NAMES if name not in seen]
    row.count("launch/logs-cpu/classes_seen", len(seen), expected=len(FAMILIES), **about)


def test_every_pattern_has_a_corpus_line() -> None:
    lines = [line.translate(ZERO) for line in corpus()]
    missing = [
        (c.name, pattern)
        for c in FAMILIES
        for pattern in c.patterns
        if not any(compile_pattern(pattern)[1].search(line) for line in lines)
    ]
    assert missing == []


def test_classes_alert_as_reviewed() -> None:
    """The other tests of a class take its action and its bound from the contract."""
    stated = {c.name: (c.action, c.bound, c.companions) for c in FAMILIES}
    assert stated == dict.fromkeys(NEAR, ("alert", None, ())) | NOT_AT_ONCE


@planted("C26", "a line that is close to a class")
def test_near_miss_line_is_not_in_the_class() -> None:
    assert set(NEAR) == set(NAMES)
    assert [name for name, line in NEAR.items() if name in counted([line + "\n"])] == []


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
def test_dropped_wording_is_detected(name: str, wording: str, instead: str, old: str) -> None:
    """The mutant that the corpus exists for: a contract without the wording of one version of torch."""
    lines = [line for line in corpus() if old in line]
    assert lines
    assert sum(counted(lines)[name].values()) == len(lines)
    found = counted(lines, without(name, wording, instead))
    assert sum(found.get(name, {}).values()) < len(lines)


@planted("C26", "a line that belongs to no class")
@pytest.mark.parametrize("line", LINES["unknown"])
def test_line_of_no_class_is_reported_as_unknown(line: str) -> None:
    report = classify(["step 1 loss 2.5\n", line + "\n", "step 2 loss 2.4\n"])
    (count, first), *others = report.unknown.values()
    assert (count, others, first.line, report.exit_code) == (1, [], 2, UNKNOWN)
    assert first.rank == (3 if "rank3" in line else None)
    assert first.text in line
    assert bool(first.time) == line.startswith(("W0102", "[2026", "[rank3", "2026"))
    below = ["  warnings.warn('x', UserWarning)\n", "  OtherError: indented\n"]
    assert classify(["train.py:3: UserWarning: x\n", *below]).unknown_count == 2


def test_progress_lines_are_not_unknown() -> None:
    quiet = LINES["quiet"]
    report = classify(line + "\n" for line in quiet)
    assert (report.exit_code, report.lines, report.findings) == (CLEAN, len(quiet), ())


def test_interleaved_ranks_give_the_same_counts() -> None:
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


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(
    ("name", "text", "over"),
    [
        ("recompile", "Recompiling function f in a.py:1", 0),
        ("recompile", "Recompiling function f in a.py:1", 1),
        ("graph_break", "Graph break in user code at a.py:1", 1),
    ],
)
def test_bound_applies_to_each_rank(ranks: int, name: str, text: str, over: int) -> None:
    """Events with one timestamp are all counted."""
    bound = next(c.bound for c in FAMILIES if c.name == name)
    lines = [
        f"[rank{r}]:V0102 03:04:05.000000 {r} a.py:1] [0/1] [__x] {text}\n"
        for _ in range(bound + over)
        for r in range(ranks)
    ]
    report = classify(lines)
    assert report.count(name) == ranks * (bound + over)
    assert report.exit_code == (ALERT if over else CLEAN)


def test_order_of_logs_does_not_matter() -> None:
    def found(seed: int) -> tuple[dict[str, object], int]:
        reader = Reader(FAMILIES)
        for lines in random.Random(seed).sample(list(FILES.values()), len(FILES)):
            reader.read(line.encode() for line in lines)
        report = reader.report()
        return {f.family.name: f.by_rank for f in report.findings}, report.unknown_count

    assert all(found(seed) == found(0) for seed in range(1, 6))


def test_graph_break_bound_follows_from_the_model() -> None:
    letters = contract.load().disabled_letters("whole_disabled")
    derived = sum(letter in letters for letter in preset("nam52").letters)
    assert next(c.bound for c in FAMILIES if c.name == "graph_break") == derived


@pytest.mark.parametrize("first", ["candidate", "failure"])
@pytest.mark.parametrize(
    ("gap", "rank", "alert"), [(0, 0, True), (199, 0, True), (200, 0, False), (0, 1, False)]
)
def test_correlation_needs_the_same_rank_and_few_lines(first: str, gap: int, rank: int, alert: bool) -> None:
    candidate = "[rank0]:E0102 03:04:05.006000 7 s.py:8] Runtime error during autotuning: \n"
    failure = f"[rank{rank}]:RuntimeError: A compilation subprocess exited unexpectedly.\n"
    own, other = "[rank0]: step 1 loss 2.5\n", "[rank2]: step 1 loss 2.5\n"
    ends = [candidate, failure] if first == "candidate" else [failure, candidate]
    report = classify([ends[0], *[own, other] * gap, ends[1]])
    found = {f.family.name: f.alert for f in report.findings}
    assert found == {"autotune_candidate": alert, "compile_worker": True}


def test_traceback_is_one_record_without_its_source_lines() -> None:
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


def test_known_logs_are_classified_as_reviewed() -> None:
    """Rule C19: Inductor's traceback from a full cache is neither a model bug nor a compile error."""
    for name in ("full", "file_limit"):
        assert counted(FILES[name]) == {"disk_full": {None: 1}, "unknown": {None: 0}}
    assert classify(FILES["autotune"]).exit_code == CLEAN, "a single failing candidate"
    assert classify(FILES["no_choice"]).exit_code == ALERT
    # A restart after torchrun's summary.
    once, twice = counted(FILES["ranks"]), counted(FILES["ranks"] * 2)
    assert twice == {name: {rank: 2 * n for rank, n in of.items()} for name, of in once.items()}


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """Each event is counted, though few are stored; a line without an end is read in pieces."""
    words = [f"w{chr(97 + i)}{chr(97 + j)}" for i in range(26) for j in range(26)]
    pick = random.Random(0)
    reader = Reader(FAMILIES)
    lines = (f"[rank{n % 9}]:Error: {' '.join(pick.choices(words, k=9))}\n" for n in range(2 * MEMO))
    assert reader.read(line.encode() for line in lines) == 2 * MEMO
    assert len(reader.memo) <= MEMO
    assert sum(n for n, _ in reader.unknown.values()) == 2 * MEMO
    assert len(reader.unknown) < 300
    assert len(reader.first) + len(reader.last) == 0
    (path := tmp_path / "x.log").write_text("a" * 3 * LINE)
    assert [len(piece) for piece in pieces(path.open("rb"))] == [LINE] * 3


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'action = "count"\nbound = 13\n',
            'action = "count"\n',
            "[graph_break] has a wrong or missing 'bound'",
        ),
        ('action = "correlate"', 'action = "guess"', "'action'"),
        ("within = 200", "within = 0", "'within'"),
        ('"compile_worker"]', '"no_such_family"]', "no_such_family"),
        ("TensorFloat00", "TensorFloat32", "[advice] has a wrong or missing 'patterns'"),
        ('rule = "C19"', 'rule = "disk"', "'rule'"),
        ('"BrokenProcessPool", ', "1, ", "[compile_worker]"),
        ("(?P<path>/[^']+)", "([", "'facts'"),
        ("look = ", "loook = ", "[disk_full] is misshapen"),
    ],
)
def test_invalid_families_are_refused(old: str, new: str, words: str, tmp_path: Path) -> None:
    text = FAMILIES_FILE.read_text()
    assert old in text
    (path := tmp_path / "families.toml").write_text(text.replace(old, new))
    with pytest.raises(LogsError, match=re.escape(words)) as caught:
        load_families(path)
    assert "\n" not in str(caught.value)


@planted("C26", "a log that is packed, damaged, or no text")
def test_inputs_are_read_or_refused(tmp_path: Path) -> None:
    text = "step 1 loss 2.5\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    (tmp_path / "rank3.log.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "rank1.log").write_text("step 1 loss 2.5\n")
    (finding,) = classify_files([tmp_path]).findings
    assert (finding.by_rank, finding.first.facts["requested"]) == ({3: 1}, "2.00 GiB")
    assert finding.first.place.endswith("rank3.log.gz:2 rank 3")
    (tmp_path / "empty").mkdir()
    for name, content, words in (
        ("utf16.log", text.encode("utf-16"), "not text"),
        ("random.log", random.Random(0).randbytes(9999), "not text"),
        ("cut.log.gz", gzip.compress(text.encode() * 9999)[:-99], "damaged"),
        ("empty", None, "without files"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(LogsError, match=words) as caught:
            classify_files([tmp_path / name])
        assert "\n" not in str(caught.value)


def test_column_of_few_lines_is_a_prefix_only_in_all() -> None:
    memory = "1: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    for last, ranks in (("done\n", {None: 1}), ("2: done\n", {1: 1})):
        (finding,) = classify(["0: step 1\n", memory, last]).findings
        assert finding.by_rank == ranks, last


def test_hosts_without_ranks_are_two_writers() -> None:
    traces = [
        [TRACEBACK, '  File "a.py", line 1, in f', why]
        for why in (
            "OSError: No space left on device",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        )
    ]
    lines = [
        f"(Actor pid=7, ip=10.0.0.{host}) {line}\n" for both in zip(*traces) for host, line in enumerate(both)
    ]
    assert counted(lines) == {"disk_full": {None: 1}, "cuda_out_of_memory": {None: 1}, "unknown": {None: 0}}


PREFIXES = {
    "srun": lambda n, rank: f"{rank}: ",
    "srun, padded": lambda n, rank: f" {rank}: ",
    "Kubernetes": lambda n, rank: f"2026-01-02T03:04:{n % 60:02}.{n:09}Z ",
    "CRI": lambda n, rank: f"2026-01-02T03:04:{n % 60:02}.{n:09}Z stderr F ",
    "Ray": lambda n, rank: f"(TrainWorker pid={4000 + rank}, ip=10.0.0.{rank}) ",
    "platform": lambda n, rank: f"[2026-01-02 03:04:{n % 60:02}] job-{rank} || ",
    "compose": lambda n, rank: f"trainer-{rank}  | ",
    "nested": lambda n, rank: f"2026-01-02T03:04:05Z node-{rank}: [default{rank}]:",
}


@planted("C26", "a launcher's prefix before every line")
def test_prefix_hides_nothing(row) -> None:
    """Each log of the corpus gives the same findings behind each launcher's prefix."""
    differ, seen = [], 0
    for name, lines in FILES.items():
        if len(lines) < 2 or any("[rank" in line for line in lines):
            continue
        plain = classify(lines)
        counts = {f.family.name: f.count for f in plain.findings}
        for prefix, put in PREFIXES.items():
            behind = classify(put(n, 2) + line for n, line in enumerate(lines))
            found = {f.family.name: f.count for f in behind.findings}
            seen += sum(counts.values())
            if counts != found or plain.unknown_count != behind.unknown_count:
                differ.append(f"{prefix}, {name}: {counts} -> {found}, {list(behind.unknown)}")
    row.count("launch/logs-cpu/logs_changed_by_a_prefix", differ, expected=0, seen=seen, rule="C26")


def test_first_cause_is_the_first_line_unless_all_have_a_time() -> None:
    full, memory = (
        "OSError: [Errno 28] No space left on device",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
    )
    early, late = (f"E0102 03:04:{s}.006000 7 a.py:8] " for s in ("05", "06"))
    for lines, cause in (
        ((late + full, memory), "disk_full"),
        ((late + full, early + memory), "cuda_out_of_memory"),
    ):
        assert classify(f"{line}\n" for line in lines).alerts[0].family.name == cause, lines


@planted("C26", "a failed run, named after the family of its first cause")
def test_first_cause_of_a_failed_run() -> None:
    reports = {name: classify(lines) for name, lines in FAILED.items()}
    causes = {name: [f.family.name for f in report.alerts][:1] for name, report in reports.items()}
    assert causes == {name: [name.partition("-")[0]] for name in FAILED}
    assert {name: list(report.unknown) for name, report in reports.items() if report.unknown} == {}


@pytest.mark.parametrize("prefix", ["", *PREFIXES])
def test_healthy_run_is_clean(prefix: str) -> None:
    put = PREFIXES.get(prefix, lambda n, rank: "")
    assert len(HEALTHY) >= 30
    for name, lines in HEALTHY.items():
        report = classify(put(n, 2) + line for n, line in enumerate(lines))
        assert ([f.family.name for f in report.alerts], list(report.unknown)) == ([], []), name


def test_prefix_is_learned_only_from_a_column_of_most_lines() -> None:
    lines = ["12: RuntimeError: x\n", *["step 3 loss 2.5\n"] * 9]
    ((_, event),) = classify(lines).unknown.values()
    assert (event.rank, event.text) == (None, "12: RuntimeError: x")
    behind = [f"{n % 2}: {line}" for n, line in enumerate(lines)]
    ((_, event),) = classify(behind).unknown.values()
    assert (event.rank, event.text) == (0, "12: RuntimeError: x")
    steps = [f"step:{n}/99 train_loss:2.5 grad:1.5\n" for n in range(50)]
    assert classify([*steps, "step:51/99 train_loss:nan grad:1.5\n"]).exit_code == ALERT


@planted("X13", "a value that is not finite, as trainers print it")
@pytest.mark.parametrize("line", LINES["non_finite"])
def test_non_finite_value_is_found_in_every_format(line: str) -> None:
    report = classify(["step 1\n", line + "\n"])
    assert [f.family.name for f in report.alerts] == ["non_finite"]
    finite = re.sub("(?i)nan|inf", "2.5", line)
    other = line.replace("oss", "osses").replace("nan", "nancy")
    others = [other + "\n"] if "nancy" in other else []
    assert classify(["step 1\n", finite + "\n", *others]).exit_code == CLEAN


def test_values_that_may_be_infinite_do_not_alert() -> None:
    assert [line for line in LINES["finite"] if classify([line + "\n"]).exit_code != CLEAN] == []


@planted("C26", "a failure of one rank, reported by the others and the launcher before it")
def test_what_other_ranks_print_is_never_the_first_cause() -> None:
    """Also if its clock is ahead, or its line comes first."""
    alerts = [f for f in FAMILIES if f.action == "alert"]
    follower, cause = (next(f for f in alerts if f.follows is follows) for follows in (True, False))

    def found(family: Family, line: int, second: int) -> LogFinding:
        event = Event(line, 0, f"2026-11-21 06:00:0{second}", "E", "", "text")
        return LogFinding(family, {0: 1}, event, True)

    report = Report(9, (found(follower, 1, 1), found(cause, 5, 9)), {})
    assert [f.family.name for f in report.alerts] == [cause.name, follower.name]


def test_first_cause_is_the_failure_and_not_its_consequences() -> None:
    lines = [
        "[rank0]:[E102 03:04:09.000000000 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600020 ms\n",
        "[rank1]:[E102 03:04:05.000000000 ProcessGroupNCCL.cpp:1595] [PG ID 2 PG GUID 3 Rank 1] Process group watchdog "
        "thread terminated with exception: CUDA error: an illegal memory access was encountered\n",
        "CUDA kernel errors might be asynchronously reported at some other API call\n",
        "Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (most recent call first):\n",
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96\n",
        "\n",
        "terminate called after throwing an instance of 'c10::DistBackendError'\n",
        "E0102 03:04:10.000000 7 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -6) "
        "local_rank: 1 (pid: 9)\n",
    ]
    report = classify(lines)
    assert [f.family.name for f in report.alerts] == ["illegal_access", "collective_timeout", "rank_failed"]
    assert (report.alerts[0].first.rank, report.unknown_count) == (1, 0)
    assert report.alerts[1].first.facts == {
        "sequence": "8", "collective": "ALLREDUCE", "elements": "4", "limit_ms": "600000",
    }  # fmt: skip
    assert report.alerts[2].first.facts == {"exit_code": "-6", "local_rank": "1"}


@planted("C26", "the message of a logger that explains an exception")
def test_exception_below_a_loggers_message_is_its_event() -> None:
    trace = [TRACEBACK + "\n", '  File "a.py", line 3, in f\n', "    g()\n"]
    resources = "out of resource: x Required: 2 Hardware limit:1"
    message = f"ERROR:torch._inductor.select_algorithm:Exception {resources} for benchmark choice y\n"
    report = classify([message, *trace, f"RuntimeError: {resources}\n", "step 2\n"])
    assert [(f.family.name, f.count) for f in report.findings] == [("autotune_candidate", 1)]
    assert report.exit_code == CLEAN
    memory = "RuntimeError: CUDA out of memory. Tried to allocate\n"
    assert counted(["ERROR:root:the step failed\n", *trace, memory]) == {
        "cuda_out_of_memory": {None: 1},
        "unknown": {None: 0},
    }
    vllm = "(EngineCore_DP0 pid=73) ERROR 01-28 17:37:45 [core.py:866] "
    raised = '    raise RuntimeError("CUDA out of memory. Tried to allocate")\n'
    behind = [vllm + line for line in [*trace, raised, "ValueError: x\n"]]
    assert counted(behind) == {"unknown": {None: 1}}


def test_two_runs_are_compared_by_family() -> None:
    f, g = ("Recompiling function f in a.py:1\n", "Recompiling function g in a.py:2\n")
    before, after = classify([f, "OldError: a\n"]), classify([f, g, "NewError: b\n"])
    assert [(d.label, d.name) for d in compare(before, after)] == [
        ("NEW", "unknown: NewError: b"),
        ("MORE", "recompile"),
        ("GONE", "unknown: OldError: a"),
    ]
    assert compare(before, before) == []


def test_known_issues_match_their_log_and_no_other() -> None:
    issues = {issue.name for issue in load_issues()}
    logs = sorted((ROOT / "fixtures" / "logs" / "known").glob("*.log"))
    assert {path.stem for path in logs} == issues
    for path in logs:
        found = {f.issue.name for f in classify(path.open()).findings if f.issue}
        assert found == {path.stem}, path


def test_logs_import_the_standard_library_alone() -> None:
    code = "import sys, bumpgate.logs; sys.exit('torch' in sys.modules or 'typer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@planted("C26", "an unknown warning behind the tag of a launcher, an exception's source line behind two tags")
@pytest.mark.parametrize("tag", ["[run]: ", "[rank3]: ", "[rank3]: [rank3]:", "[default0]:[rank3]: "])
def test_tags_hide_no_record(tag: str) -> None:
    """launch.retry tags a run without ranks, too, and torch tags the lines of a rank once more."""
    lines = ["W1121 13:02:28.314000 31449 torch/x.py:17] a warning that no class knows", TRACEBACK]
    lines += ["  File 'a'", "    f('CUDA out of memory. Tried to allocate')", "ValueError: b"]
    report = classify(f"{tag}{line}\n" for line in lines)
    first = [event for _, event in report.unknown.values()]
    assert [event.text for event in first] == ["a warning that no class knows", "ValueError: b"]
    assert {event.rank for event in first} == {None if "run" in tag else 3}
    assert report.findings == ()
