"""`bumpgate doctor`: a healthy machine, and every kind of defect with its code, reason and fix (rule C28)."""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bumpgate.doctor import abi
from bumpgate.doctor import command as doctor
from bumpgate.doctor.checks import CHECKS
from bumpgate.doctor.examination import Check, CheckResult, Defect, NotRun, Part, Status
from bumpgate.env import store
from bumpgate.env.locks import Locked, Wheel, lock_text, read_lock
from bumpgate.env.store import sha256_of
from suites.support.planted import planted
from tests.support.local_index import LocalIndex, fake_wheel
from tests.support.machine import LANE, LOCK, Machine, defects
from tests.support.tree import ROOT

Break = Callable[[Machine], object]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def cli(machine: Machine, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from bumpgate.cli import main; main()"
    command = [sys.executable, "-c", program, str(ROOT), "doctor", *arguments]
    return subprocess.run(
        command, cwd=machine.root, env=machine.environment, capture_output=True, text=True, timeout=600
    )


def by_code(findings: list[CheckResult], code: str) -> CheckResult:
    return next(f for f in findings if f.code == code and f.status is not Status.OK)


@pytest.fixture
def nightlies(machine: Machine, tmp_path: Path) -> Iterator[LocalIndex]:
    """An index that a machine reads, on which the lane of the cpu needs torch alone."""
    machine.edit("pyproject.toml", 'cpu = [{ include-group = "suite" }, ', "cpu = [")
    with LocalIndex([fake_wheel(tmp_path / "wheels", "torch", "2.14.0")]) as index:
        machine.environment |= {"UV_DEFAULT_INDEX": index.url, "BUMPGATE_HOME": str(tmp_path / "home")}
        yield index


def test_newest_nightly_is_built_and_examined(
    machine: Machine, nightlies: LocalIndex, tmp_path: Path
) -> None:
    """Against its own lock: that it is not the adopted torch is no defect."""
    for day in (1, 2):
        text = {"torch/__init__.py": "raise ImportError('libtorch_cpu.so: undefined symbol')"}
        text["torch/version.py"] = f"__version__ = '2.15.0.dev2026110{day}+cpu'\ncuda = None\n"
        nightlies.add(fake_wheel(tmp_path / "wheels", "torch", f"2.15.0.dev2026110{day}+cpu", text))
    done = cli(machine, "--nightly", "torch")
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("torch==2.15.0.dev20261102: the newest nightly that resolves in lane cpu\n")
    shown = {line.split()[1]: line for line in lines if line.startswith(("ok ", "DEFECT "))}
    assert shown["BG202"].endswith("as in its own lock: torch ==2.15.0.dev20261102+cpu")
    assert shown["BG301"].startswith("DEFECT ")
    assert shown["BG301"].endswith("ImportError: libtorch_cpu.so: undefined symbol")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (
            "",
            "--nightly torch: none is newer than lane cpu's and resolves: name an index of nightlies in UV_INDEX",
        ),
        ("http://127.0.0.1:1/index", "does not answer"),
    ],
    ids=["releases alone", "no network"],
)
def test_absent_nightly_is_one_line(machine: Machine, nightlies: LocalIndex, index: str, words: str) -> None:
    machine.environment |= {"UV_DEFAULT_INDEX": index} if index else {}
    done = cli(machine, "--nightly", "torch")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (4, "", 1), done.stderr
    assert words in done.stderr


