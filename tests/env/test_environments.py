"""Environments from fake wheels on loopback: built once, atomically, and every failure names its cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from bumpgate.core.errors import BumpgateError
from bumpgate.env import compiled, installation
from bumpgate.env.build import BuildError, Environment, NotInstallable, Request, build, release
from bumpgate.env.cached import NOTE, discard, kept
from bumpgate.env.request import request_key
from bumpgate.env.uv import host_settings
from suites.support.planted import planted
from tests.env.conftest import Run
from tests.support.local_index import LocalIndex, fake_wheel, isolated
from tests.support.project import wait_for
from tests.support.tree import ROOT

TORCH = Request(("torch==1.0",))


def cache() -> Path:
    return Path(os.environ["BUMPGATE_HOME"]) / "environments"


def torch_in(environment: Environment) -> str:
    program = "import torch, triton; print(torch.__version__, triton.__version__)"
    return subprocess.check_output([environment.python, "-c", program], text=True).strip()


def cache_entries() -> list[str]:
    """Return the cache entries other than logs and lock files."""
    return sorted(p.name for p in cache().iterdir() if p.name not in ("logs", ".locks"))


def test_second_build_reuses_environment_without_uv(
    index: LocalIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(TORCH)
    assert (torch_in(first), dict(first.packages)) == ("1.0 3.0", {"torch": "1.0", "triton": "3.0"})
    assert cache_entries() == [first.key]
    requests = len(index.requests)
    monkeypatch.setattr(installation, "run_uv", None)
    assert build(TORCH) == first
    assert len(index.requests) == requests


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"requirements": ("triton", "torch==1.0")}, True),
        ({"name": "another title"}, True),
        ({"requirements": ("torch==1.1", "triton")}, False),
        ({"python": "3.77"}, False),
        ({"index": "http://127.0.0.1:9/index"}, False),
        ({"find_links": ("/elsewhere",)}, False),
        ({"dependencies": False}, False),
        ({"offline": True}, False),
    ],
    ids=str,
)
def test_key_depends_on_what_determines_the_content(
    change: dict[str, object], same: bool, index: LocalIndex
) -> None:
    request = Request(("torch==1.0", "triton"))
    assert (request_key(request, None) == request_key(replace(request, **change), None)) is same  # type: ignore[arg-type]


def test_folders_of_the_host_are_searched_next_to_those_of_a_request(
    index: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel store holds a part of a lock; the rest comes from where the host has its wheels."""
    for folder, name in (("store", "stored"), ("host", "kept")):
        fake_wheel(tmp_path / folder, name, "1.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "host"))
    made = build(Request(("stored", "kept"), find_links=(str(tmp_path / "store"),)))
    assert made.packages == {"stored": "1.0", "kept": "1.0"}


def test_key_depends_on_host_settings_lock_and_files(
    index: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "pylock.cpu.toml"
    lock.write_text("a")
    wheel = fake_wheel(tmp_path / "mine", "torch", "1.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "mine"))

    def keys() -> list[str]:
        requests = (TORCH, replace(TORCH, prefer=lock), Request((f"torch @ {wheel.as_uri()}",)))
        return [request_key(request, None) for request in (*requests, Request(lock=lock))]

    seen = [keys()]
    lock.write_text("b")
    seen.append(keys())
    # The same version rebuilt, as in a developer's loop.
    fake_wheel(tmp_path / "mine", "torch", "1.0", "changed = True\n")
    seen.append(keys())
    monkeypatch.setenv("UV_EXCLUDE_NEWER", "2026-01-01")
    seen.append(keys())
    moved = [[a != b for a, b in zip(before, after)] for before, after in pairwise(seen)]
    assert moved == [[False, True, False, True], [True, True, True, False], [True, True, True, False]]


@pytest.mark.parametrize("variable", ["UV_CONSTRAINT", "PIP_CONSTRAINT", "UV_OVERRIDE", "UV_CONFIG_FILE"])
def test_key_depends_on_the_content_of_a_settings_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    isolated(monkeypatch, tmp_path, "http://127.0.0.1:9/index")
    file = tmp_path / "settings.txt"
    monkeypatch.setenv(variable, str(file))
    keys = {request_key(TORCH, None)}
    for text in ("helper==1.0\n", "helper==2.0\n"):
        file.write_text(text)
        keys.add(request_key(TORCH, None))
    assert len(keys) == 3


def test_environment_is_built_again_after_an_edit_of_constraints(
    index: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "constraints.txt"
    monkeypatch.setenv("PIP_CONSTRAINT", str(file))
    for version in ("1.0", "2.0"):
        file.write_text(f"helper=={version}\n")
        assert build(Request(("torch==1.0", "helper"))).packages["helper"] == version


@pytest.mark.parametrize(
    ("requirements", "words"),
    [
        (("torch==9",), "no version of torch==9"),
        (("no-such-thing",), "not found"),
        (("torch==1.0", "triton==3.1"), "depends on triton==3.0"),
        (("torch==1.2",), "no wheels? with a matching|no usable wheels|platform|ABI"),
        (("torch==1.1",), "404"),
    ],
    ids=["version", "package", "conflict", "interpreter", "listed file that is gone"],
)
def test_unsatisfiable_requirement_is_not_installable(
    requirements: tuple[str, ...], words: str, index: LocalIndex, tmp_path: Path
) -> None:
    index.gone.add("torch-1.1-py3-none-any.whl")
    with pytest.raises(NotInstallable, match=words) as caught:
        build(Request(requirements))
    assert "\n" not in str(caught.value)
    assert requirements[0][:5] in caught.value.log.read_text()
    assert caught.value.tail
    assert cache_entries() == []


@pytest.mark.parametrize("fault", ["500", "401", "403", "refused", "offline", "corrupt"])
def test_machine_or_index_failure_is_a_build_error(
    fault: str, index: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault.isdigit():
        index.fail(int(fault))
    elif fault == "refused":
        monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/index")
    elif fault == "offline":
        monkeypatch.setenv("UV_OFFLINE", "1")
    else:
        path = tmp_path / "wheels" / "torch-1.0-py3-none-any.whl"
        path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(BuildError) as caught:
        build(TORCH)
    assert type(caught.value) is BuildError, caught.value
    assert "\n" not in str(caught.value)
    assert caught.value.log.is_file()
    assert cache_entries() == []


CHILD = """
import resource, sys
from pathlib import Path
from bumpgate.env.build import BuildError, Request, build
if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    print(build(Request((sys.argv[1],)), say=print).key, flush=True)
except BuildError as error:
    print(type(error).__name__, error)
"""


Child = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def child() -> Iterator[Child]:
    """Yield a function that starts a process to build one requirement."""
    started = []

    def start(requirement: str, fault: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-c", CHILD, requirement, fault]
        # A background job of a shell ignores ctrl-C.
        interrupt = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "preexec_fn": interrupt}
        started.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, **how))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@planted("C19", "the disk is full in mid-build")
def test_full_disk_is_reported_and_leaves_no_environment(
    index: LocalIndex, tmp_path: Path, child: Child
) -> None:
    big = {"torch/__init__.py": "__version__ = '5.0'", "torch/data": "x" * 1_000_000}
    index.add(fake_wheel(tmp_path / "wheels", "torch", "5.0", big))
    printed = child("torch==5.0", "full").communicate(timeout=60)[0].splitlines()[-1]
    assert printed.startswith("BuildError torch==5.0: ")
    assert ": the disk is full (" in printed
    assert "File too large" in printed or "SIGXFSZ" in printed
    assert cache_entries() == []
    assert build(Request(("torch==5.0",))).packages == {"torch": "5.0"}


def installs_into(folder: Path) -> bool:
    """Return whether a process of `uv pip` writes below a folder."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return any(str(folder) in line and " pip " in line for line in lines)


@planted("C19", "a build killed while it installs")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_build_leaves_no_process_and_is_rebuilt(
    index: LocalIndex, tmp_path: Path, child: Child, number: signal.Signals
) -> None:
    index.pause()
    stopped = child("torch==1.0")
    wait_for(lambda: bool(index.fetched))
    assert installs_into(tmp_path)
    stopped.send_signal(number)
    stopped.wait(30)
    wait_for(lambda: not installs_into(tmp_path))
    left = [name.rsplit(".", 1)[-1] for name in cache_entries()]
    assert left == (["partial"] if number == signal.SIGKILL else [])
    index.resume()
    built = build(TORCH)
    assert torch_in(built) == "1.0 3.0"
    assert cache_entries() == [built.key]


def test_two_processes_build_one_environment(
    index: LocalIndex, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    # uv times out on a silent index before a busy machine has started a process.
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "300")
    index.pause()
    both = [child("torch==1.0")]
    wait_for(lambda: bool(index.fetched))
    both.append(child("torch==1.0"))
    assert both[1].stdout is not None
    waiting = both[1].stdout.readline()
    index.resume()
    printed = [process.communicate(timeout=60)[0].split() for process in both]
    assert waiting == "torch==1.0: another process builds it; waiting\n"
    assert printed == [["torch==1.0:", "building", printed[1][0]], [printed[1][0]]]
    assert cache_entries() == [printed[1][0]]


def test_prune_keeps_environments_in_use(index: LocalIndex, run: Run) -> None:
    used, other = build(TORCH), build(Request(("helper==1.0",)))
    release(other)
    for key, side in ((used.key, "good"), (other.key, "good"), ("python-old", "bad"), ("python-new", "bad")):
        compiled.variables(key, side)
    os.utime(compiled.caches() / "python-old-bad" / "used", (0, 0))
    assert [(k.key, k.in_use) for k in kept()] == [(used.key, True), (other.key, False)]
    assert run("environments", "--prune", "--keep", "0")[1].splitlines()[3:] == [
        f"kept, in use: {used.key}",
        f"deleted {other.key}",
        f"deleted the compile caches {other.key}-good",
        f"deleted the compile caches {compiled.HANDED_IN}old-bad",
    ]
    assert cache_entries() == [used.key]
    assert [place.name for place in sorted(compiled.caches().iterdir())] == sorted(
        [f"{used.key}-good", f"{compiled.HANDED_IN}new-bad"]
    )
    assert discard("never-built")


def test_new_gate_discards_bytecode_of_a_passed_interpreter(tmp_path: Path) -> None:
    """Another image may have sources of equal time and size at the same path; Python cannot tell them apart."""
    source = tmp_path / "library.py"

    def imported(version: int, *, new: bool) -> str:
        source.write_text(f"version = {version}\n", encoding="utf-8")
        os.utime(source, (1, 1))
        variables = {
            **os.environ,
            **compiled.bytecode("python-x", "bad", new=new),
            "PYTHONPATH": str(tmp_path),
        }
        command = [sys.executable, "-c", "import library; print(library.version)"]
        return subprocess.check_output(command, env=variables, text=True).strip()

    assert imported(1, new=True) == "1"
    assert imported(2, new=False) == "1", "resuming a gate keeps the bytecode"
    assert imported(2, new=True) == "2"


def test_damaged_environment_is_rebuilt(index: LocalIndex) -> None:
    built = build(TORCH)
    built.python.unlink()
    built.python.symlink_to("/no/longer/installed/python3.11")
    assert torch_in(build(TORCH)) == "1.0 3.0"
    (built.python.parents[1] / NOTE).write_text("{")
    assert torch_in(build(TORCH)) == "1.0 3.0"


def test_open_requirement_is_resolved_again_only_with_refresh(index: LocalIndex, tmp_path: Path) -> None:
    request = Request(("helper",))
    assert build(request).packages == {"helper": "2.0"}
    index.add(fake_wheel(tmp_path / "wheels", "helper", "3.0"))
    assert build(request).packages == {"helper": "2.0"}
    # uv caches an index's listing for some minutes.
    assert build(replace(request, refresh=True)).packages == {"helper": "3.0"}


def test_mixture_installs_without_its_conflicting_pins(index: LocalIndex) -> None:
    assert torch_in(build(Request(("torch==1.0", "triton==3.1"), dependencies=False))) == "1.0 3.1"


def test_script_completes_the_environment(index: LocalIndex, tmp_path: Path) -> None:
    script = tmp_path / "stubs.py"
    script.write_text(
        "import sysconfig; open(sysconfig.get_path('purelib') + '/stub.py', 'w').write('A = 1')"
    )
    request = replace(TORCH, script=script)
    built = build(request)
    assert subprocess.run([built.python, "-c", "import stub; assert stub.A == 1"]).returncode == 0
    script.write_text("raise SystemExit('no readelf')")
    with pytest.raises(BuildError, match=r"stubs\.py: exit 1: no readelf"):
        build(request)
    assert cache_entries() == [built.key]


def test_missing_uv_is_one_line_with_the_fix(monkeypatch: pytest.MonkeyPatch, index: LocalIndex) -> None:
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BumpgateError, match=r"pip install uv$"):
        build(TORCH)


def test_pip_settings_are_used_as_uv_settings() -> None:
    pip = {
        "PIP_INDEX_URL": "https://a/index",
        "PIP_EXTRA_INDEX_URL": "https://b https://c",
        "PIP_FIND_LINKS": "/one  /two",
        "PIP_TRUSTED_HOST": "a",
    }
    found = host_settings(pip)
    assert {n: v for n, v in found.items() if n.startswith("UV_")} == {
        "UV_DEFAULT_INDEX": "https://a/index",
        "UV_INDEX": "https://b https://c",
        "UV_FIND_LINKS": "/one,/two",
        "UV_INSECURE_HOST": "a",
    }
    own = {"UV_INDEX_URL": "https://mine", "UV_FIND_LINKS": "/three"}
    kept_settings = host_settings(pip | own)
    assert "UV_DEFAULT_INDEX" not in kept_settings
    assert kept_settings["UV_FIND_LINKS"] == "/three"
