"""Attempts to make a lane green although a row is wrong or a test fails: none of them exits with 0 under --gate.

Each attack is run on both faults. docs/trust.md lists the kinds, with the tests of those that are not here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import pytest

from bumpgate.core.baseline import Reviewed
from tests.support.project import GOOD, Project, counted

GATE = ("-m", "cpu", "-n", "0", "--gate")
LAW = '@lanes("cpu")\ndef test_law(lane):\n    assert 1 + 1 == {sum}\n'
TESTS = (
    "suites/compile/test_a.py::test_good[cpu]",
    "suites/model/test_b.py::test_other[cpu]",
    "suites/model/test_law.py::test_law[cpu]",
)

# Of each fault: the value of the row, the sum that the other test expects, and the test that is red.
FAULTS = {"row": (14, 2, TESTS[0]), "test": (13, 3, TESTS[2])}

# FAULTY and FILE are those of the red test. Name -> text added to suites/conftest.py.
HOOKS = {
    "items filtered without a word": """
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(items):
            items[:] = [item for item in items if "FAULTY" not in item.nodeid]
    """,
    "items filtered with pytest_deselected": """
        def pytest_collection_modifyitems(config, items):
            config.hook.pytest_deselected(items=[item for item in items if "FAULTY" in item.nodeid])
            items[:] = [item for item in items if "FAULTY" not in item.nodeid]
    """,
    "files ignored": """
        collect_ignore = ["FILE".removeprefix("suites/")]
    """,
    "every test skipped": """
        def pytest_collection_modifyitems(items):
            [item.add_marker(pytest.mark.skip) for item in items]
    """,
    "every test expected to fail": """
        def pytest_collection_modifyitems(items):
            [item.add_marker(pytest.mark.xfail) for item in items]
    """,
    "no test loop": """
        def pytest_runtestloop():
            return True
    """,
    "no protocol": """
        def pytest_runtest_protocol():
            return True
    """,
    "test functions not called": """
        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call():
            return True
    """,
    "failures reported as passes": """
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_makereport():
            report = yield
            report.outcome = "passed"
            return report
    """,
    "exit status of the session": """
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_sessionfinish(session):
            try:
                return (yield)
            finally:
                session.exitstatus = 0
    """,
    "another fixture row": """
        @pytest.fixture
        def row():
            return lambda *_, **__: None
    """,
    "pytest.exit in a test": """
        @pytest.fixture(autouse=True)
        def ended():
            pytest.exit("done", returncode=0)
    """,
    "SystemExit in a test": """
        @pytest.fixture(autouse=True)
        def ended():
            raise SystemExit(0)
    """,
    "os._exit in a test": """
        @pytest.fixture(autouse=True)
        def ended():
            os._exit(0)
    """,
    "sys.exit while conftest is loaded": "raise SystemExit(0)",
    "os._exit while conftest is loaded": "os._exit(0)",
    "exit of the C library in a test": """
        @pytest.fixture(autouse=True)
        def ended():
            import ctypes
            ctypes.CDLL(None).exit(0)
    """,
    "_exit of the C library in a test": """
        @pytest.fixture(autouse=True)
        def ended():
            import ctypes
            ctypes.CDLL(None)._exit(0)
    """,
    "another program in a test": """
        @pytest.fixture(autouse=True)
        def ended():
            os.execv("/bin/true", ["true"])
    """,
    "os._exit at the end of pytest": """
        def pytest_unconfigure():
            os._exit(0)
    """,
    "os._exit at the end of Python": """
        import atexit
        atexit.register(os._exit, 0)
    """,
}
# Name -> options.
OPTIONS = {
    "ignored folder": "--ignore=FILE",
    "keyword": "-k=not(FAULTY)",
    "deselected": "--deselect=FILE",
    "path": "suites/model/test_b.py",
    "other test paths": "-o testpaths=suites/model/test_b.py",
    "other file names": "-o python_files=test_b.py",
    "other functions": "-o python_functions=test_other",
    "folders not entered": "-o norecursedirs=compile -o python_files=test_b.py",
    "set-up only": "--setup-only",
    "set-up plan": "--setup-plan",
    "set-up plan of a declared part": "--setup-plan --part FILE",
    "collection only": "--collect-only",
    "no conftest": "--noconftest",
    "conftest cut": "--confcutdir=suites/model",
    "without the session": "-p no:bumpgate-session",
    "without the rows": "-p no:bumpgate-rows",
    "without the plugin": "-p no:bumpgate.plugin",
    "failures are expected": "--runxfail",
    "first failure ends it": "-x",
    "no options of the file": "-o addopts=",
}
VARIABLES: dict[str, Mapping[str, str]] = {
    "PYTHONOPTIMIZE": {"PYTHONOPTIMIZE": "1"},
    "PYTEST_ADDOPTS": {"PYTEST_ADDOPTS": "-k=not(FAULTY)"},
    "a variable of a gate": {"BUMPGATE_UNTIMED": "1"},
    "a forged parent": {"BUMPGATE_UNTIMED": "1", "BUMPGATE_PARENT": "1"},
}


@pytest.fixture
def lane(project: Project) -> Project:
    """A project with two rows and a test without a row, all of them reviewed."""
    project.tests(GOOD.replace("good", "other"), "suites/model/test_b.py")
    other = Reviewed(13, "breaks", "derived", test=TESTS[1])
    project.baseline(good=counted("test_good"), other=other)
    project.write("baselines/cpu.tests", "".join(f"{test}\n" for test in sorted(TESTS)))
    return project


def plant(lane: Project, fault: str) -> None:
    """Make a row wrong, or a test without a row fail."""
    breaks, total, _ = FAULTS.get(fault, (13, 2, ""))
    lane.tests(GOOD.replace('graph_breaks", 13', f'graph_breaks", {breaks}'))
    lane.tests(LAW.replace("{sum}", str(total)), "suites/model/test_law.py")


def test_lane_without_a_fault_is_green(lane: Project) -> None:
    plant(lane, "")
    result = lane.pytest(*GATE)
    assert result.code == 0, result.out + result.err


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("attack", [*HOOKS, *OPTIONS, *VARIABLES])
def test_no_attack_makes_a_fault_green(lane: Project, attack: str, fault: str) -> None:
    plant(lane, fault)
    file, _, name = FAULTS[fault][2].partition("::")

    def aimed(text: str) -> str:
        return text.replace("FAULTY", name.partition("[")[0]).replace("FILE", file)

    if attack in HOOKS:
        body = "import os\nimport pytest\n" + textwrap.dedent(HOOKS[attack])
        lane.write("suites/conftest.py", aimed(body))
    options = aimed(OPTIONS.get(attack, "")).split()
    variables = {key: aimed(value) for key, value in VARIABLES.get(attack, {}).items()}
    result = lane.pytest(*GATE, *options, **variables)
    assert result.code != 0, result.out + result.err
    assert not (lane.root / "record.json").exists() or lane.record().red


REWRITTEN = {
    "pytest.ini": "[pytest]\ntestpaths = suites/model/test_b.py\npythonpath = .\naddopts = -p bumpgate.plugin\n",
    "setup.cfg": "[tool:pytest]\naddopts = --collect-only\n",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("file", REWRITTEN)
def test_no_configuration_makes_a_fault_green(lane: Project, file: str, fault: str) -> None:
    plant(lane, fault)
    lane.write(file, REWRITTEN[file])
    assert lane.pytest(*GATE).code != 0


@pytest.mark.parametrize("change", ["renamed", "removed", "unmarked", "renamed file"])
def test_lost_test_is_red(lane: Project, change: str) -> None:
    """The test without a row is gone, whatever the reason."""
    plant(lane, "")
    file = "suites/model/test_law.py"
    text = (lane.root / file).read_text()
    if change == "renamed file":
        (lane.root / file).rename(lane.root / "suites/model/test_laws.py")
    else:
        edits = {"renamed": ("test_law", "test_laws"), "removed": (LAW.replace("{sum}", "2"), "")}
        lane.write(
            file, text.replace(*edits.get(change, ('@lanes("cpu")\ndef test_law(lane)', "def test_law()")))
        )
    result = lane.pytest(*GATE)
    assert result.code == 1, result.out + result.err
    assert TESTS[2] in result.out


@pytest.mark.parametrize("row", [True, False], ids=["row", "no row"])
def test_rerun_to_green_is_red(lane: Project, row: bool) -> None:
    """pytest-rerunfailures repeats a failed test; bumpgate reads its report of the first attempt."""
    pytest.importorskip("pytest_rerunfailures")
    plant(lane, "")
    once = "    import pathlib\n    seen = pathlib.Path('seen')\n    first = not seen.exists()\n    seen.touch()\n"
    path, text = (
        ("suites/compile/test_a.py", GOOD) if row else ("suites/model/test_law.py", LAW.replace("{sum}", "2"))
    )
    head, _, body = text.partition("):\n")
    lane.tests(f"{head}):\n{once}    assert not first\n{body}", path)
    assert lane.pytest(*GATE, "-p", "pytest_rerunfailures", "--reruns", "2").code == 1
