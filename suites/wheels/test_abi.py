"""Kernel wheels against the installed torch (rule C39): their labels, their symbols, and a run.

Each of the three checks finds what the others cannot. The wheels here are built during the test (extensions.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from bumpgate.doctor import abi
from bumpgate.env.inventory import Distribution, Inventory, take
from bumpgate.env.packages import Smoke
from bumpgate.process.child import Interpreter
from suites.support.child import ROOT
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted
from suites.wheels import extensions

# The torch that an incompatible extension is built for here.
OTHER = "2.13" if version("torch").startswith("2.11.") else "2.11"
LACKING = {
    "2.11": "c10::impl::cow::materialize_cow_storage(c10::StorageImpl&)",
    "2.13": "c10::impl::cow::materialize_cow(c10::StorageImpl*)",
}
# Each runs one case: importing the fake wheels is not enough, `run` must be right for its argument.
RIGHT = {
    "fake_real": ("1.5", "6.0"),
    "fake_layout": ("1", "cpu:1"),
    "fake_symbol": ("0", "None"),
    "fake_strings": ("1", "cpu:1"),
    "fake_twin": ("1", "cpu:1"),
}
CASE = (
    "import {0}, hashlib, sys; found = str({0}.run({1})); assert found == '{2}', found; "
    "print(hashlib.sha256(sys.argv[1].encode()).hexdigest())"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory with every fake wheel."""
    site = tmp_path_factory.mktemp("site")
    extensions.build(site, "fake_real", extensions.REAL)
    extensions.build(site, "fake_twin", extensions.NARROW)
    extensions.build(site, "fake_layout", extensions.WIDE, version="2.8.3+cu130torch1.5")
    extensions.build(site, "fake_symbol", extensions.OTHER_TORCH[OTHER], lazy=True)
    extensions.build(site, "fake_strings", extensions.NARROW, "-D_GLIBCXX_USE_CXX11_ABI=0", lazy=True)
    return site


@pytest.fixture(scope="module")
def interpreter(site: Path) -> Interpreter:
    return Interpreter(Path(sys.executable), ROOT, {**os.environ, "PYTHONPATH": str(site)})


@pytest.fixture(scope="module")
def installed(interpreter: Interpreter) -> Inventory:
    return take(interpreter)


def faults(name: str, installed: Inventory) -> Mapping[str, abi.Fault]:
    return {fault.kind: fault for fault in abi.audit(installed.installed(name), installed)}


def runs(name: str, interpreter: Interpreter) -> list[abi.Fault]:
    smoke = Smoke(("-c", CASE.format(name, *RIGHT[name])), ("1",), "cpu")
    return list(abi.run_cases({name: smoke}, interpreter, seconds=120))


def imports(name: str, interpreter: Interpreter) -> bool:
    interpreter.run("-c", f"import {name}", timeout=120)
    return True


@lanes("cpu", "h200")
def test_extension_built_for_this_torch_passes(
    lane: Lane, interpreter: Interpreter, installed: Inventory, row
) -> None:
    extension = abi.read_extension(installed.installed("fake_real").extensions[0])
    torch_symbols = {s for s in extension.undefined if abi.TORCH_SYMBOL.match(s)}
    assert {"libtorch_cpu.so", "libc10.so"} <= set(extension.needed)
    assert runs("fake_real", interpreter) == runs("fake_twin", interpreter) == []
    found = len(faults("fake_real", installed)) + len(faults("fake_twin", installed))
    row.count(
        "wheels/extension-of-this-torch/audit_faults", found, unit="faults", expected=0, rule="C39",
        seen=torch_symbols,
    )  # fmt: skip


@planted(
    "C39", "an extension built against another torch, bound lazily: it imports, and dies when it is called"
)
@lanes("cpu", "h200")
def test_call_of_a_missing_torch_function_is_reported(
    lane: Lane, interpreter: Interpreter, installed: Inventory, row
) -> None:
    assert imports("fake_symbol", interpreter)
    found = faults("fake_symbol", installed)
    assert found["symbols"].symbols == (LACKING[OTHER],)
    missing = f"_C.so calls what torch {installed.torch_version} does not have: {LACKING[OTHER]}"
    assert found["symbols"].reason == missing
    (ran,) = runs("fake_symbol", interpreter)
    assert "exit 127: " in ran.reason
    assert "undefined symbol" in ran.reason
    row.count(
        "wheels/extension-of-another-torch/audit_faults", len(found), unit="faults", expected=1, rule="C39", seen=1
    )  # fmt: skip


