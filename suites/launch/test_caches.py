"""Cache directories: rejected or replaced, a full disk reported as such, a seed that two hosts may sync at once.

Rules C17 (both modes), C19 (a full disk is not a model bug), C20 (sync). The small disks are real: a tmpfs of a few
hundred KiB in a separate mount namespace, and a limit on file sizes where no namespace is needed.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
import types
from contextlib import suppress
from pathlib import Path

import pytest

from bumpgate.plugin.rows import InfraError
from launch import caches, train
from launch.caches import CacheError, DiskFull, disk_full, sync, usable
from launch.contract import load
from launch.environment import RUN, child_environment, run_caches
from launch.train import main
from suites.launch.conftest import Checkout, Launcher
from suites.support.child import ROOT
from suites.support.lanes import lanes
from suites.support.planted import planted

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane")]

FILES = 200
SMALL = ["--smoke", "--policy", "eager", "--steps", "1", "--batch", "2", "--tokens", "16"]
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def small_disk(place: Path, kib: int, fill: bool = False) -> tuple[str, ...]:
    """Return a wrapper that runs a command with a private tmpfs of `kib` at `place` and lists its contents afterwards.

    A hosted CI runner refuses user namespaces and has sudo. Raises InfraError if the machine allows neither.
    """
    place.mkdir(exist_ok=True)
    before, as_root, refused = (), "", []
    for before, as_root in ((NAMESPACE, ""), ((), "sudo -n ")):
        probe = f'{as_root}mount -t tmpfs tmpfs "$0" && {as_root}umount "$0"'
        done = subprocess.run([*before, "sh", "-c", probe, str(place)], capture_output=True, text=True)
        if done.returncode == 0:
            break
        refused.append(done.stderr.strip())
    else:
        raise InfraError(f"no tmpfs can be mounted here: {'; '.join(refused)}")
    script = f'{as_root}mount -t tmpfs -o size={kib}k,mode=777 tmpfs "$0" || exit 99; '
    script += f"trap '{as_root}umount \"$0\"' EXIT; " if as_root else ""
    script += 'cat /dev/zero > "$0/fill" 2>/dev/null; ' if fill else ""
    return (*before, "sh", "-c", f'{script}"$@"; code=$?; ls -A "$0"; exit $code', str(place))


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_full_disk_has_its_own_exit_code(launcher: Launcher, tmp_path: Path, variable: str) -> None:
    """5 if a write finds no space; 3 if the disk is writable but smaller than the contract requires."""
    place = tmp_path / "disk"
    for fill, code, words in ((True, 5, "No space left on device"), (False, 3, "MiB free")):
        run = launcher({variable: str(place)}, wrapper=small_disk(place, 256, fill))
        assert (run.code, variable in run.line, words in run.line) == (code, True, True), run.err


@planted("C19", "a disk that fills while compiling")
def test_disk_full_while_compiling(checkout: Checkout, tmp_path: Path, row) -> None:
    """Inductor wraps the failed write in its own error; the reported cause is the disk."""
    checkout.edit("minimum_free_bytes = 1_073_741_824", "minimum_free_bytes = 0")
    checkout.lock()
    place = tmp_path / "disk"
    given = {"TORCHINDUCTOR_CACHE_DIR": str(place)}
    run = checkout.launcher("--policy", "regional")(given, wrapper=small_disk(place, 64))
    about = {"expected": 5, "seen": run.err.splitlines(), "rule": "C19"}
    row.bound("launch/caches-cpu/exit_code_of_a_full_disk", run.code, "exit code", **about)
    assert run.line.startswith("disk full: ")
    assert "No space left on device" in run.line


@planted("C19", "a disk that fills while saving")
def test_disk_full_while_saving(checkout: Checkout, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    run = checkout.launcher("--checkpoint", str(place / "state.pt"))(wrapper=small_disk(place, 256))
    assert (run.code, run.line) == (5, "disk full: No space left on device")
    assert run.out.split() == [], "the half-written state is gone"


def test_unusable_cache_is_refused_or_made_private(checkout: Checkout, tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    planted = {"TORCHINDUCTOR_CACHE_DIR": str(file)}
    refused = checkout.launcher()(planted)
    assert (refused.code, refused.trained) == (3, [])
    shutil.rmtree(checkout.root / "home")
    checkout.edit('unusable = "refuse"', 'unusable = "private"')
    checkout.lock()
    run = checkout.launcher()(planted)
    assert run.code == 0, run.err
    report = json.loads(run.out.splitlines()[-1])["caches"]
    found = [report.pop(name) for name in ("private", "seeded", "published")]
    assert found == [True, 0, 0], "only a named run copies shared caches"
    private = Path(report["TORCHINDUCTOR_CACHE_DIR"]).parent
    why = f"private cache: {private}, since TORCHINDUCTOR_CACHE_DIR={file}: no such directory"
    assert run.err.splitlines() == [why]
    assert report.items() <= run.trained[0]["environment"].items()
    assert not private.exists(), "gone with its process"


def test_child_does_not_delete_its_parents_cache() -> None:
    made = caches.make_private(["A_DIR"])
    root = Path(made[caches.PRIVATE])
    assert caches.own_private(str(root)) == root
    program = f"from launch.caches import own_private; print(own_private({str(root)!r}))"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True) == "None\n"
    assert Path(made["A_DIR"]).is_dir()
    assert caches.own_private(None) is None
    longer = root.with_name(root.name.replace(f"-{os.getpid()}-", f"-{os.getpid()}1-"))
    assert caches.own_private(str(longer)) is None, "of another process, whose number begins with ours"
    shutil.rmtree(root)


@planted("C17", "a directory whose mode bits allow what it refuses")
def test_cache_directory_check_writes_a_file(tmp_path: Path, monkeypatch) -> None:
    usable(tmp_path)
    assert list(tmp_path.iterdir()) == [], "the probe leaves nothing"
    (file := tmp_path / "file").touch()
    for place, message in (
        (file, "no such directory"),
        (tmp_path / "missing", "no such directory"),
        (Path("/proc"), r"cannot be written \("),
    ):
        with pytest.raises(CacheError, match=rf"^X={place}: {message}[^\n]*$"):
            usable(place, name="X")
    minimum = shutil.disk_usage(tmp_path).free + (1 << 40)
    with pytest.raises(CacheError, match=rf": \d+ MiB free, the contract requires {minimum // 2**20}$"):
        usable(tmp_path, minimum_free=minimum)
    left = types.SimpleNamespace(free=1 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: left)
    usable(tmp_path, minimum_free=left.free)


def naive(source: Path, target: Path) -> None:
    """The incorrect way: each file is written under its final name."""
    for name, path in caches.files(source).items():
        shutil.copyfile(path, target / name)


def test_failed_copy_leaves_no_partial_file(tmp_path: Path) -> None:
    """A limit on file sizes needs no privilege: a write past it fails with EFBIG, half-way."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    (source / "large").write_bytes(os.urandom(100_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(DiskFull) as caught:
            sync(source, target)
        left = list(target.rglob("*"))
        with pytest.raises(OSError, match="File too large"):
            naive(source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value.strerror) == f"{target / 'large'}: File too large"
    assert left == []
    assert 0 < (target / "large").stat().st_size < 100_000, "a copy in place is torn here, so this can fail"


