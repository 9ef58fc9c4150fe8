"""A lane session end to end: its verdicts, missing rows, and what survives a crash."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
import time

import pytest

from bumpgate.core.baseline import Baseline, Reviewed, load, save
from tests.support.project import GOOD, Project, counted

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

@lanes("cpu")
def test_machine(lane, row):
    raise InfraError("clocks throttled")

@lanes("cpu")
def test_full_disk(lane, row):
    raise OSError(28, "No space left on device")
"""

EXPECTED = {
    "pass": "PASS",
    "proved": "PASS",
    "regression": "REGRESSION",
    "slower": "REGRESSION",
    "changed": "CHANGED",
    "other_build": "CHANGED (not judged)",
    "unreviewed": "MISSING",
    "vanished": "MISSING",
    "failed_canary": "INSTRUMENT",
    "no_canary": "INSTRUMENT",
    "no_witness": "INSTRUMENT",
    "machine": "INFRA",
    "full_disk": "INFRA",
    "inconclusive": "INCONCLUSIVE",
    "win": "WIN",
}


def review_all_verdicts(project: Project) -> None:
    project.tests(ALL_VERDICTS)
    exact = {
        name: counted("test_rows", 4, "exact")
        for name in ("proved", "changed", "failed_canary", "no_canary", "no_witness")
    }
    rows = {f"compile/{name}/graph_breaks": reviewed for name, reviewed in exact.items()}
    for name in ("win", "slower", "inconclusive"):
        rows[f"compile/{name}/seconds"] = Reviewed(2.0, "s", "lower", 0.1, test=exact["proved"].test)
    rows["compile/pass/graph_breaks"] = counted("test_pass")
    rows["compile/regression/graph_breaks"] = counted("test_rows")
    rows["compile/vanished/graph_breaks"] = counted("test_vanished")
    rows["compile/machine/graph_breaks"] = counted("test_machine")
    rows["compile/full_disk/graph_breaks"] = counted("test_full_disk")
    rows["compile/other_build/graph_breaks"] = Reviewed("xyz", "breaks", "exact", per_build=True)
    save(project.root / "baselines/cpu.json", Baseline("cpu", {"torch": "9.8.0"}, rows))


def test_every_verdict_is_equal_for_0_1_and_2_workers(project: Project) -> None:
    review_all_verdicts(project)
    seen = []
    for workers in "012":
        result = project.pytest("-m", "cpu", "-n", workers)
        assert result.code == 1, result.out
        assert project.verdicts() == EXPECTED
        record = project.record()
        seen.append((record.judgements, record.problems, record.complete, record.provenance["full_run"]))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][2:] == (True, True)


def test_table_is_sorted_by_severity_with_a_command_per_row(project: Project) -> None:
    review_all_verdicts(project)
    out = project.pytest("-m", "cpu", "-n", "0").out
    table = out[out.index("REGRESSION    compile") : out.index("record: ")]
    labels = [line.split()[0] for line in table.splitlines() if not line.startswith(" ")]
    order = ["REGRESSION", "CHANGED", "MISSING", "INSTRUMENT", "INFRA", "INCONCLUSIVE"]
    assert list(dict.fromkeys(labels))[:6] == order
    assert labels[-1] == "PASS"
    assert table.count("\n" + " " * 14 + "-> ") == len(EXPECTED) - 2
    assert "expected 13 (derived), measured 0" in table
    assert re.search(r"PASS +compile 2\n", table)
    assert "\x1b" not in out
    assert not re.search("[─-╿]", out)
    assert re.search(
        r"^cpu: 15 rows: 2 PASS, 1 WIN, 1 CHANGED \(not judged\), .*, 1 CHANGED, 2 REGRESSION; "
        r"device cpu; torch 9\.9\.0; \d+ s$",
        out,
        re.MULTILINE,
    ) or pytest.fail(out)
    assert "3 failed, 1 passed" in out, "a red row fails its test, not the teardown"
    assert "GB0007 at model.py:3" in out, "the failure shows the evidence"
    assert "compile/pass/graph_breaks: 13 breaks" in project.pytest("-m", "cpu", "-n", "0", "-v").out


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
    result = project.pytest("-m", "cpu")
    assert result.code == 1
    assert project.verdicts() == {"early": "MISSING", "hang": "MISSING", "good": "PASS"}
    assert "crashed while running" in project.reason("early")
    assert "crashed while running" in project.reason("hang")
    assert project.record().complete


