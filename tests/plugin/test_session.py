"""A lane session end to end: its verdicts, missing rows, and what survives a crash."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
from dataclasses import replace

import pytest

from bumpgate.core.baseline import Baseline, Reviewed, load, save
from bumpgate.core.rows import ProblemKind, Record, Verdict
from bumpgate.gate.verdict import Side, judge_gate
from bumpgate.process.file_transaction import AdoptionError
from bumpgate.review.reviewed_findings import reviewed
from tests.support.gate_files import gate_of
from tests.support.project import GOOD, Project, counted, wait_for

RUN = ("-m", "cpu", "-n", "0")
FILE = "suites/compile/test_a.py"
B = "suites/compile/test_b.py"
IN_B = replace(counted("x"), test=f"{B}::test_other[cpu]")

ALL_VERDICTS = """
@lanes("cpu", "h200")
def test_pass(lane, row):
    row.count("compile/pass/graph_breaks", 13, expected=13, **COUNT)

@lanes("cpu")
def test_rows(lane, row, request):
    request.config.stash[CANARY_RESULTS] = {"graphs": "", "breaks": "breaks: read 0, known 1"}
    row.count("compile/proved/graph_breaks", 4, instruments=["graphs"], **COUNT)
    row.count("compile/regression/graph_breaks", 0, expected=13, evidence=["GB0007 at model.py:3"], **COUNT)
    row.count("compile/changed/graph_breaks", 5, **COUNT)
    row.exact("compile/other_build/graph_breaks", "abc", per_build=True, **COUNT)
    row.count("compile/unreviewed/graph_breaks", 1, **COUNT)
    row.count("compile/failed_canary/graph_breaks", 4, instruments=["breaks"], **COUNT)
    row.count("compile/no_canary/graph_breaks", 4, instruments=["ghost"], **COUNT)
    row.count("compile/no_witness/graph_breaks", 4, unit="breaks", seen=0, rule="C6")
    row.timed("compile/win/seconds", at(1.0, 0.9, 1.1), **TIMED)
    row.timed("compile/slower/seconds", at(3.0, 2.9, 3.1), **TIMED)
    row.timed("compile/inconclusive/seconds", at(2.3, 1.9, 2.6), **TIMED)

@pytest.fixture
def instrument(request):
    request.config.stash[CANARY_RESULTS] = {"graphs": "", "breaks": "breaks: read 0, known 1"}
    request.node.stash[INSTRUMENTS] = ("breaks",)

@lanes("cpu")
def test_of_fixture(lane, row, instrument):
    row.count("compile/of_fixture/graph_breaks", 4, **COUNT)

@lanes("cpu")
def test_machine(lane, row):
    raise InfraError("clocks throttled")

@lanes("cpu")
def test_full_disk(lane, row):
    raise OSError(28, "No space left on device")

@lanes("cpu")
def test_leak(lane, row):  # a process without file descriptors may leak them
    raise OSError(24, "Too many open files")

@lanes("cpu")
def test_disturbed(lane, row):  # no reviewed row
    raise InfraError("other processes used this machine")
