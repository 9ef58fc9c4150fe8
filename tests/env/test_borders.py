"""Foreign input: any fault of a wheel, lock, index page or list is one line, never a traceback."""

from __future__ import annotations

import io
import json
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bumpgate.core import lanes
from bumpgate.core.errors import BumpgateError, is_line
from bumpgate.core.text import printable
from bumpgate.env import cached, inventory, mirror, versions
from bumpgate.env.lane import LaneContext
from bumpgate.env.locks import LockError, lock_text, pins, read_lock, wheel_sizes
from bumpgate.wheels import audit, store
from tests.env.conftest import Run
from tests.support.lane_files import write_lane
from tests.support.tree import ROOT
from tests.support.wheel_files import wheel

TARGET: Any = SimpleNamespace(python=f"{sys.version_info[0]}.{sys.version_info[1]}")
BUILD = store.Build("fast", "1.0", "", "2.13.0", "", "", 0, "3.11")
LOCK = f"""lock-version = "1.0"
requires-python = "==3.11.*"
[[packages]]
name = "torch"
version = "1.0"
wheels = [{{ name = "torch-1.0-py3-none-any.whl", path = "store/x", hashes = {{ sha256 = "{"0" * 64}" }}, size = 3 }}]
"""
NIGHT = {"day": "2026-01-02", "files": ["a.whl"], "missing": ""}
NOTE = {"build": vars(BUILD), "file": "fast-1.0-py3-none-any.whl", "sha256": "0" * 64}
PAGE = '<a href="torch-2.0-py3-none-any.whl#sha256=00" data-upload-time="2026-01-01T00:00:00Z">torch</a>'
TEXTS = [
    "", "\n", "\x00", "\x1b[2J", "../", "/", "1" * 5000, "0001-01-01T00:00:00+14:00", "[", "{", "null", "[]",
    '"', "'", "-1", "1e400", "NaN", "http://[::1", "file:///\x00", "torch @ http://u:p@h/x", "; python_version",
    "a" * 140_000, "\ud800", "Ⅷ", "[[packages]]", "torch = 3", "wheels = 1", "[" * 3000, "0.0.0+" + "g" * 99,
]  # fmt: skip
STEADY = {"deadline": None, "derandomize": True, "database": None}


def fault_of(function: Callable[..., object], *arguments: object) -> str:
    """Return the message of the BumpgateError that a call raises, "" if it raises none."""
    try:
        function(*arguments)
    except BumpgateError as fault:
        return str(fault)
    return ""


@st.composite
def edited(draw: st.DrawFn, text: str) -> str:
    """Return a text with some parts deleted, repeated or replaced."""
    for _ in range(draw(st.integers(1, 3))):
        low, high = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        new = draw(st.sampled_from(TEXTS) | st.text(max_size=8) | st.just(text[low:high] * 2))
        text = text[:low] + new + text[min(high, low + draw(st.sampled_from([0, 1, 5, 80]))) :]
    return text


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


def read_as_lock(folder: Path, text: str) -> None:
    path = write(folder / "pylock.toml", text)
    lock = read_lock(path)
    for package in lock.packages:
        assert is_line(f"{package.name} {package.version}")
        assert all("/" not in w.file and is_line(w.file) for w in package.wheels)
    write(path, lock_text(lock))
    assert read_lock(path) == lock
    assert all(map(is_line, pins(path) or ()))
    wheel_sizes(path)


def read_as_lane(folder: Path, text: str) -> None:
    write(folder / lanes.FOLDER / "cpu" / lanes.FILE, text)
    for name in lanes.load(folder):
        _ = LaneContext(folder, name).packages


def read_as_list(folder: Path, text: str) -> None:
    write(folder / mirror.NAME, text)
    mirror.Mirror.read(folder)


def read_as_page(folder: Path, text: str) -> None:
    write(folder / "torch" / "index.html", text)
    versions.versions("torch", index=str(folder), pre=True)


