"""Kernel wheels that do not fit, or whose content differs from their metadata, are refused before a measurement.

The wheels are built here, against the torch of this interpreter; each wrong one is put in a `--find-links` folder.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from bumpgate.core.errors import BumpgateError
from bumpgate.env.inventory import take
from bumpgate.env.lane import LaneContext
from bumpgate.env.locks import Lock, Locked, Wheel
from bumpgate.env.store import StoreError, put, sha256_of
from bumpgate.process.child import Interpreter
from bumpgate.wheels import build as building
from bumpgate.wheels import store
from bumpgate.wheels.audit import Target, gpu_archs
from bumpgate.wheels.plan import Choice, build_of, plan
from suites.support.planted import planted
from suites.wheels import extensions
from tests.support.lane_files import FAST, save_lock, write_lane
from tests.support.local_index import LocalIndex, isolated
from tests.support.reports import bumpgate
from tests.support.tree import ROOT
from tests.support.wheel_files import difference, gpu_code, sdist, wheel

pytestmark = pytest.mark.long(66)

PURE = "def run(n):\n    return f'cpu:{n}'\n"
# A torch version that is not installed.
TORCH = "2.13" if version("torch").startswith("2.11.") else "2.11"
TABLES = (
    FAST.format(torch="2.0.0")
    + """sdist = "{sdist}"
[wheels.fast.smoke]
command = ["-c", "import fast, hashlib, sys; found = fast.run(int(sys.argv[1])); \
assert found == 'cpu:' + sys.argv[1], found; print(hashlib.sha256(sys.argv[1].encode()).hexdigest())"]
cases = ["1", "3"]
device = "cpu"
"""
)
GONE = ("namespace c10 { void gone_since_then(int); }", "c10::gone_since_then(1); Py_RETURN_NONE;")
CRASH_OF_3 = (
    "from fast import _C\ndef run(n):\n    if n == 3:\n        import os; os.abort()\n    return _C.run(n)\n"
)
EXIT_OF_3 = CRASH_OF_3.replace("abort()", "_exit(0)")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Build extensions, keyed by their kind."""
    site = tmp_path_factory.mktemp("site")
    library = site / "libcudart.so.12"
    subprocess.run(
        ["g++", "-shared", "-x", "c", os.devnull, "-Wl,-soname,libcudart.so.12", "-o", library], check=True
    )
    sources = {
        "right": (extensions.NARROW, ()),
        "old strings": (extensions.NARROW, ("-D_GLIBCXX_USE_CXX11_ABI=0",)),
        "other torch": (extensions.OTHER_TORCH[TORCH], ()),
        "gone": (GONE, ()),
        "cuda 12": (extensions.NARROW, (f"-L{site}", "-Wl,--no-as-needed", "-l:libcudart.so.12")),
        "moved field": (extensions.WIDE, ()),
    }
    return {
        name: extensions.build(site / name.replace(" ", "_"), "fast", source, *flags).read_bytes()
        for name, (source, flags) in sources.items()
    }


@pytest.fixture(scope="module")
def target() -> Target:
    """This interpreter, with its torch treated as a CUDA 13.0 build, and an sm_90 GPU."""
    interpreter = Interpreter(Path(sys.executable), ROOT, dict(os.environ))
    found = take(interpreter)
    return Target(interpreter, replace(found, version={**found.version, "cuda": "13.0"}), 90)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolated(monkeypatch, tmp_path, "http://127.0.0.1:9/index")
    write_lane(tmp_path, "h200", TABLES.format(sdist="a" * 64))
    (tmp_path / "links").mkdir()
    monkeypatch.setattr("shutil.which", lambda name, **_: None if name == "nvcc" else f"/usr/bin/{name}")
    return tmp_path


def choose(tree: Path, target: Target, *places: str) -> Choice:
    """Return the choice of a wheel from these places, by default from the folder links."""
    (choice,) = plan(LaneContext(tree, "h200"), target, places or [str(tree / "links")])
    return choice


def pure(folder: Path, code: str = PURE, library: str = "README") -> Path:
    """Make a wheel without extension, which fits every torch."""
    folder.mkdir(exist_ok=True)
    return wheel(folder, b"", code, library=library, tag="py3-none-any")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def other_sum(path: Path) -> None:
    (path.parent / "SHA256SUMS").write_text(f"{'0' * 64}  {path.name}\n")