@planted(
    "C39", "a structure of another torch under the same symbols: import and audit pass, the result is wrong"
)
@lanes("cpu")
def test_changed_structure_is_found_only_by_a_run(
    lane: Lane, interpreter: Interpreter, installed: Inventory
) -> None:
    assert imports("fake_layout", interpreter)
    assert "symbols" not in faults("fake_layout", installed)
    (ran,) = runs("fake_layout", interpreter)
    assert ran.reason.endswith("exit 1: AssertionError: cpu:0")


@planted("C39", "std::string of the old C++ ABI")
@lanes("cpu")
def test_old_string_abi_is_reported(lane: Lane, interpreter: Interpreter, installed: Inventory) -> None:
    assert imports("fake_strings", interpreter)
    found = faults("fake_strings", installed)
    assert set(found) == {"string-abi"}
    assert "_GLIBCXX_USE_CXX11_ABI=0" in found["string-abi"].reason
    assert found["string-abi"].symbols == ("c10::Device::str() const",)


@pytest.mark.parametrize(
    ("label", "file", "requires", "words"),
    [
        pytest.param(
            "2.8.3+cu130torch2.10", "", (), "for torch 2.10, not 2.12.0.dev20260304+cu130",
            marks=planted("C39", "a wheel labelled torch2.10 on a 2.12 nightly"),
        ),
        pytest.param(
            "2.8.3", "flash_attn-2.8.3%2Bcu12torch2.8cxx11abiFALSE-cp312-cp312-linux_x86_64.whl", (), "for torch 2.8",
            marks=planted("C39", "a label that only the file name had"),
        ),
        pytest.param("1.0", "", ("torch==2.10.*",), "for torch 2.10", marks=planted("C39", "a pinned older torch")),
        pytest.param("1.0+cu128torch2.12", "", (), "for CUDA 12.8", marks=planted("C39", "another CUDA major")),
        ("2.8.3+cu130torch2.12", "", ("torch>=2.0",), ""),
        ("1.7.0", "causal_conv1d-1.7.0-cp312-cp312-linux_x86_64.whl", ("torch",), ""),
    ],
)  # fmt: skip
@lanes("cpu")
def test_wheel_label_is_compared_with_the_build(lane: Lane, label, file, requires, words) -> None:
    torch = {"__version__": "2.12.0.dev20260304+cu130", "cuda": "13.0"}
    found = Inventory("3.13.1", "CPython", None, None, None, torch)
    faults = list(abi.audit(Distribution("flash-attn", label, file, requires=requires), found))
    assert all(fault.kind == "label" for fault in faults)
    assert (words in faults[0].reason) if words else faults == []


@planted("C39", "an extension of another torch in a package that no manifest names")
@lanes("cpu")
def test_every_package_linked_against_torch_is_audited(lane: Lane, installed: Inventory) -> None:
    names = {wheel.name for wheel in abi.built_on_torch(installed)}
    assert set(RIGHT) <= names
    assert not names & {"torch", "numpy"}
    found = list(abi.audit_all(abi.built_on_torch(installed), installed))
    assert {(f.wheel, f.kind) for f in found} >= {
        ("fake_layout", "label"), ("fake_symbol", "symbols"), ("fake_strings", "string-abi")
    }  # fmt: skip
    assert not {f.wheel for f in found} & {"fake_real", "fake_twin"}