def test_doctor_reports_this_machine_healthy(machine: Machine) -> None:
    """The complete command; torch is only imported in subprocesses without a visible device."""
    done = cli(machine, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    reported = json.loads(done.stdout)
    assert (reported["schema"], reported["lane"], reported["healthy"]) == (1, "cpu", True)
    assert [c["code"] for c in reported["checks"]] == [check.code for check in CHECKS]
    assert {c["status"] for c in reported["checks"]} == {"ok"}
    assert all(set(c) == {"code", "part", "check", "status", "reason", "fix"} for c in reported["checks"])
    assert machine.torch_imports.count("''") >= 3
    assert set(machine.torch_imports) == {"''"}


FINDER = """
import importlib.util
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "kernels":
            place = {!r}
            file, places = place + "/__init__.py", [place]
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=places)
sys.meta_path.insert(0, Finder())
"""


def foreign_kernels(machine: Machine) -> None:
    """Resolved by an import hook before the path search, as in an editable install."""
    machine.at_start(FINDER.format(str(machine.package("other_kernels"))))


def variable(name: str, value: str) -> Break:
    return lambda machine: machine.environment.update({name: value})


def cache_is_a_file(machine: Machine) -> None:
    machine.environment["XDG_CACHE_HOME"] = str(machine.root / "pyproject.toml")


def little_space(machine: Machine) -> None:
    machine.edit(
        "launch/contract.toml",
        "minimum_free_bytes = 1_073_741_824",
        f"minimum_free_bytes = {1 << 62}",
        lock=True,
    )


def edited_contract(machine: Machine) -> None:
    machine.edit("launch/contract.toml", "deterministic_steps = 20", "deterministic_steps = 2")


def crashing_interpreter(machine: Machine) -> None:
    machine.python = machine.program("python-that-crashes", "kill -SEGV $$")


ENVIRONMENT: dict[str, tuple[Break, str, str, str]] = {
    "an interpreter that crashes": (crashing_interpreter, "BG101", "does not answer: killed by SIGSEGV", "--python"),
    "a python that the lane was not adopted with": (
        lambda m: m.edit(LANE, 'python = ">=3.10"', 'python = "==3.9.*"'),
        "BG102", "requires CPython ==3.9.*", "uv venv --python '==3.9.*'",
    ),
    "PYTHONOPTIMIZE": (variable("PYTHONOPTIMIZE", "1"), "BG103", "PYTHONOPTIMIZE=1: asserts", "unset PYTHONOPTIMIZE"),
    "a foreign package kernels": (foreign_kernels, "BG104", "other_kernels, not", "uninstall kernels"),
    "kernels first on PYTHONPATH": (lambda m: m.package("kernels"), "BG104", "PYTHONPATH puts", "export PYTHONPATH="),
    "an edited contract.toml": (
        edited_contract, "BG105", "reviewed was", "git checkout launch/contract.toml",
    ),
    "no contract.lock": (
        lambda m: (m.root / "launch/contract.lock").unlink(), "BG105", "contract.lock cannot be read", "sha256sum"
    ),
    "a cache turned off": (
        variable("TORCHINDUCTOR_FX_GRAPH_CACHE", "0"), "BG106", "the contract requires 1", "unset TORCHINDUCTOR_FX",
    ),
    "NCCL variables without a rank": (
        variable("TORCH_NCCL_ENABLE_MONITORING", "0"), "BG106", "without LOCAL_RANK", "unset TORCH_NCCL",
    ),
    "compiling turned off": (variable("TORCH_COMPILE_DISABLE", "1"), "BG106", "nothing is compiled", "unset TORCH_C"),
    "a cache directory that is not there": (
        variable("TORCHINDUCTOR_CACHE_DIR", "/absent"), "BG107", "=/absent does not exist", "mkdir -p /absent",
    ),
    "no place for the default cache": (cache_is_a_file, "BG107", "/pyproject.toml is a file", "export TORCHINDUCTOR"),
    "an unwritable cache": (variable("TRITON_CACHE_DIR", "/proc"), "BG108", "/proc cannot be written", "export TRITON"),
    "a disk with too little space": (little_space, "BG109", "MiB free, the contract requires", "free space"),
    "no temporary directory": (variable("TMPDIR", "/absent"), "BG110", "TMPDIR=/absent", "export TMPDIR"),
    "no g++": (variable("PATH", "/absent"), "BG111", "g++ is not on PATH", "apt-get install g++"),
    "a compiler that fails": (variable("CXX", "false"), "BG111", "does not compile", "export CXX"),
}  # fmt: skip


def planted_faults_of(table: dict[str, object]) -> pytest.MarkDecorator:
    cases = [pytest.param(fault, marks=planted("C28", fault)) for fault in table]
    return pytest.mark.parametrize("fault", cases, ids=lambda fault: fault.replace(" ", "-"))


def expect(findings: list[CheckResult], code: str, reason: str, fix: str) -> None:
    found = by_code(findings, code)
    assert (reason in found.reason, fix in found.fix) == (True, True), found
    assert "\n" not in found.reason + found.fix


@planted_faults_of(ENVIRONMENT)
def test_environment_defect_is_found_before_importing_torch(machine: Machine, fault: str) -> None:
    plant, code, *words = ENVIRONMENT[fault]
    plant(machine)
    findings = machine.examine()
    assert defects(findings) == [code]
    expect(findings, code, *words)
    later = [f for f in findings if f.part is not Part.ENVIRONMENT]
    assert {f.status for f in later} == {Status.NOT_RUN}
    assert later[0].reason.startswith(code)
    assert machine.torch_imports == []


def checks(*titles: str) -> list[Check]:
    return [check for check in CHECKS if {check.title, check.code} & {*titles}]


@planted("C28", "a cache disk that refuses the write itself")
def test_full_cache_disk_is_a_separate_defect(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = checks("cache directories")
    assert defects(machine.examine(checks=cache)) == []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        findings = machine.examine(checks=cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (defects(findings), "File too large" in findings[0].reason) == (["BG109"], True)
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=3 << 20))
    findings = machine.examine(checks=cache)
    assert ": 3 MiB free, the contract requires 1024 MiB" in findings[0].reason


def wrong_label(machine: Machine) -> None:
    machine.package("flash_attn", version="2.8.3+cu130torch2.10")


def not_an_extension(machine: Machine) -> None:
    place = machine.package("causal_conv1d", version="1.7.0")
    (place / "_C.so").write_bytes(b"cut off")
    record = machine.packages / "causal_conv1d-1.7.0.dist-info" / "RECORD"
    record.write_text(record.read_text() + "causal_conv1d/_C.so,,\n")


TORCH = 'name = "torch"\nversion = "2.13.0+cpu"'
WHEEL = "\n[wheels.causal-conv1d]\nversion = '1.7.0'\ntorch = '2.13.0'\n"


def kernel_wheels(machine: Machine, tables: str = WHEEL) -> None:
    with (machine.root / LANE).open("a") as file:
        file.write(tables)


def another_numpy(machine: Machine) -> None:
    machine.edit(LANE, 'pins = ["torch"]', 'pins = ["torch", "numpy"]')
    machine.edit(LOCK, 'version = "2.4.6"', 'version = "0.1"')


VERSIONS: dict[str, tuple[Break, str, str, str]] = {
    "torch is missing": (Machine.bare_python, "BG201", "torch is not installed", "pip install 'torch==2.13.0'"),
    "another torch than the lane's": (
        lambda m: m.edit(LOCK, TORCH, TORCH.replace("2.13.0", "2.12.0")),
        "BG202", "lane cpu was adopted with ==2.12.0", "pip install 'torch==2.12.0'",
    ),
    "a source tree of torch before the installed one": (
        lambda m: m.package("torch", files={"version.py": "__version__ = '2.14.0a0+gitabc'"}),
        "BG203", "states 2.14.0a0+gitabc", "clear PYTHONPATH",
    ),
    "two torch distributions": (lambda m: m.torch("2.13.0+cpu"), "BG203", "two torch distributions", "pip uninstall"),
    "another package than the lane's": (
        another_numpy, "BG204", "lane cpu was adopted with ==0.1", "pip install 'numpy==0.1'",
    ),
    "a kernel wheel is missing": (
        kernel_wheels, "BG205", "causal-conv1d is not installed", "causal-conv1d==1.7.0",
    ),
    "a package of the suites is missing": (
        lambda m: m.edit("pyproject.toml", "suite = [", 'suite = [\n    "absent-package>=2",'),
        "BG206", "need absent-package>=2 (absent)", "pip install 'absent-package>=2'",
    ),
    "a wheel label that names another torch": (wrong_label, "BG207", "built for torch 2.10, not 2.13", "flash_attn"),
    "an extension that is not a library": (not_an_extension, "BG208", "cannot be audited: nm:", "causal_conv1d"),
}  # fmt: skip


@planted_faults_of(VERSIONS)
def test_wrong_versions_are_found_without_importing_torch(machine: Machine, fault: str) -> None:
    plant, code, *words = VERSIONS[fault]
    plant(machine)
    findings = machine.examine(Part.VERSIONS, Part.ACCELERATOR)
    assert code in defects(findings)
    expect(findings, code, *words)
    assert {f.status for f in findings if f.part is Part.ACCELERATOR} == {Status.NOT_RUN}
    assert machine.torch_imports == []


@planted("C28", "two kernel wheels are missing, one of them is in the wheel store")
def test_one_command_installs_the_missing_kernel_wheels(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUMPGATE_STORE", str(tmp_path / "store"))
    made = fake_wheel(tmp_path / "made", "causal-conv1d", "1.7.0")
    wheel = Wheel(made.name, sha256_of(made))
    stored = store.put(wheel, [made.read_bytes()])
    path = machine.root / LOCK
    lock = read_lock(path)
    moved = replace(lock, packages=(*lock.packages, Locked("causal-conv1d", "1.7.0", (wheel,))))
    path.write_text(lock_text(moved))
    second = WHEEL.replace("causal-conv1d", "mamba-ssm").replace("1.7.0", "2.3")
    kernel_wheels(machine, WHEEL + second)
    findings = [f for f in machine.examine(Part.VERSIONS) if f.code == "BG205"]
    (command,) = {f.fix for f in findings}
    assert len(findings) == 2
    assert command.endswith(f" --find-links {stored.parent} causal-conv1d==1.7.0 mamba-ssm==2.3")
    target = tmp_path / "target"
    flags = ["--no-deps", "--no-index", "--target", str(target)]
    ran = subprocess.run([*shlex.split(command)[:-1], *flags], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert (target / "causal_conv1d-1.7.0.dist-info").is_dir()


@planted("C28", "no kernel wheel, next to another torch than the lane's")
def test_adopted_wheels_are_not_offered_to_another_torch(machine: Machine) -> None:
    machine.edit(LOCK, TORCH, TORCH.replace("2.13.0", "2.12.0"))
    kernel_wheels(machine, WHEEL.replace("2.13.0", "2.12.0"))
    found = by_code(machine.examine(Part.VERSIONS), "BG205")
    assert found.fix == f"bumpgate wheels plan --lane cpu --python {machine.python}"


@pytest.mark.parametrize(
    ("torch", "cuda", "driver", "expected"),
    [
        ("2.11.0+cu130", "13.0", "580.159.04", {}),
        ("2.11.0+cu130", "13.0", "580.65.06", {}),
        pytest.param(
            "2.11.0+cu130", "13.0", "570.86.15", {"BG210": "driver 570.86.15, CUDA 13.0 needs 580.65.06"},
            marks=planted("C28", "a driver too old for CUDA 13"),
        ),
        pytest.param(
            "2.11.0+cu130", "13.0", "", {"BG210": "no NVIDIA driver answers, CUDA 13.0 needs 580.65.06"},
            marks=planted("C28", "no driver on a GPU lane"),
        ),
        pytest.param(
            "2.12.0.dev20260304+cu128", "12.8", "580.65.06", {"BG209": "CUDA 12.8 is no longer built since torch 2.12"},
            marks=planted("C28", "a CUDA 12.8 build of a torch that has none"),
        ),
        ("2.11.0+cu128", "12.8", "580.65.06", {}),
        ("2.12.0+cu132", "13.2", "580.65.06", {"BG209": "CUDA 13.2 is experimental"}),
        ("2.14.0+cu132", "13.2", "580.65.06", {}),
        ("2.13.0+cu126", "12.6", "580.65.06", {"BG209": "CUDA 12.6 is legacy"}),
        ("2.13.0+cu990", "99.0", "580.65.06", {"BG209": "the contract lists no build for CUDA 99.0"}),
    ],
)  # fmt: skip
def test_cuda_builds_and_drivers(
    machine: Machine, torch: str, cuda: str, driver: str, expected: dict
) -> None:
    machine.torch(torch, cuda)
    machine.program("nvidia-smi", f"echo {driver}" if driver else "echo no devices >&2; exit 9")
    examined = machine.examine(lane="h200", checks=checks("BG209", "BG210"))
    found = {f.code: f for f in examined if f.status is not Status.OK}
    assert found.keys() == expected.keys()
    for code, words in expected.items():
        assert words in found[code].reason
        assert (found[code].status is Status.WARNING) == (code == "BG209" and "no longer" not in words)


TORCHES = {
    "raises": ("raise ImportError('libcudart.so.13: absent')", "exit 1: ImportError: libcudart"),
    "aborts": ("import os; os.abort()", "killed by SIGABRT"),
    "segfaults": ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    "exits": ("raise SystemExit(0)", "printed no result"),
}


@planted_faults_of({f"a torch that {fault} at import": fault for fault in TORCHES})
def test_torch_import_failure_is_reported(machine: Machine, fault: str) -> None:
    text, words = TORCHES[fault.split()[3]]
    machine.torch("2.13.0", text=text)
    findings = machine.examine(Part.INSTRUMENTS)
    assert defects(findings) == ["BG301"]
    expect(findings, "BG301", words, "import torch")
    assert {f.status for f in findings[1:]} == {Status.NOT_RUN}
    assert machine.torch_imports == ["''"], "one child process has imported it"


@planted("C28", "a counter that torch renamed")
def test_silent_instrument_is_reported(machine: Machine) -> None:
    machine.own("bumpgate/plugin/instruments")
    counted, renamed = (f'sum(counters["{name}"]' for name in ("graph_break", "graph_breaks"))
    machine.edit("bumpgate/plugin/instruments/dynamo.py", counted, renamed)
    (found,) = machine.examine(checks=checks("instruments"))
    assert (found.code, "suites/canaries" in found.fix) == ("BG302", True)
    assert found.reason.startswith("canary graph_breaks: CanaryError: ")
    assert "counters['graph_break']: read 0, known 1" in found.reason


@planted("C28", "the autotuning timeout removed")
def test_setting_without_effect_is_reported(machine: Machine) -> None:
    assert defects(machine.examine(checks=checks("BG303"))) == []
    name = "max_autotune_subproc_result_timeout_seconds"
    machine.at_start(f"import torch._inductor.config as c\nc.{name} = None\n")
    findings = machine.examine(checks=checks("BG303"))
    assert (defects(findings), f"{name} is None where" in findings[0].reason) == (["BG303"], True)


SMOKE = '''[wheels.pytest]
torch = "2.13.0"
[wheels.pytest.smoke]
command = ["-c", """
import hashlib, os, sys
case = sys.argv[1]
os.abort() if case == 'crash' else os._exit(0) if case == 'exit' else print(hashlib.sha256(case.encode()).hexdigest())
"""]
device = "{}"
cases = ["fine", "crash", "exit", "fine too"]
'''


@planted("C39", "an installed wheel that crashes on one of its shapes")
def test_installed_wheel_is_smoke_tested(machine: Machine) -> None:
    path = machine.root / LANE
    whole = path.read_text()
    path.write_text(whole + SMOKE.format("cpu"))
    findings = machine.examine(checks=checks("BG402"))
    assert [(f.code, f.reason) for f in findings] == [
        ("BG402", "pytest crash: killed by SIGABRT"),
        ("BG402", "pytest exit: ended with exit code 0 before it had done its work"),
    ]
    assert findings[0].fix.endswith(" pytest")
    path.write_text(whole + SMOKE.format("cuda"))
    (idle,) = machine.examine(checks=checks("BG402"))
    assert (idle.status, idle.reason) == (Status.NOT_RUN, "pytest: needs cuda, which lane cpu does not have")


@planted("C28", "a lane without its device")
def test_device_is_checked_last(machine: Machine) -> None:
    assert [check.code for check in CHECKS if check.part is Part.ACCELERATOR] == ["BG401", "BG402"]
    assert CHECKS[-2].code == "BG401"
    machine.torch("2.11.0+cu130", "13.0", "cuda = None")
    findings = machine.examine(lane="h200", checks=[CHECKS[-2]])
    assert defects(findings) == ["BG401"]
    assert "no NVIDIA H200" in findings[0].reason


NOT_THE_CONTRACT = "contract.toml: not the contract"


@pytest.mark.parametrize(
    ("arguments", "file", "content", "words"),
    [
        (("--lane", "gpu"), "", "", "unknown lane 'gpu'; lanes: cpu, h100, h100x4"),
        (("--python", "/absent/python"), "", "", "--python /absent/python: no such interpreter"),
        (("--frob",), "", "", "--frob"),
        ((), "launch/contract.toml", "schema = ", f"{NOT_THE_CONTRACT} (Invalid value"),
        ((), "launch/contract.toml", "schema = 1", f"{NOT_THE_CONTRACT} (caches is missing); restore it"),
        ((), LANE, "wheel = 2", "lanes/cpu/lane.toml: unknown field 'wheel'"),
    ],
)
def test_bad_input_is_one_line_and_exit_4(
    machine: Machine, arguments: tuple[str, ...], file: str, content: str, words: str
) -> None:
    if file:
        (machine.root / file).write_text(content)
    done = cli(machine, *arguments)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (4, "", 1)
    assert words in done.stderr


def test_defect_exits_1_and_text_agrees_with_json(machine: Machine) -> None:
    machine.environment["TORCHINDUCTOR_CACHE_DIR"] = "/absent"
    plain, as_json = cli(machine), cli(machine, "--json")
    assert (plain.returncode, as_json.returncode, plain.stderr) == (1, 1, "")
    line = "DEFECT        BG107  cache directories: TORCHINDUCTOR_CACHE_DIR=/absent does not exist\n"
    fix = "              -> mkdir -p /absent, or export TORCHINDUCTOR_CACHE_DIR"
    assert line + fix in plain.stdout
    assert plain.stdout.splitlines()[-1] == "doctor: lane cpu: not fit: 8 ok, 1 DEFECT, 11 not run"
    document = json.loads(as_json.stdout)
    assert not document["healthy"]
    assert [c["code"] for c in document["checks"] if c["status"] == "DEFECT"] == ["BG107"]
    assert machine.torch_imports == []


def test_terminal_rendering_keeps_complete_text() -> None:
    finding = CheckResult(
        "BG107", Part.ENVIRONMENT, "cache directories", Status.DEFECT, "y" * 90, "mkdir -p " + "z" * 90
    )
    shown = doctor.render([finding], terminal=True)
    assert "\x1b[" in shown
    assert (shown.count("y"), shown.count("z")) == (90, 90)
    assert "\x1b[" not in doctor.render([finding])


BAD, OLD = Defect("it is bad", "fix it"), Defect("it is old", "renew it", "old", warning=True)


def results(*yielded: Defect | NotRun | str) -> list[tuple[str, Status, str]]:
    def examine(site: Any) -> Iterator[Defect | NotRun | str]:
        yield from yielded

    site: Any = None
    check = Check("own", next(iter(Part)), "a title", examine)
    return [(found.code, found.status, found.reason) for found in check.run(site)]


@pytest.mark.parametrize("first", ["fine", NotRun("no compiler")], ids=["text", "not run"])
def test_defects_after_another_result_are_reported(first: str | NotRun) -> None:
    found = results(first, BAD, OLD, BAD)
    assert found[-3:] == [
        ("own", Status.DEFECT, "it is bad"),
        ("old", Status.WARNING, "it is old"),
        ("own", Status.DEFECT, "it is bad"),
    ]
    assert found[:-3] == ([] if isinstance(first, str) else [("own", Status.NOT_RUN, "no compiler")])


def test_check_is_ok_only_if_it_ran_and_found_nothing() -> None:
    assert results() == [("own", Status.OK, "")]
    assert results("one", "two") == [("own", Status.OK, "two")]
    assert results("one", NotRun("no compiler")) == [("own", Status.NOT_RUN, "no compiler")]


def test_packages_that_no_tool_can_read_are_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel wheel, other packages that link torch are left unaudited."""
    monkeypatch.setattr(abi, "missing_tool", lambda: "nm")
    nothing = SimpleNamespace(wheels=(), installed=lambda name: None)
    site: Any = SimpleNamespace(inventory=nothing, smoke={}, row=nothing)
    (found,) = checks("BG207")[0].run(site)
    assert found.status is Status.NOT_RUN
    assert found.reason.startswith("nm is not on PATH: no package is audited")