INVALID_WHEELS: dict[str, tuple[str, dict[str, object], Callable[[Path], None] | None, str]] = {
    "wrong label": ("right", {"version": "1.0+cu130torch2.5"}, None, "is built for torch 2.5"),
    "wrong pin": ("right", {"requires": "torch==2.5.*"}, None, "is built for torch 2.5"),
    "wrong torch": ("other torch", {}, None, "does not have: c10::impl::cow::materialize_cow"),
    "wrong CUDA": ("cuda 12", {}, None, "needs libcudart.so.12"),
    "wrong C++ ABI": ("old strings", {}, None, "_GLIBCXX_USE_CXX11_ABI=0"),
    "missing symbol": ("gone", {}, None, "c10::gone_since_then(int)"),
    "wrong GPU": ("sm_80", {}, None, "GPU code for sm_80 (expected sm_90)"),
    "wrong processor": ("aarch64", {}, None, "not a library for x86_64"),
    "truncated": ("right", {}, cut, "not a complete wheel"),
    "swapped file": ("right", {"swapped": b"\x7fELF"}, None, "fast/_C.so does not match its RECORD"),
    "another package": ("right", {"own_name": "slow"}, None, "its metadata is of slow 1.0"),
    "wrong python": ("right", {"tag": "cp27-cp27m-linux_x86_64"}, None, "not for Python"),
    "wrong suffix": ("right", {"library": "_C.cpython-27-x86_64-linux-gnu.so"}, None, "not for Python"),
    "wrong hash": ("right", {}, other_sum, "expected 000000000000"),
    "import-time crash": ("right", {"init": "import os; os.abort()\n"}, None, "does not import: killed by SIGABRT"),
    "import-time exit": ("right", {"init": "import os; os._exit(0)\n"}, None, "before it had done its work"),
    "import-time SystemExit": ("right", {"init": "raise SystemExit(0)\n"}, None, "before it had done its work"),
    "shape-dependent exit": ("right", {"init": EXIT_OF_3}, None, "fast 3: ended with exit code 0"),
    "shape-dependent crash": ("right", {"init": CRASH_OF_3}, None, "fast 3: killed by SIGABRT"),
    "moved field": ("moved field", {}, None, "fast 1: exit 1: AssertionError: cpu:0"),
}  # fmt: skip


@planted("C39", "twenty invalid kernel wheels")
@pytest.mark.parametrize("fault", INVALID_WHEELS)
def test_plan_refuses_an_invalid_wheel(
    fault: str, built: dict[str, bytes], tree: Path, target: Target
) -> None:
    kind, changes, spoil, words = INVALID_WHEELS[fault]
    right = built["right"]
    data = {**built, "sm_80": right + gpu_code(80), "aarch64": right[:18] + b"\xb7\0" + right[20:]}[kind]
    path = wheel(tree / "links", data, **changes)  # type: ignore[arg-type]
    if spoil:
        spoil(path)
    choice = choose(tree, target)
    assert (choice.action, choice.wheel) == ("absent", None)
    assert words in choice.reason
    assert "\n" not in choice.reason


def test_plan_reuses_a_valid_wheel(built: dict[str, bytes], tree: Path, target: Target) -> None:
    path = wheel(tree / "links", built["right"] + gpu_code(90))
    choice = choose(tree, target)
    assert choice == Choice(
        "fast", "1.0", "reuse", f"{path.name} passes its audit; run over shapes of the model", path
    )


def test_plan_reuses_a_wheel_without_extension_and_notes_it(tree: Path, target: Target) -> None:
    """mamba-ssm runs on its Triton kernels alone if it was built without its extension."""
    path = pure(tree / "links")
    choice = choose(tree, target)
    assert (choice.action, choice.wheel) == ("reuse", path)
    assert choice.reason.endswith("; no compiled extension: Python and Triton only")
    pure(tree / "links", "import fast.absent\n")
    choice = choose(tree, target)
    assert (choice.action, "does not import" in choice.reason) == ("absent", True)


def test_wheel_without_a_file_of_its_record_is_refused(tree: Path, target: Target) -> None:
    """A module that is imported late is missed by the import."""
    path = pure(tree, library="late.py")
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tree / "links" / path.name, "w") as part:
        for name in whole.namelist():
            if not name.endswith("late.py"):
                part.writestr(name, whole.read(name))
    choice = choose(tree, target)
    assert (choice.action, "fast/late.py of its RECORD is not in" in choice.reason) == ("absent", True)


def test_plan_reads_file_urls_and_pages(tree: Path, target: Target) -> None:
    path = pure(tree / "my links")
    with LocalIndex([path]) as index:
        for place in (path.parent.as_uri(), f"{index.url}/fast"):
            choice = choose(tree, target, place)
            assert choice.wheel is not None
            assert (choice.action, sha256_of(choice.wheel)) == ("reuse", sha256_of(path))
    with pytest.raises(BumpgateError, match=r"^/none: no such folder of wheels"):
        choose(tree, target, "/none")