"""
EXPECTED = {
    "pass": "PASS",
    "proved": "PASS",
    "regression": "REGRESSION",
    "slower": "REGRESSION",
    "changed": "CHANGED",
    "other_build": "CHANGED (not judged)",
    "unreviewed": "NEW",
    "vanished": "MISSING",
    "leak": "MISSING",
    "failed_canary": "INSTRUMENT",
    "no_canary": "INSTRUMENT",
    "of_fixture": "INSTRUMENT",
    "no_witness": "INSTRUMENT",
    "machine": "INFRA",
    "full_disk": "INFRA",
    "inconclusive": "INCONCLUSIVE",
    "win": "WIN",
}


def test_every_verdict_is_equal_for_0_1_and_2_workers(project: Project) -> None:
    project.tests(ALL_VERDICTS)
    exact = ("proved", "changed", "failed_canary", "no_canary", "no_witness")
    rows = {f"compile/{name}/graph_breaks": counted("test_rows", 4, "exact") for name in exact}
    for name in ("pass", "vanished", "machine", "full_disk", "leak"):
        rows[f"compile/{name}/graph_breaks"] = counted(f"test_{name}")
    rows["compile/of_fixture/graph_breaks"] = counted("test_of_fixture", 4, "exact")
    rows["compile/regression/graph_breaks"] = counted("test_rows")
    rows["compile/other_build/graph_breaks"] = Reviewed("xyz", "breaks", "exact", per_build=True)
    for name in ("win", "slower", "inconclusive"):
        rows[f"compile/{name}/seconds"] = Reviewed(2.0, "s", "lower", 0.1, test=f"{FILE}::test_rows[cpu]")
    save(project.root / "baselines/cpu.json", Baseline("cpu", {"torch": "9.8.0"}, rows))
    seen = []
    for workers in "210":
        result = project.pytest("-m", "cpu", "-n", workers)
        assert result.code == 1, result.out
        assert project.verdicts() == EXPECTED
        record = project.record()
        seen.append((record.judgements, record.problems, record.complete, record.provenance["full_run"]))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][2:] == (True, True)
    (disturbed,) = seen[0][1]
    assert disturbed.kind is ProblemKind.INFRA
    assert disturbed.why == "InfraError: other processes used this machine"
    check_table(result.out)
    assert "compile/pass/graph_breaks: 13 breaks" in project.pytest(*RUN, "-v").out


def check_table(out: str) -> None:
    """Check the printed verdicts: worst first, a command per red row, counts at the end."""
    table = out[out.index("REGRESSION    compile") : out.index("record: ")]
    labels = [line.split()[0] for line in table.splitlines() if not line.startswith(" ")]
    order = ["REGRESSION", "CHANGED", "MISSING", "INSTRUMENT", "INFRA", "INCONCLUSIVE", "NEW"]
    assert [label for label in dict.fromkeys(labels) if label in order] == order
    assert labels[-1] == "PASS"
    assert table.count("\n" + " " * 14 + "-> ") == len(EXPECTED) - 2
    assert "expected 13 (derived), measured 0" in table
    assert re.search(r"PASS +compile 2\n", table)
    assert "\x1b" not in out
    assert not re.search("[─-╿]", out)
    counts = r"17 rows: 2 PASS, 1 WIN, 1 CHANGED \(not judged\), .*, 1 CHANGED, 2 REGRESSION; 1 PROBLEM"
    assert re.search(rf"^cpu: {counts}; device cpu; torch 9\.9\.0; \d+ s$", out, re.MULTILINE), out
    assert "6 failed, 1 passed" in out, "a red row fails its test, not the teardown"
    assert "GB0007 at model.py:3" in out, "the failure shows the evidence"


def test_crash_and_hang_lose_only_their_own_rows(project: Project) -> None:
    body = """
    @lanes("cpu")
    def test_crash(lane, row):
        row.count("compile/early/graph_breaks", 13, expected=13, **COUNT)
        os.kill(os.getpid(), signal.SIGSEGV)

    @lanes("cpu")
    @pytest.mark.timeout(1)
    def test_hang(lane, row):
        time.sleep(60)
    """
    project.tests(textwrap.dedent(body) + GOOD)
    project.baseline(early=counted("test_crash"), hang=counted("test_hang"), good=counted("test_good"))
    assert project.pytest("-m", "cpu").code == 1
    assert project.verdicts() == {"early": "MISSING", "hang": "MISSING", "good": "PASS"}
    for lost in ("early", "hang"):
        assert "crashed while running" in project.reason(lost)
    assert project.record().complete


def test_green_requires_exactly_the_reviewed_rows(project: Project) -> None:
    project.tests(GOOD)
    project.tests(GOOD.replace("good", "other"), B)
    good, gone = counted("test_good"), counted("test_gone")

    project.baseline(good=good, other=IN_B)
    assert project.pytest(*RUN, ".", cwd="suites").code == 0
    record = project.record()
    assert not record.red
    assert [j.row.test for j in record.judgements] == [good.test, IN_B.test], "relative to the root"
    assert not (project.root / "torch-was-imported").exists()
    here = record.provenance
    assert (here["torch"], here["torch_git"], here["wall_seconds"] > 0) == ("9.9.0", "f00d", True)
    assert here["full_run"]
    facts = {"lane", "cpu", "cores", "python", "platform", "commit", "dirty", "command", "started"}
    assert facts <= here.keys()

    project.baseline(other=IN_B)
    assert project.pytest(*RUN).code == 1, "a row was removed from the baseline"
    assert project.verdicts() == {"good": "NEW", "other": "PASS"}

    project.baseline(good=good, other=IN_B, gone=gone)
    assert project.pytest(*RUN).code == 1, "the test of a row was removed"
    assert project.verdicts() == {"good": "PASS", "other": "PASS", "gone": "MISSING"}
    assert "its test is gone" in project.reason("gone")
    assert project.pytest(*RUN, B).code == 0
    assert project.verdicts() == {"other": "PASS"}, "a run of one file is judged by its own rows"

    project.baseline(good=good, other=IN_B, silent=good)
    assert project.pytest(*RUN, FILE).code == 1
    assert "no longer reports it" in project.reason("silent"), "a selected test must report each of its rows"

    project.tests(GOOD.replace("compile/good", "compile/renamed"))
    project.baseline(good=good, other=IN_B)
    assert project.pytest(*RUN).code == 1
    assert project.verdicts() == {"good": "MISSING", "renamed": "NEW", "other": "PASS"}
    assert "no longer reports it" in project.reason("good"), "its test failed for the new row alone"


def test_rebaseline_makes_the_next_run_green_and_is_idempotent(project: Project) -> None:
    project.tests(GOOD)
    assert project.pytest(*RUN, "--record=rows.json").code == 1, "without a baseline every row is NEW"
    wrote = project.bumpgate("rebaseline", "--lane", "cpu", "--record", "rows.json")
    assert (wrote.code, wrote.err) == (0, "")
    assert "compile/good/graph_breaks  - -> 13" in wrote.out
    path = project.root / "baselines/cpu.json"
    text = path.read_bytes()
    assert load(path, "cpu").made_with["torch"] == "9.9.0"
    assert project.pytest(*RUN, "--record=rows.json").code == 0, "a record is no part of the sources"
    again = project.bumpgate("rebaseline", "--lane", "cpu", "--record", "rows.json")
    assert (again.code, path.read_bytes()) == (0, text)
    assert "nothing to accept" in again.out


def test_tier_rows_are_required_in_their_own_environment_only(project: Project) -> None:
    """A plain run requires none of them; a tier run requires those of its tests, and is accepted under its triton."""
    tier = "suites/kernels/codegen"
    project.tests(GOOD)
    body = GOOD.replace("(lane", "(lane, version").replace("good", "tier-triton3.7.1", 2)
    body = body.replace("test_tier-triton3.7.1", "test_good")
    version = '@lanes("cpu")\n@pytest.mark.parametrize("version", ["triton3.7.1"])'
    project.tests(body.replace('@lanes("cpu")', version), f"{tier}/test_kernels.py")
    ignored = "import os\ncollect_ignore_glob = os.environ.get('NONE', '').split()"
    project.write(f"{tier}/conftest.py", ignored)
    test = f"{tier}/test_kernels.py::test_good[triton{{}}-cpu]"
    rows = {
        f"tier-triton{v}": Reviewed(13, "breaks", "derived", test=test.format(v)) for v in ("3.7.1", "3.9.0")
    }

    project.baseline(good=counted("test_good"), **rows)
    assert project.pytest(*RUN, NONE="test_*").code == 0, "no tier runs, and none is required"
    assert project.verdicts() == {"good": "PASS"}
    assert project.pytest(*RUN, tier).code == 0
    assert project.verdicts() == {"tier-triton3.7.1": "PASS"}, "rows of another version are not required"

    project.baseline(good=counted("test_good"), silent=rows["tier-triton3.7.1"], **rows)
    assert project.pytest(*RUN, tier).code == 1, "its own rows are required"
    assert project.verdicts() == {"tier-triton3.7.1": "PASS", "silent": "MISSING"}

    project.baseline(good=counted("test_good"))
    project.write("triton-3.7.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: triton\nVersion: 3.7.1\n")
    assert project.pytest(*RUN, tier).code == 1
    assert project.record().provenance["triton"] == "3.7.1"
    wrote = project.bumpgate("rebaseline", "--lane", "cpu")
    assert (wrote.code, wrote.err) == (0, "")
    baseline = load(project.root / "baselines/cpu.json", "cpu")
    assert set(baseline.rows) == {"compile/good/graph_breaks", "compile/tier-triton3.7.1/graph_breaks"}
    assert baseline.made_with["triton"] is None, "the lane's build is unchanged"
    assert project.pytest(*RUN, "suites/compile").code == 0
    assert "another build is adopted" in project.bumpgate("rebaseline", "--lane", "cpu").err


def test_kernel_that_this_triton_does_not_launch_is_listed(project: Project) -> None:
    """Its row has no value for this version; a row with one stays required, and --prune drops that value."""
    path = "suites/kernels/codegen/test_kernels.py"
    called = 'row.code("compile/new/graph_breaks", "spills=0", seen=3, rule="C6")'
    counts = 'row.count("compile/good/graph_breaks", 13, expected=13, **COUNT)'
    project.tests(GOOD.replace(counts, called), path)
    project.write("triton-3.9.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: triton\nVersion: 3.9.0\n")
    code = Reviewed(None, "counts", "code", test=f"{path}::test_good[cpu]")
    versions = {"old": ["3.7.1"], "new": ["3.9.0"], "both": ["3.7.1", "3.9.0"]}
    project.baseline(
        **{name: replace(code, values=dict.fromkeys(v, "spills=0")) for name, v in versions.items()}
    )
    run = (*RUN, "--gate", "--part", "suites/kernels/codegen")
    result = project.pytest(*run)
    assert (result.code, project.verdicts()) == (1, {"new": "PASS", "both": "MISSING"}), result.out
    listed = "compile/old/graph_breaks: triton 3.9.0 does not launch this kernel"
    assert project.record().provenance["not_run"] == [listed]
    assert f"NOT RUN       {listed}" in result.out

    assert project.bumpgate("rebaseline", "--lane", "cpu", "--prune").code == 0
    again = project.pytest(*run)
    assert (again.code, project.verdicts()) == (0, {"new": "PASS"}), again.out


# The session itself, and no worker, has the reports of a test.
SAYS_REPORTED = """
import os, pytest