def test_green_requires_exactly_the_reviewed_rows(project: Project) -> None:
    project.tests(GOOD)
    project.tests(GOOD.replace("good", "other"), "suites/compile/test_b.py")
    other = Reviewed(13, "breaks", "derived", test="suites/compile/test_b.py::test_other[cpu]")
    good, gone = counted("test_good"), counted("test_gone")

    project.baseline(good=good, other=other)
    assert project.pytest("-m", "cpu", "-n", "0").code == 0
    assert not project.record().red

    project.baseline(other=other)
    assert project.pytest("-m", "cpu", "-n", "0").code == 1, "a row was removed from the baseline"
    assert project.verdicts() == {"good": "MISSING", "other": "PASS"}

    project.baseline(good=good, other=other, gone=gone)
    assert project.pytest("-m", "cpu", "-n", "0").code == 1, "the test of a row was removed"
    assert project.verdicts() == {"good": "PASS", "other": "PASS", "gone": "MISSING"}
    assert "its test is gone" in project.reason("gone")
    assert project.pytest("-m", "cpu", "-n", "0", "suites/compile/test_b.py").code == 0
    assert project.verdicts() == {"other": "PASS"}, "a run of one file is judged by its own rows"

    project.baseline(good=good, other=other, silent=good)
    assert project.pytest("-m", "cpu", "-n", "0", "suites/compile/test_a.py").code == 1
    assert "no longer reports it" in project.reason("silent"), "a selected test must report each of its rows"

    project.tests(GOOD.replace("compile/good", "compile/renamed"))
    project.baseline(good=good, other=other)
    assert project.pytest("-m", "cpu", "-n", "0").code == 1
    assert project.verdicts() == {"good": "MISSING", "renamed": "MISSING", "other": "PASS"}


def test_rebaseline_makes_the_next_run_green_and_is_idempotent(project: Project) -> None:
    project.tests(GOOD)
    first = project.pytest("-m", "cpu", "-n", "0")
    assert first.code == 1, "without a baseline every row is MISSING"
    wrote = project.bumpgate("rebaseline", "--lane", "cpu")
    assert (wrote.code, wrote.err) == (0, "")
    assert "compile/good/graph_breaks  - -> 13" in wrote.out
    path = project.root / "baselines/cpu.json"
    text = path.read_bytes()
    assert load(path, "cpu").made_with["torch"] == "9.9.0"
    assert project.pytest("-m", "cpu", "-n", "0").code == 0
    again = project.bumpgate("rebaseline", "--lane", "cpu")
    assert (again.code, path.read_bytes()) == (0, text)
    assert "nothing to accept" in again.out


def test_tier_rows_are_required_in_their_own_environment_only(project: Project) -> None:
    """A plain run requires none of them; a tier run requires those of its tests, and is accepted under its triton."""
    project.tests(GOOD)
    path = "suites/kernels/codegen/test_kernels.py"
    body = GOOD.replace("(lane", "(lane, version").replace(
        '@lanes("cpu")', '@lanes("cpu")\n@pytest.mark.parametrize("version", ["triton3.7.1"])'
    )
    project.tests(body.replace("compile/good", "compile/tier-triton3.7.1"), path)
    project.write(
        "suites/kernels/codegen/conftest.py",
        "import os\ncollect_ignore_glob = os.environ.get('NONE', '').split()",
    )
    rows = {
        v: Reviewed(13, "breaks", "derived", test=f"{path}::test_good[triton{v}-cpu]")
        for v in ("3.7.1", "3.9.0")
    }
    accepted = {f"tier-triton{v}": reviewed for v, reviewed in rows.items()}

    project.baseline(good=counted("test_good"), **accepted)
    assert project.pytest("-m", "cpu", "-n", "0", NONE="test_*").code == 0, (
        "no tier runs, and none is required"
    )
    assert project.verdicts() == {"good": "PASS"}
    assert project.pytest("-m", "cpu", "-n", "0", "suites/kernels/codegen").code == 0
    assert project.verdicts() == {"tier-triton3.7.1": "PASS"}, "rows of another version are not required"

    project.baseline(good=counted("test_good"), silent=rows["3.7.1"], **accepted)
    assert project.pytest("-m", "cpu", "-n", "0", "suites/kernels/codegen").code == 1, (
        "its own rows are required"
    )
    assert project.verdicts() == {"tier-triton3.7.1": "PASS", "silent": "MISSING"}

    project.baseline(good=counted("test_good"))
    project.write("triton-3.7.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: triton\nVersion: 3.7.1\n")
    assert project.pytest("-m", "cpu", "-n", "0", "suites/kernels/codegen").code == 1
    assert project.record().provenance["triton"] == "3.7.1"
    wrote = project.bumpgate("rebaseline", "--lane", "cpu")
    assert (wrote.code, wrote.err) == (0, "")
    baseline = load(project.root / "baselines/cpu.json", "cpu")
    assert set(baseline.rows) == {"compile/good/graph_breaks", "compile/tier-triton3.7.1/graph_breaks"}
    assert baseline.made_with["triton"] is None, "the lane's build is unchanged"
    assert project.pytest("-m", "cpu", "-n", "0", "suites/compile").code == 0
    assert "another build is adopted" in project.bumpgate("rebaseline", "--lane", "cpu").err