def declare(tree: Path, version: str, target: Target) -> LaneContext:
    text = FAST.format(torch=target.found.torch_version)
    write_lane(tree, "h200", text.replace('version = "1.0"', f'version = "{version}"'))
    return LaneContext(tree, "h200")


def lock(tree: Path, path: Path) -> Wheel:
    found = Wheel(path.name, sha256_of(path))
    save_lock(tree / "lanes/h200/pylock.toml", Lock((Locked("fast", "1.0", (found,)),)))
    return found


@pytest.mark.parametrize("place", ["kernel store", "wheel store"])
def test_stored_wheel_of_another_version_is_not_reused(place: str, tree: Path, target: Target) -> None:
    """A row without the sha256 of a source distribution: `wheels build --sdist FILE` made its wheel."""
    path = pure(tree / "made")
    lane = declare(tree, "1.0", target)
    if place == "kernel store":
        store.put(build_of(lane, *lane.packages.wheels, target), path)
        assert choose(tree, target).wheel is not None
    else:
        put(lock(tree, path), [path.read_bytes()])
    declare(tree, "2.0", target)
    assert choose(tree, target).wheel is None


@pytest.mark.parametrize("sums", [False, True])
def test_adopted_torch_uses_the_adopted_file_only(tree: Path, target: Target, sums: bool) -> None:
    """The SHA256SUMS of a folder does not replace the hash of the lock."""
    lock(tree, pure(tree / "made"))
    declare(tree, "1.0", target)
    other = pure(tree / "links", PURE + "# other bytes\n")
    if sums:
        (tree / "links/SHA256SUMS").write_text(f"{sha256_of(other)}  {other.name}\n")
    assert choose(tree, target).wheel is None


def test_plan_selects_the_valid_wheel_among_invalid_ones(
    built: dict[str, bytes], tree: Path, target: Target
) -> None:
    wheel(tree / "links", built["right"], version="1.0+torch2.5")
    path = wheel(tree / "links", built["right"])
    choice = choose(tree, target)
    assert (choice.action, choice.wheel) == ("reuse", path)


@pytest.mark.parametrize("version", ["1.0", "1.0+torch"])
def test_plan_without_a_device_requires_a_torch_label(
    version: str, built: dict[str, bytes], tree: Path, target: Target
) -> None:
    """A changed struct layout keeps its symbols; without a device only the label of its torch shows it."""
    path = tree / "lanes/h200/lane.toml"
    path.write_text(path.read_text().replace('device = "cpu"', 'device = "cuda"'))
    version = version.replace("+torch", f"+torch{'.'.join(target.found.torch_version.split('.')[:2])}")
    wheel(tree / "links", built["right"], version=version)
    choice = choose(tree, target)
    assert (choice.action, "no device here" in choice.reason) == (
        "reuse" if "+" in version else "absent",
        True,
    )


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", frozenset()),
        (b"\x50\xed\x55\xba", frozenset()),
        (b"x" + gpu_code(90) + b"y" + gpu_code(80, 1), frozenset({(2, 90), (1, 80)})),
        (gpu_code(90)[:40], frozenset()),
    ],
)
def test_gpu_archs_reads_embedded_architectures(data: bytes, found: frozenset[tuple[int, int]]) -> None:
    assert gpu_archs(data) == found


BUILD = store.Build("fast", "1.0", "a" * 64, "2.13.0", "b" * 40, "13.0", 90, "3.12")


def test_build_key_covers_what_determines_the_binary() -> None:
    changes = {
        "sdist": "c" * 64,
        "torch_git": "c",
        "cuda": "12.8",
        "arch": 100,
        "python": "3.11",
        "patch": "d",
    }
    assert len({BUILD.key, *(replace(BUILD, **{name: x}).key for name, x in changes.items())}) == 7  # type: ignore[arg-type]
    assert replace(BUILD, torch="2.13.0+cu130").key == BUILD.key