@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    if report.when == "teardown" and "PYTEST_XDIST_WORKER" not in os.environ:
        open("reported", "w").close()
"""


def start_and_wait_for_the_second_test(project: Project, workers: str) -> subprocess.Popen[str]:
    """Start a session and wait until its first test has reported its row and the second one sleeps."""
    body = """
    @lanes("cpu")
    def test_z(lane):
        with open("there", "w") as f:
            f.write(str(os.getpid()))
        time.sleep(60)
    """
    project.tests(GOOD + textwrap.dedent(body))
    project.write("suites/conftest.py", SAYS_REPORTED)
    project.baseline(good=counted("test_good"), z=counted("test_z"))
    process = project.start("-m", "pytest", "-m", "cpu", "-n", workers)
    wait_for(lambda: all((project.root / name).exists() for name in ("reported", "there")), process)
    return process


@pytest.mark.parametrize("workers", ["0", "1"])
def test_record_survives_ctrl_c(project: Project, workers: str) -> None:
    process = start_and_wait_for_the_second_test(project, workers)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, also to the workers
    process.communicate(timeout=60)
    assert process.returncode == 2
    assert not project.record().complete
    assert project.record().red
    assert project.verdicts() == {"good": "PASS", "z": "MISSING"}
    assert "the run ended before" in project.reason("z")


def test_record_is_written_before_xdist_waits_for_workers(project: Project) -> None:
    """A hanging worker delays the session for seconds; the record exists if it is killed then."""
    process = start_and_wait_for_the_second_test(project, "1")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: project.record().judgements)
    os.kill(int((project.root / "there").read_text()), 0)  # raises if the worker has ended
    assert project.verdicts() == {"good": "PASS", "z": "MISSING"}


def test_killed_session_keeps_its_rows_and_failures(project: Project) -> None:
    """And leaves no older record."""
    failed = "@lanes('cpu')\ndef test_failed(lane):\n    assert 1 == 2\n"
    project.write(
        "suites/conftest.py",
        "import bumpgate.plugin.session as s\ns.KEEP_SECONDS, s.KEEP_SHARE = 0.0, float('inf')\n",
    )
    killer = '\n@lanes("cpu")\ndef test_killer(lane):\n    os.kill(os.getpid(), signal.SIGKILL)\n'
    for body, kept in ((failed + GOOD + killer, {"good": "NEW"}), (killer, {})):
        project.tests(body)
        assert project.pytest(*RUN).code == -signal.SIGKILL
        record = project.record()
        assert (record.complete, project.verdicts()) == (False, kept)
        assert any("assert 1 == 2" in str(problem) for problem in record.problems) == bool(kept)


def test_run_stopped_early_is_not_complete(project: Project) -> None:
    project.tests("@lanes('cpu')\ndef test_first(lane):\n    assert 1 == 2\n" + GOOD)
    project.baseline(good=counted("test_good"), gone=counted("test_gone"))
    whole = project.pytest(*RUN)
    assert (whole.code, "NOT COMPLETE" in whole.out) == (1, False)
    assert [j.gone for j in project.record().judgements] == [True, False]
    cut = project.pytest(*RUN, "-x")
    assert (cut.code, "NOT COMPLETE" in cut.out) == (1, True)
    record = project.record()
    assert not record.complete
    assert [j.gone for j in record.judgements] == [False, False], "a test that did not run is not gone"
    assert any("assert 1 == 2" in str(problem) for problem in record.problems)


def test_gate_fails_on_skip_xpass_and_deselection(project: Project) -> None:
    body = """
    @lanes("cpu")
    @pytest.mark.xfail
    def test_xpass(lane):
        pass

    @lanes("cpu")
    def test_skip(lane):
        pytest.skip("not today")

    @lanes("cpu")
    def test_left_out(lane):
        assert os.environ["BUMPGATE_GATE"] == "1"

    @lanes("h200")
    def test_elsewhere(lane):
        pass
    """
    project.tests(textwrap.dedent(body) + GOOD)
    project.baseline(good=counted("test_good"))
    select = ("-m", "cpu", "-k", "not left_out")
    assert project.pytest(*select, "-n", "0").code == 0
    for workers in "01":
        assert project.pytest(*select, "--gate", "-n", workers).code == 1
        part, *problems = project.record().problems
        assert str(part).startswith("part of the lane: all 1 reviewed rows, but not all tests")
        names = [p.test.split("::")[1].split("[")[0] for p in problems]
        assert names == ["test_left_out", "test_skip", "test_xpass"]
        assert "not today" in problems[1].why
    assert " failed" not in project.pytest(*RUN, "--gate").out, "BUMPGATE_GATE is set in the tests"


def test_module_that_fails_to_import_loses_its_rows(project: Project) -> None:
    project.tests("import no_such_module\n")
    project.tests(GOOD.replace("good", "other"), B)
    project.baseline(lost=counted("test_lost"), other=IN_B)
    assert project.pytest(*RUN, "--continue-on-collection-errors").code == 1
    assert project.verdicts() == {"lost": "MISSING", "other": "PASS"}
    assert "No module named 'no_such_module'" in project.reason("lost")
    assert project.pytest("-m", "cpu").code != 0
    assert not project.record().complete
    (problem,) = project.record().problems
    assert "could not be collected: " in str(problem)
    assert project.pytest(*RUN, FILE).code != 0
    assert project.verdicts() == {"lost": "MISSING"}


def test_row_requires_a_lane_and_a_unique_id(project: Project) -> None:
    project.tests(GOOD + GOOD.replace("test_good", "test_twin") + "def test_nowhere(row):\n    pass\n")
    project.baseline(good=counted("test_good"))
    one = project.pytest(*RUN)
    assert one.code == 1
    twice = rf"graph_breaks': {FILE}:(\d+) reports it again, after {FILE}::test_good\[cpu\] at {FILE}:(\d+)"
    lines = re.search(twice, one.out)
    assert lines, one.out
    assert int(lines[1]) > int(lines[2])
    assert "rows.py" not in one.out, "the traceback ends at the test's line"
    assert project.pytest("-m", "cpu", "-n", "2").code == 1
    assert any("was already reported by" in str(problem) for problem in project.record().problems)
    lost = project.pytest("-n", "0", f"{FILE}::test_nowhere")
    assert (lost.code, "has rows but no lane" in lost.out) == (1, True)


def test_red_row_in_teardown_or_xfail_fails_the_run(project: Project) -> None:
    project.tests("""
    @pytest.fixture
    def late(row):
        yield
        row.count("compile/late/graph_breaks", 0, expected=13, **COUNT)

    @lanes("cpu")
    @pytest.mark.xfail
    def test_hidden(lane, row):
        row.count("compile/hidden/graph_breaks", 0, expected=13, **COUNT)

    @lanes("cpu")
    def test_late(lane, late):
        pass
    """)
    result = project.pytest(*RUN)
    assert (result.code, "1 passed, 1 xfailed, 1 error" in result.out) == (1, True), result.out
    assert project.verdicts() == {"late": "REGRESSION", "hidden": "REGRESSION"}
    assert project.pytest(*RUN, "-k", "hidden").code == 1, "xfail does not hide a row"


DESELECTS = """
def pytest_collection_modifyitems(config, items):
    config.hook.pytest_deselected(items=[items.pop()])