def read_as_note(folder: Path, text: str) -> None:
    write(folder / "fast" / BUILD.key / store.NOTE, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUMPGATE_KERNELS", str(folder))
        store.find(BUILD)


def read_as_environment(folder: Path, text: str) -> None:
    write(folder / "k" / cached.NOTE, text)
    cached.installed_versions(folder)


def read_as_requirements(folder: Path, text: str) -> None:
    write_lane(folder, "cpu", 'requirements = "r.txt"\n')
    write(folder / "r.txt", text)
    LaneContext(folder, "cpu").requirements()


def read_as_candidate(folder: Path, text: str) -> None:
    write_lane(folder, "cpu", "")
    project = '[project]\nname = "x"\n[project.optional-dependencies]\ncpu = ["torch"]\n'
    write(folder / "pyproject.toml", project)
    LaneContext(folder, "cpu").request(text)


READERS: dict[str, tuple[str, Callable[[Path, str], object]]] = {
    "lock": (LOCK, read_as_lock),
    "lane": ((ROOT / "lanes/h200/lane.toml").read_text(), read_as_lane),
    "mirror.json": (json.dumps({"nights": {"torch 3.11 2.0": NIGHT}, "digests": {}}), read_as_list),
    "index page": (PAGE, read_as_page),
    "wheel.json": (json.dumps(NOTE), read_as_note),
    "environment": (json.dumps({"name": "a", "packages": {"torch": "1"}}), read_as_environment),
    "requirements": ("torch==1.0\nfast @ file:///x ; python_version > '3'\n", read_as_requirements),
    "candidate": ("torch==2.0", read_as_candidate),
}


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=400, **STEADY)  # type: ignore[arg-type]
@given(data=st.data())
def test_damaged_text_is_read_or_one_line(kind: str, data: st.DataObject) -> None:
    text, read = READERS[kind]
    with tempfile.TemporaryDirectory() as folder:
        fault = fault_of(read, Path(folder), data.draw(edited(text)))
    assert not fault or is_line(printable(fault)), "as the command prints it"