def test_stored_wheel_is_found_by_its_key_and_verified(
    built: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUMPGATE_KERNELS", str(tmp_path / "there"))
    stored = store.put(BUILD, wheel(tmp_path, built["right"]))
    assert store.find(BUILD) == stored
    assert store.find(replace(BUILD, python="3.11")) is None
    stored.write_bytes(b"other bytes")
    with pytest.raises(StoreError, match="does not match its wheel"):
        store.find(BUILD)
    note = stored.parent / store.NOTE
    for text, words in (
        ("[", "not a note"),
        (note.read_text().replace('"3.12"', '"3.13"'), "of another build"),
    ):
        note.write_text(text)
        with pytest.raises(StoreError, match=words):
            store.find(BUILD)


HERE = ("--lane", "h200", "--python", sys.executable)
Run = Callable[..., str]


@pytest.fixture
def run(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that calls `bumpgate wheels` in the tree, checks its exit code, and returns what it prints."""
    (tree / "pyproject.toml").write_text('[project]\nname = "bumpgate"\n')
    (tree / "baselines").mkdir()
    monkeypatch.chdir(tree)

    def call(code: int, words: str, *arguments: str) -> str:
        assert bumpgate(monkeypatch, "wheels", *arguments) == code
        printed = "".join(capsys.readouterr())
        assert words in printed
        return printed

    return call


def test_wheels_commands_print_and_exit(built: dict[str, bytes], tree: Path, run: Run) -> None:
    """On this CPU build of torch the audit of the right wheel passes, and that of a truncated one does not."""
    path = wheel(tree / "links", built["right"])
    run(0, "fast 1.0: reuse: ", "plan", *HERE, "--find-links", str(path.parent))
    run(0, "passes", "audit", str(path), *HERE)
    cut(path)
    run(1, "file: fast-1.0", "audit", str(path), *HERE)
    run(4, "name the torch", "plan", "--lane", "h200")
    run(4, "unknown lane 'tpu'", "plan", "--lane", "tpu", "--torch", "1")
    run(4, "none.whl: no such wheel file", "audit", "none.whl", *HERE)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use the build tools of this interpreter: nothing is installed from an index here."""
    place = tmp_path / "tools"
    place.mkdir()
    for name in ("setuptools", "_distutils_hack", "wheel", "ninja", "packaging"):
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            (place / name).symlink_to(Path(spec.origin).parent)
    monkeypatch.setattr(building, "_tools", lambda *_: place)


ERROR = "#error not a program\n"


def test_build_audits_and_stores_a_wheel(tree: Path, tools: None, target: Target, run: Run) -> None:
    """The sources of the package do not compile before the lane's patch is applied."""
    code = extensions.MODULE.format(code=extensions.NARROW[0], body=extensions.NARROW[1])
    write_lane(tree, "h200", TABLES.format(sdist=sha256_of(sdist(tree / "sources", code))))
    broken = sdist(tree / "broken", ERROR)
    build = ("build", *HERE, "--package", "fast", "--sdist", str(broken))
    run(1, "the lane has", *build)
    write_lane(tree, "h200", TABLES.format(sdist=sha256_of(broken)))
    printed = run(1, "error: #error not a program", *build, "--jobs", "1")
    (log,) = (tree / "home/building").glob("*.log")
    assert "not a program" in log.read_text()
    assert printed.startswith("fast 1.0: exit ")
    assert printed.endswith(f"(log: {log}; the same command continues it)\n")
    patch = tree / "lanes/h200/fast.patch"
    write_lane(tree, "h200", TABLES.format(sdist=sha256_of(broken) + f'"\npatch = "{patch.name}'))
    run(4, f"{patch}: the patch of fast is missing", *build)
    patch.write_text(difference("#error of another version\n", code))
    run(1, "fast.patch does not apply: error: patch failed: fast.cpp:1", *build)
    patch.write_text(difference(ERROR, code))
    run(1, "no wheel within 0 s", *build, "--hours", "0")
    run(0, "fast 1.0: built: ", *build)
    run(0, "fast 1.0: kept: ", *build)
    run(0, "fast 1.0: reuse: ", "plan", *HERE)


def test_compiler_wrapper_sets_architecture_and_standard(tmp_path: Path) -> None:
    """Setup scripts add architectures, ignore TORCH_CUDA_ARCH_LIST, and name the C++ standard of an old torch."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\necho "$@"\n')
    nvcc.chmod(0o755)
    pairs = "-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90"
    flags = f"-c a.cu -std=c++17 {pairs} --threads 4 -lineinfo"
    for standard, expected in ((0, 17), (17, 17), (20, 20)):
        wrapper = building.compiler(tmp_path / "bin" / "nvcc", str(nvcc), 90, standard)
        done = subprocess.run([wrapper, *flags.split()], capture_output=True, text=True, check=True)
        kept = ["-c", "a.cu", f"-std=c++{expected}", "-gencode", "arch=compute_90,code=sm_90"]
        assert done.stdout.split() == kept


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("#if !defined(_MSC_VER) && __cplusplus < 201703L", 17),  # 2.13
        ("#if (!defined(_MSVC_LANG) && __cplusplus < 202002L)", 20),  # 2.15
        ("#pragma once", 0),
    ],
)
def test_required_standard_is_read_from_torch(tmp_path: Path, line: str, expected: int) -> None:
    assert building.required_standard(tmp_path) == 0
    (tmp_path / "ATen").mkdir()
    (tmp_path / "ATen" / "ATen.h").write_text(f"{line}\n")
    assert building.required_standard(tmp_path) == expected