"""
SKIPPED_MODULE = "pytest.importorskip('no_such_module')\n" + GOOD
XFAILS = GOOD.replace("@lanes", "@pytest.mark.xfail\n@lanes").replace("    row", "    assert 0\n    row")
TEST = f"{FILE}::test_good[cpu]"


@pytest.mark.parametrize(
    ("tests", "conftest", "option", "reason"),
    [
        (GOOD, DESELECTS, "", f"{TEST} was deselected"),
        (GOOD, "", "--setup-only", f"{TEST} was set up and not run"),
        (SKIPPED_MODULE, "", "", f"{FILE} was skipped: could not import"),
        (XFAILS, "", "", f"not reported by {TEST}, which fails as its mark xfail expects"),
    ],
    ids=["deselected", "set up", "skipped module", "expected failure"],
)
def test_row_of_an_existing_test_is_not_pruned(
    project: Project, tests: str, conftest: str, option: str, reason: str
) -> None:
    project.tests(tests)
    project.tests(GOOD.replace("good", "other"), "suites/another/test_b.py")
    project.write("suites/compile/conftest.py", conftest)
    project.baseline(good=counted("test_good"))
    assert project.pytest(*RUN, *option.split()).code == 1
    assert reason in project.reason("good")
    pruned = project.bumpgate("rebaseline", "--lane", "cpu", "--prune", "--dry-run")
    assert "nothing measures it" not in pruned.out


@pytest.mark.parametrize("paths", ["packages/*/tests", "packages/a packages/b absent"])
def test_lost_row_is_missing_with_patterns_of_testpaths(project: Project, paths: str) -> None:
    """A run without arguments is whole, also if testpaths has patterns or names a folder that does not exist."""
    config = (project.root / "pyproject.toml").read_text()
    assert 'testpaths = ["suites"]' in config
    project.write("pyproject.toml", config.replace('["suites"]', f"{paths.split()}"))
    project.tests(GOOD, path="packages/a/tests/test_a.py")
    gone = replace(counted("test_gone"), test="packages/b/tests/test_b.py::test_gone[cpu]")
    project.baseline(good=counted("test_good"), gone=gone)
    project.write("packages/b/tests/test_c.py", "")
    assert project.pytest(*RUN).code == 1
    assert project.verdicts() == {"good": "PASS", "gone": "MISSING"}


RED_THEN = """
@pytest.fixture
def ending():
    yield
    {teardown}