def rewritten(data: bytes, more: dict[str, bytes], without: str = "", **options: Any) -> bytes:
    """Return an archive with other members."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name != without}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **options) as archive:
        for name, content in (files | more).items():
            archive.writestr(name, content)
    return out.getvalue()


def flagged(data: bytes, offset: int, value: int) -> bytes:
    """Return an archive with another field in every header; its place in a local one, and two later in the list."""
    out = bytearray(data)
    for magic, at in ((b"PK\x03\x04", offset), (b"PK\x01\x02", offset + 2)):
        place = data.find(magic)
        while place >= 0:
            out[place + at] = value
            place = data.find(magic, place + 1)
    return bytes(out)


def damaged(data: bytes) -> bytes:
    data = rewritten(data, {}, compression=zipfile.ZIP_DEFLATED)
    at = data.index(b"fast/_C.so") + len(b"fast/_C.so") + 2
    return data[:at] + b"\xff\xff\xff" + data[at + 3 :]


RECORD, METADATA = "fast-1.0.dist-info/RECORD", "fast-1.0.dist-info/METADATA"
ARCHIVES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "parent folder": (lambda d: rewritten(d, {"../../x.py": b""}), "outside of the wheel"),
    "absolute": (lambda d: rewritten(d, {"/tmp/x.py": b""}), "outside of the wheel"),
    "two dist-info": (lambda d: rewritten(d, {"b-1.dist-info/x": b""}), "2 dist-info folders"),
    "RECORD of one column": (lambda d: rewritten(d, {RECORD: b"fast\n"}), "not a complete"),
    "huge field": (lambda d: rewritten(d, {RECORD: b"x" * 200_000}), "field larger than"),
    "no metadata": (lambda d: rewritten(d, {}, METADATA), "no item named"),
    "encrypted": (lambda d: flagged(d, 6, 1), "encrypted"),
    "unknown compression": (lambda d: flagged(d, 8, 77), "compression"),
    "damaged deflate": (damaged, "not a complete wheel"),
}


def unzipped(path: Path) -> str:
    fault = audit._file_fault(audit.WheelFile(path, "fast"), TARGET)
    for read in (inventory.content_of, inventory.version_of):
        read(path)
    assert "\n" not in fault_of(lambda: list(mirror._pins(path, frozenset(), "3.11")))
    return fault.reason if fault else ""


@pytest.mark.parametrize("kind", ARCHIVES)
def test_corrupt_wheel_is_one_line(kind: str, tmp_path: Path) -> None:
    path = wheel(tmp_path, b"\x7fELF" + bytes(range(256)) * 40)
    assert unzipped(path) == ""
    change, words = ARCHIVES[kind]
    path.write_bytes(change(path.read_bytes()))
    reason = unzipped(path)
    assert words in reason
    assert is_line(reason)


EDITS = st.tuples(st.integers(0, 2**16), st.binary(min_size=1, max_size=4))


@settings(max_examples=40, **STEADY)  # type: ignore[arg-type]
@given(edits=st.lists(EDITS, min_size=1, max_size=4))
def test_rotten_bytes_of_a_wheel_are_one_line(edits: list[tuple[int, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = wheel(Path(folder), b"\x7fELF" + bytes(999))
        data = bytearray(rewritten(path.read_bytes(), {}, compression=zipfile.ZIP_DEFLATED))
        for at, new in edits:
            data[at % len(data) : at % len(data) + len(new)] = new
        path.write_bytes(bytes(data))
        reason = unzipped(path)
        assert not reason or is_line(reason)


WHEEL = "torch-1.0-py3-none-any.whl"
HEAD = 'lock-version = "1.0"\n'
ONE = HEAD + '[[packages]]\nname = "a"\nversion = "1"\n'


NO_NAME = [
    f"x\\nRUN evil {WHEEL}",
    f"../../{WHEEL}",
    f"torch\\n{WHEEL[5:]}",
    f"triton{WHEEL[5:]}",
    f"{WHEEL} more",
]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a lock file"),
        ('lock-version = "2.0"\n', "version 1.0"),
        (HEAD, "packages"),
        (ONE, "has no wheel"),
        (
            ONE + 'wheels = [{ path = "a-1-py3-none-any.whl", hashes = { md5 = "0" } }]\n',
            "without its sha256",
        ),
        (LOCK.replace(WHEEL, "torch.whl"), "Invalid wheel filename .*; bumpgate freeze"),
        *(
            (LOCK.replace(WHEEL, name), "not the name of a wheel of torch; bumpgate freeze")
            for name in NO_NAME
        ),
    ],
)
def test_invalid_lock_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "pylock.toml"
    with pytest.raises(LockError, match="cannot be read"):
        read_lock(path)
    with pytest.raises(LockError, match=words) as refused:
        read_lock(write(path, text))
    assert is_line(str(refused.value))


def test_lock_is_installed_by_exact_version_and_hash(tmp_path: Path) -> None:
    """=== also refuses a build of the same version with a label."""
    lock = write(tmp_path / "pylock.toml", LOCK)
    assert pins(lock) == [f"torch===1.0 --hash=sha256:{'0' * 64}"]


@pytest.mark.parametrize("read", [read_lock, pins, wheel_sizes])
@pytest.mark.parametrize("field", ['name = "torch', '\nversion = "1.0', 'marker = "a'])
def test_field_of_two_lines_is_refused(field: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    text = LOCK + 'marker = "a"\n'
    path = write(tmp_path / "pylock.toml", text.replace(field, f"{field}\\n--index-url http://evil", 1))
    with pytest.raises(LockError):
        read(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("mirror --keep 1 --limit inf", "--limit inf: must be a number from 0 to 1e+06"),
        ("mirror --keep 1 --limit nan", "--limit nan: must be a number from 0 to 1e+06"),
        ("mirror --keep 1 --limit 1e300", "--limit 1e+300: must be a number from 0 to 1e+06"),
        ("versions torch --index file:///etc", "no such index folder"),
        (f"environments --disk {'9' * 400}G", "not a size"),
        ("environments --disk 1e400", "not a size"),
    ],
    ids=lambda value: value[:40],
)
def test_bad_option_is_one_line(arguments: str, words: str, run: Run) -> None:
    code, _, err = run(*arguments.split())
    (line,) = err.splitlines()
    assert code == 4
    assert words in line


@pytest.mark.parametrize("marker", ['python_version < "3"', 'sys_platform == "win32"', 'extra == "x"'])
def test_candidate_for_another_python_is_refused(marker: str, tmp_path: Path) -> None:
    with pytest.raises(BumpgateError, match="its marker excludes Python"):
        read_as_candidate(tmp_path, f"torch==2.0 ; {marker}")
    read_as_candidate(tmp_path, 'torch==2.0 ; python_version > "3"')