@planted("C19", "other faults of the operating system, none of them a full disk")
def test_disk_full_is_distinguished_from_other_errors() -> None:
    def chained(inner: BaseException, outer: BaseException, silent: bool = False) -> BaseException:
        try:
            try:
                raise inner
            except BaseException as error:
                raise outer from (None if silent else error)
        except BaseException as error:
            return error

    space = OSError(28, "No space left on device", "/c/x.cpp")
    assert disk_full(space) == "/c/x.cpp: No space left on device"
    assert disk_full(chained(chained(space, RuntimeError("iostream")), ValueError("outer"))) is not None
    assert disk_full(chained(space, RuntimeError("unexpected pos 704 vs 598"), silent=True)) is not None
    compiler = "CppCompileError: g++ x.cpp\n/usr/bin/ld: final link failed: No space left on device\n"
    assert disk_full(RuntimeError(compiler)) == "/usr/bin/ld: final link failed: No space left on device"
    assert disk_full(OSError(122, os.strerror(122))) == "Disk quota exceeded"
    for other in (
        RuntimeError("step 1: the loss is nan"),
        OSError(2, "No such file or directory"),
        MemoryError(),
        chained(OSError(13, "Permission denied"), RuntimeError("backend='inductor' raised")),
    ):
        assert disk_full(other) is None
    looped = RuntimeError("a")
    looped.__context__ = chained(looped, RuntimeError("b"))
    assert disk_full(looped) is None