@lanes("cpu")
def test_red(lane, row, ending):
    row.count("compile/red/graph_breaks", 5, **COUNT)
    {call}
    row.count("compile/new/graph_breaks", 5, paired=True, **COUNT)
"""
RED = "compile/red/graph_breaks"
RAISES = "raise ValueError('lost')"


@pytest.mark.parametrize(
    ("call", "teardown", "workers", "why"),
    [
        ("pass", "pass", "1", ""),
        (RAISES, "pass", "0", "ValueError: lost"),
        (RAISES, "pass", "1", "ValueError: lost"),
        ("raise InfraError('no clock')", "pass", "1", "InfraError: no clock"),
        ("pass", "raise ValueError('late')", "1", "ValueError: late"),
        ("pass", "os.kill(os.getpid(), signal.SIGSEGV)", "1", "crashed while running"),
    ],
    ids=["no failure", "in this process", "in a worker", "machine", "teardown", "segfault"],
)
def test_failure_after_a_red_row_is_a_problem(
    project: Project, call: str, teardown: str, workers: str, why: str
) -> None:
    """It may have lost rows that no review has yet, so that a review of the red row alone does not cover it."""
    project.tests(RED_THEN.format(call=call, teardown=teardown) + GOOD)
    project.baseline(red=counted("test_red", 4, "exact"), good=counted("test_good"))
    assert project.pytest("-m", "cpu", "-n", workers).code == 1
    assert project.verdicts()["red"] == "CHANGED"
    record = project.record()
    found = [(p.test, why in p.why) for p in record.problems]
    assert found == [(f"{FILE}::test_red[cpu]", True)] * bool(why)
    judgements = [replace(j, verdict=Verdict.PASS) if j.row.id == RED else j for j in record.judgements]
    good, bad = Side("good", Record(record.provenance, tuple(judgements))), Side("bad", record)
    gate = gate_of(*judge_gate("cpu", good, bad).findings)
    if not why:
        assert [r.row for r in reviewed(gate, [RED], ["upstream"])] == [RED]
        return
    with pytest.raises(AdoptionError, match=r"a failed test cannot be reviewed|gaps in the evidence: INFRA"):
        reviewed(gate, [RED], ["upstream"])


def test_failure_that_a_missing_row_shows_is_no_problem(project: Project) -> None:
    project.tests(RED_THEN.format(call=RAISES, teardown="pass"))
    project.baseline(red=counted("test_red", 4, "exact"), new=counted("test_red"))
    assert project.pytest(*RUN).code == 1
    assert project.verdicts() == {"red": "CHANGED", "new": "MISSING"}
    assert "ValueError: lost" in project.reason("new")
    assert not project.record().problems