def test_kernel_that_this_triton_does_not_launch_is_listed(project: Project) -> None:
    """Its row has no value for this version; a row with one stays required, and --prune drops that value."""
    path = "suites/kernels/codegen/test_kernels.py"
    called = 'row.code("compile/new/graph_breaks", "spills=0", seen=3, rule="C6")'
    project.tests(
        GOOD.replace('row.count("compile/good/graph_breaks", 13, expected=13, **COUNT)', called), path
    )
    project.write("triton-3.9.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: triton\nVersion: 3.9.0\n")
    rows = {
        name: Reviewed(
            None, "counts", "code", test=f"{path}::test_good[cpu]", values=dict.fromkeys(versions, "spills=0")
        )
        for name, versions in {"old": ["3.7.1"], "new": ["3.9.0"], "both": ["3.7.1", "3.9.0"]}.items()
    }
    project.baseline(**rows)
    run = ("-m", "cpu", "-n", "0", "--gate", "--part", "suites/kernels/codegen")
    result = project.pytest(*run)
    assert (result.code, project.verdicts()) == (1, {"new": "PASS", "both": "MISSING"}), result.out
    listed = "compile/old/graph_breaks: triton 3.9.0 does not launch this kernel"
    assert project.record().provenance["not_run"] == [listed]
    assert f"NOT RUN       {listed}" in result.out

    assert project.bumpgate("rebaseline", "--lane", "cpu", "--prune").code == 0
    again = project.pytest(*run)
    assert (again.code, project.verdicts()) == (0, {"new": "PASS"}), again.out


@pytest.mark.parametrize("workers", ["0", "1"])
def test_empty_selection_is_not_green(project: Project, workers: str) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    result = project.pytest("-m", "cpu", "-k", "nothing", "-n", workers)
    assert result.code == 5
    assert result.out.count("nothing was selected: not green") == 1


def test_session_does_not_import_torch(project: Project) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    assert project.pytest("-m", "cpu", "-n", "0").code == 0
    assert not (project.root / "torch-was-imported").exists()
    here = project.record().provenance
    assert (here["torch"], here["torch_git"]) == ("9.9.0", "f00d")
    assert here["wall_seconds"] > 0
    assert {
        "lane",
        "cpu",
        "cores",
        "python",
        "platform",
        "commit",
        "dirty",
        "command",
        "started",
    } <= here.keys()


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
    project.baseline(good=counted("test_good"), z=counted("test_z"))
    process = project.start("-m", "pytest", "-m", "cpu", "-n", workers)
    until = time.monotonic() + 60
    while not (project.root / "there").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)
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
    until = time.monotonic() + 60
    while not project.record().judgements and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(int((project.root / "there").read_text()), 0)  # raises if the worker has ended
    assert project.verdicts() == {"good": "PASS", "z": "MISSING"}