def tree(root: Path, seed: int, count: int = FILES) -> Path:
    """Create a cache of `count` files below three folders; one byte of each identifies the seed."""
    for i in range(count):
        path = root / f"folder{i % 3}" / f"entry{i}.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([seed]) + bytes([i % 251]) * (1000 + 400 * i))
    return root


def lost(target: Path, *sources: Path) -> list[str]:
    """Return names that the target lacks, or whose bytes match no source: a file is either complete or lost."""

    def whole(name: str) -> bool:
        with suppress(FileNotFoundError):
            content = (target / name).read_bytes()
            return any(content == (source / name).read_bytes() for source in sources)
        return False

    return sorted(n for n in {name for source in sources for name in caches.files(source)} if not whole(n))


@planted("C20", "a torn file and a lost one")
def test_concurrent_syncs_lose_no_file(tmp_path: Path, row) -> None:
    """Both sync a new version onto a warm target, which a running job reads all the time."""
    old, new = tree(tmp_path / "old", 1), tree(tmp_path / "new", 2)
    target = tmp_path / "target"
    target.mkdir()
    sync(old, target)
    program = (
        "import pathlib, sys; from launch.caches import sync\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(len(sync(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))))"
    )
    command = [sys.executable, "-c", program, str(new), str(target)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    syncers = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        assert [syncer.stdout.readline() for syncer in syncers] == ["ready\n"] * 2
        for syncer in syncers:
            syncer.stdin.write("go\n")
            syncer.stdin.flush()
        ever, scans, deadline = set[str](), 0, time.monotonic() + 60
        while any(syncer.poll() is None for syncer in syncers) and time.monotonic() < deadline:
            ever |= set(lost(target, old, new))
            scans += 1
        copied = [int(syncer.communicate(timeout=10)[0]) for syncer in syncers]
    finally:
        for syncer in syncers:
            syncer.kill()
            syncer.wait()
    ever |= set(lost(target, new))
    about = {"expected": 0, "seen": min(FILES, sum(copied)), "rule": "C20"}
    copies = f"copied {copied[0]} and {copied[1]} of {FILES}; read {scans} times meanwhile"
    evidence = [copies, *sorted(ever)[:3]]
    row.bound("launch/caches-cpu/lost_files", len(ever), "files", evidence=evidence, **about)
    assert not list(target.rglob(f"{caches.PART}*"))
    (target / "folder0/entry3.so").write_bytes(b"torn")
    (target / "folder1/entry1.so").unlink()
    # What the row counts, planted.
    assert lost(target, old, new) == ["folder0/entry3.so", "folder1/entry1.so"]


def test_sync_copies_only_what_differs(tmp_path: Path) -> None:
    source, target = tree(tmp_path / "source", 1, 6), tmp_path / "target"
    target.mkdir()
    names = sorted(caches.files(source))
    assert sorted(sync(source, target)) == names
    assert lost(target, source) == []
    for name in names:
        assert (target / name).stat().st_mtime_ns == (source / name).stat().st_mtime_ns, name
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    assert sync(source, target) == []
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before
    # Warm: what the target has added stays, even if its name is in the source too.
    (target / "own").write_text("of this host")
    (target / names[0]).write_text("better")
    assert sync(source, target) == []
    assert (target / names[0]).read_text() == "better"
    (target / names[1]).unlink()
    assert sync(source, target) == [names[1]]
    # A new source replaces files that differ only in their contents.
    changed = source / names[2]
    times = changed.stat()
    changed.write_bytes(b"\x07" + changed.read_bytes()[1:])
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert sync(source, target) == [names[0], names[2]]
    assert (target / "own").read_text() == "of this host"


def named_run(folder: Path, monkeypatch) -> list[tuple[Path, Path]]:
    """Name this run, with its caches below `folder` -> (shared, own) directory of each."""
    contract = load()
    for name in contract.cache_folders:
        monkeypatch.delenv(name)
    given = child_environment(contract, {**os.environ, "XDG_CACHE_HOME": str(folder), RUN: "a"})
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return run_caches(contract)


def test_named_run_seeds_and_publishes_its_caches(tmp_path: Path, monkeypatch, capsys) -> None:
    """One file is in the shared directory before the run, and one in the run's own, as if it had been compiled."""
    pairs = named_run(tmp_path, monkeypatch)
    for folder in (folder for pair in pairs for folder in pair):
        folder.mkdir(parents=True)
    shared, own = pairs[0]
    (shared / "former").write_text("of a former run")
    (own / "code").write_text("of this run")
    assert main(SMALL) == 0
    report = json.loads(capsys.readouterr().out)["caches"]
    assert (report["seeded"], report["published"]) == (1, 1)
    assert (own / "former").read_text() == "of a former run"
    assert (shared / "code").read_text() == "of this run"


def test_rank_that_does_not_write_publishes_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    """Ranks of one host compile the same code: the shared caches have one writer."""
    pairs = named_run(tmp_path, monkeypatch)
    for _, own in pairs:
        own.mkdir(parents=True)
        (own / "code").write_text("of this run")
    monkeypatch.setattr(train.Trainer, "writes", False)
    assert main(SMALL) == 0
    assert capsys.readouterr().out == ""
    assert not any(shared.exists() for shared, _ in pairs)


@planted("C20", "a target that cannot be written, a source that changes meanwhile")
def test_sync_refuses_unwritable_target_or_changing_source(tmp_path: Path, monkeypatch) -> None:
    source = tree(tmp_path / "source", 1, 3)
    (file := tmp_path / "file").touch()
    for place in (file, Path("/proc"), tmp_path / "missing"):
        with pytest.raises(CacheError, match=rf"^{place}: "):
            sync(source, place)
    (target := tmp_path / "target").mkdir()
    with pytest.raises(CacheError, match="missing: no such directory"):
        sync(tmp_path / "missing", target)
    # As if each file were rewritten after its hash was taken.
    monkeypatch.setattr(caches, "sha256", lambda path: "0" * 64)
    with pytest.raises(CacheError, match=r"entry0\.so: changed while it was copied"):
        sync(source, target)
    assert caches.files(target) == {}
    assert not list(target.rglob(f"{caches.PART}*"))


@planted("C20", "a temporary file of a compiler that vanishes, a file that another run replaces")
def test_sync_from_a_cache_in_use(tmp_path: Path, monkeypatch) -> None:
    """Runs without a name compile in the shared cache, from which named runs are seeded."""
    source, target = tree(tmp_path / "source", 1, 3), tmp_path / "target"
    target.mkdir()
    (source / "tmp.pid_7").write_text("of a compiler")
    taken, sha256 = [], caches.sha256

    def and_then(path: Path) -> str:
        """Vanish before the digest of a file is taken, or be replaced after it."""
        taken.append(path.name)
        if path.name == "tmp.pid_7":
            path.unlink()
        digest = sha256(path)
        if path.name == "entry1.so" and taken.count("entry1.so") == 1:
            (source / "new").write_text("replaced")
            os.replace(source / "new", path)
        return digest

    monkeypatch.setattr(caches, "sha256", and_then)
    assert len(sync(source, target)) == 3
    assert (target / "folder1" / "entry1.so").read_text() == "replaced"
    assert lost(target, source) == []


@planted("C20", "a shared cache that cannot be written at the end of a training")
def test_failed_publishing_keeps_the_result(tmp_path: Path, monkeypatch, capsys) -> None:
    for shared, own in named_run(tmp_path, monkeypatch):
        own.mkdir(parents=True)
        shared.write_text("a file in place of the directory")
    assert main(SMALL) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["step"] == 1
    assert err.startswith("caches not published: ")