@lanes("cpu")
def test_cuda_extension_is_ignored_next_to_a_cpu_torch(
    lane: Lane, installed: Inventory, tmp_path: Path
) -> None:
    """It cannot be loaded, so it cannot be wrong; packages such as torchao hold some for each kind of device."""
    library = tmp_path / "libtorch_cuda.so"
    subprocess.run(
        ["g++", "-shared", "-x", "c", os.devnull, "-Wl,-soname,libtorch_cuda.so", "-o", library], check=True
    )
    cuda = extensions.build(
        tmp_path, "fake_cuda", extensions.NARROW, f"-L{tmp_path}", "-Wl,--no-as-needed", "-ltorch_cuda"
    )
    wheel = Distribution("fake_cuda", "1.0", place=tmp_path, extensions=(cuda,))
    for build, names in (({}, []), ({"cuda": "13.0"}, ["fake_cuda"])):
        found = replace(installed, version=build, distributions={"fake-cuda": (wheel,)})
        assert [d.name for d in abi.built_on_torch(found)] == names


@lanes("cpu")
@pytest.mark.parametrize(
    ("torch", "files", "kept"),
    [
        ("2.9.1+cu130", "a_torch28.so a_torch29.so a_torch210.so", "a_torch29.so"),
        ("2.10.0", "a_torch28.so a_torch2.10.so", "a_torch2.10.so"),
        ("2.15.0", "a_torch28.so a_torch29.so b.so", "b.so"),  # its loader needs none
        ("2.15.0", "a_torch28.so b_torch29.so", "a_torch28.so b_torch29.so"),  # no choice: both are loaded
        ("2.15.0", "a_torch29-cpu.so a_torch29-cuda.so", "a_torch29-cpu.so a_torch29-cuda.so"),
    ],
)
def test_one_of_several_libraries_is_for_this_torch(lane: Lane, torch: str, files: str, kept: str) -> None:
    assert abi.for_this_torch([Path(name) for name in files.split()], torch) == list(map(Path, kept.split()))


@planted("C39", "a call of torch's stable ABI that this torch does not have")
@lanes("cpu")
def test_missing_function_of_the_stable_abi_is_reported(
    lane: Lane, installed: Inventory, tmp_path: Path
) -> None:
    code = 'extern "C" { int aoti_torch_cpu_nothing_of(int); int aoti_torch_get_data_ptr(void*, void**); }'
    calls = "aoti_torch_get_data_ptr(0, 0); return PyLong_FromLong(aoti_torch_cpu_nothing_of(1));"
    path = extensions.build(tmp_path, "fake_stable", (code, calls), lazy=True)
    wheel = Distribution("fake-stable", "1.0", place=tmp_path, extensions=(path,))
    (fault,) = abi.audit(wheel, installed)
    assert (fault.kind, fault.symbols) == ("symbols", ("aoti_torch_cpu_nothing_of",))


@planted("C39", "one case of a wheel crashes, one hangs")
@lanes("cpu")
def test_crash_or_hang_fails_only_its_own_case(lane: Lane) -> None:
    programs = ("pass", "import os; os.abort()", "import time; time.sleep(60)", "print('still run')")
    prove = "import hashlib, sys; exec(sys.argv[1]); print(hashlib.sha256(sys.argv[1].encode()).hexdigest())"
    smoke = Smoke(("-c", prove), programs, "cpu")
    found = list(abi.run_cases({"w": smoke}, Interpreter(Path(sys.executable), ROOT), 3.0))
    assert [f.reason.rpartition(": ")[2] for f in found] == ["killed by SIGABRT", "no answer in 3 s"]


@lanes("cpu")
def test_missing_library_or_unreadable_file_is_reported(
    lane: Lane, installed: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        abi, "read_extension", lambda p: abi.Extension(p, frozenset(), frozenset(), ("libc10_other.so",))
    )
    wheel = Distribution("w", "1.0", extensions=(tmp_path / "_C.so",))
    wheel.extensions[0].write_bytes(b"not ELF")
    (fault,) = abi.audit(wheel, installed)
    assert (fault.kind, "needs libc10_other.so" in fault.reason) == ("library", True)
    monkeypatch.undo()
    with pytest.raises(abi.ToolError, match=r"^nm: .*file format not recognized"):
        list(abi.audit(wheel, installed))
    monkeypatch.setenv("PATH", "")
    assert abi.missing_tool() == "nm"
    with pytest.raises(abi.ToolError, match="apt-get install binutils"):
        list(abi.audit(wheel, installed))