def test_run_stopped_early_is_not_complete(project: Project) -> None:
    project.tests("@lanes('cpu')\ndef test_first(lane):\n    assert 1 == 2\n" + GOOD)
    project.baseline(good=counted("test_good"), gone=counted("test_gone"))
    whole = project.pytest("-m", "cpu", "-n", "0")
    assert (whole.code, "NOT COMPLETE" in whole.out) == (1, False)
    assert [j.gone for j in project.record().judgements] == [True, False]
    cut = project.pytest("-m", "cpu", "-n", "0", "-x")
    assert (cut.code, "NOT COMPLETE" in cut.out) == (1, True)
    assert not project.record().complete
    assert [j.gone for j in project.record().judgements] == [False, False], (
        "a test that did not run is not gone"
    )
    assert any("assert 1 == 2" in str(problem) for problem in project.record().problems)


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
        result = project.pytest(*select, "--gate", "-n", workers)
        assert result.code == 1
        part, *problems = project.record().problems
        assert str(part).startswith("part of the lane: all 1 reviewed rows, but not all tests")
        assert [p.test.split("::")[1].split("[")[0] for p in problems] == [
            "test_left_out",
            "test_skip",
            "test_xpass",
        ]
        assert "not today" in problems[1].why
    assert " failed" not in project.pytest("-m", "cpu", "--gate", "-n", "0").out, (
        "BUMPGATE_GATE is set in the tests"
    )


def test_module_that_fails_to_import_loses_its_rows(project: Project) -> None:
    project.tests("import no_such_module\n")
    project.tests(GOOD, "suites/compile/test_b.py")
    good = Reviewed(13, "breaks", "derived", test="suites/compile/test_b.py::test_good[cpu]")
    project.baseline(lost=counted("test_lost"), good=good)
    assert project.pytest("-m", "cpu", "-n", "0", "--continue-on-collection-errors").code == 1
    assert project.verdicts() == {"lost": "MISSING", "good": "PASS"}
    assert "No module named 'no_such_module'" in project.reason("lost")
    assert project.pytest("-m", "cpu").code != 0
    assert not project.record().complete
    (problem,) = project.record().problems
    assert "could not be collected: " in str(problem)
    assert project.pytest("-m", "cpu", "-n", "0", "suites/compile/test_a.py").code != 0
    assert project.verdicts() == {"lost": "MISSING"}


def test_node_ids_do_not_depend_on_the_directory(project: Project) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    assert project.pytest("-m", "cpu", "-n", "0", ".", cwd="suites/compile").code == 0
    judgement = project.record().judgements[0]
    assert judgement.row.test == "suites/compile/test_a.py::test_good[cpu]"


@pytest.mark.parametrize(
    ("args", "full"),
    [
        (("-m", "cpu", "suites"), True),
        (("-m", "cpu", "suites/compile"), False),
        (("-m", "cpu", "-k", "good"), False),
        (("-m", "cpu", "--deselect", "suites/other.py"), False),
        (("-m", "cpu", "--ignore", "suites/other"), False),
        (("-m", "cpu", "-o", "testpaths=suites/compile"), False),
        (("-m", "cpu and not h200"), False),
    ],
    ids=str,
)
def test_narrowed_run_is_not_full(project: Project, args: tuple[str, ...], full: bool) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    assert project.pytest(*args, "-n", "0").code == 0
    assert project.record().provenance["full_run"] is full


def test_row_requires_a_lane_and_a_unique_id(project: Project) -> None:
    body = GOOD + GOOD.replace("test_good", "test_twin") + "def test_nowhere(row):\n    pass\n"
    project.tests(body)
    project.baseline(good=counted("test_good"))
    one = project.pytest("-m", "cpu", "-n", "0")
    assert one.code == 1
    assert "graph_breaks': already reported by suites/compile/test_a.py::test_good[cpu]" in one.out
    two = project.pytest("-m", "cpu", "-n", "2")
    assert two.code == 1
    assert any("was already reported by" in str(problem) for problem in project.record().problems)
    lost = project.pytest("-n", "0", "suites/compile/test_a.py::test_nowhere")
    assert lost.code == 1
    assert "has rows but no lane" in lost.out


def test_red_row_in_teardown_or_xfail_fails_the_run(project: Project) -> None:
    body = """
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
    """
    project.tests(body)
    result = project.pytest("-m", "cpu", "-n", "0")
    assert (result.code, "1 passed, 1 xfailed, 1 error" in result.out) == (1, True), result.out
    assert project.verdicts() == {"late": "REGRESSION", "hidden": "REGRESSION"}
    assert project.pytest("-m", "cpu", "-n", "0", "-k", "hidden").code == 1, "xfail does not hide a row"
