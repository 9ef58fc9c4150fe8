"""Kernel wheels in an adoption: given up, or built again for the candidate's torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bumpgate.core.baseline import Baseline, Reviewed
from bumpgate.core.rows import Judgement, Record, Row, Verdict
from bumpgate.core.toml import tomllib
from bumpgate.env.lane import LaneContext, lane_lock
from bumpgate.env.locks import Lock, Locked, Wheel
from bumpgate.process.file_transaction import AdoptionError
from bumpgate.review.kernel_wheels import (
    check_declaration,
    check_without,
    given_up_rows,
    lost_rows,
    moved_declaration,
    taken_back,
)
from tests.support.lane_files import FAST, save_lock, write_lane

OLD, NEW = "a" * 64, "b" * 64
SOURCES = f'sha256 = "{OLD}"\nsdist = "{"5" * 64}"\npatch = "fast.patch"\n'
TORCH = "2.15.0+cu130"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write_lane(tmp_path, "h200", FAST.format(torch="2.15.0") + SOURCES)
    return tmp_path


def lane(tree: Path) -> LaneContext:
    return LaneContext(tree, "h200")


def lock(version: str = "1.0", sha256: str = NEW, file: str = "") -> Lock:
    wheel = Wheel(file or f"fast-{version}-py3-none-any.whl", sha256)
    torch = Locked("torch", "2.15.0", (Wheel("torch-2.15.0-py3-none-any.whl", "c" * 64),))
    return Lock((torch, Locked("fast", version, (wheel,))), "3.12")


def moved(tree: Path, found: Lock, *without: str) -> dict[str, Any] | None:
    path, text = moved_declaration(lane(tree), found, TORCH, without)
    assert path == tree / "lanes/h200/lane.toml"
    return text and tomllib.loads(text)


def test_other_build_of_a_version_keeps_its_sources(tree: Path) -> None:
    row = moved(tree, lock())
    assert row
    expected = {"version": "1.0", "torch": TORCH, "sha256": NEW, "sdist": "5" * 64, "patch": "fast.patch"}
    assert row["wheels"] == {"fast": expected}
    assert "without" not in row


@pytest.mark.parametrize(
    ("version", "torch", "sources"),
    [
        ("1.1", TORCH, []),
        ("1.0+cu130", TORCH, ["patch", "sdist"]),
        ("1.0+torch2.14", "2.14", ["patch", "sdist"]),
        ("1.1+torch2.15", "2.15", []),
    ],
)
def test_label_and_version_of_another_build(tree: Path, version: str, torch: str, sources: list[str]) -> None:
    """The hash of the sources is of one version; a label states the torch of the build."""
    row = moved(tree, lock(version))
    assert row
    fast = row["wheels"]["fast"]
    assert (fast["version"], fast["torch"], fast["sha256"]) == (version, torch, NEW)
    assert sorted(fast.keys() & {"sdist", "patch"}) == sources


def test_label_of_the_file_states_the_torch(tree: Path) -> None:
    row = moved(tree, lock(file="fast-1.0+torch2.13-py3-none-any.whl"))
    assert row
    assert row["wheels"]["fast"]["torch"] == "2.13"


def test_adopted_build_is_left_as_it_is(tree: Path) -> None:
    assert moved(tree, lock(sha256=OLD)) is None
    write_lane(tree, "h200", FAST.format(torch="2.15.0"))
    save_lock(lane_lock(tree, "h200"), lock(sha256=OLD))
    assert moved(tree, lock(sha256=OLD)) is None, "the lane's lock has the hash that the table does not state"
    row = moved(tree, lock())
    assert row
    assert row["wheels"]["fast"]["sha256"] == NEW


def given_up(tree: Path, *names: str) -> None:
    write_lane(tree, "h200", FAST.format(torch="2.15.0") + SOURCES, without=list(names))


def test_given_up_wheel_keeps_the_table_it_is_built_from(tree: Path) -> None:
    given_up(tree, "slow")
    row = moved(tree, Lock(lock().packages[:1]), "fast")
    assert row
    assert row["wheels"]["fast"]["sdist"] == "5" * 64
    assert row["without"] == ["fast", "slow"]


@pytest.mark.parametrize(("sha256", "others"), [(NEW, []), (OLD, []), (NEW, ["slow"])])
def test_wheel_of_the_set_is_taken_back(tree: Path, sha256: str, others: list[str]) -> None:
    """Whether it was built again, or its file fits the new torch as it is."""
    given_up(tree, "fast", *others)
    assert lane(tree).known_kernel_wheels == ("fast",)
    assert lane(tree).kernel_wheels == ()
    assert taken_back(lane(tree), lock()) == ("fast",)
    assert taken_back(lane(tree), Lock(lock().packages[:1])) == ()
    row = moved(tree, lock(sha256=sha256))
    assert row
    assert row["wheels"]["fast"]["sha256"] == sha256
    assert row.get("without", []) == others


def test_lane_without_kernel_wheels_is_left_alone(tree: Path) -> None:
    write_lane(tree, "h200")
    assert moved(tree, lock()) is None


def test_table_of_another_file_is_moved(tree: Path) -> None:
    """A guest declares its lanes in bumpgate.toml or pyproject.toml."""
    (tree / "lanes/h200/lane.toml").unlink()
    text = FAST.format(torch="2.15.0").replace("[", "[tool.bumpgate.lanes.h200.")
    (tree / "pyproject.toml").write_text(text)
    path, new = moved_declaration(lane(tree), lock(), TORCH, ())
    assert path == tree / "pyproject.toml"
    assert new == text.replace('"2.15.0"\n', f'"{TORCH}"\nsha256 = "{NEW}"\n')


def test_wheel_of_another_torch_contradicts_the_set(tree: Path) -> None:
    check_declaration(lane(tree), None, lock())
    text = (tree / "lanes/h200/lane.toml").read_text()
    check_declaration(lane(tree), text, lock())
    words = (
        r"built against torch 2\.14\.0, the row has 2\.15\.0: build that wheel for the new torch \(bumpgate "
    )
    with pytest.raises(AdoptionError, match=words):
        check_declaration(lane(tree), text.replace('"2.15.0"', '"2.14.0"'), lock())


def test_each_lacking_wheel_must_be_given_up(tree: Path) -> None:
    packages = {"torch": TORCH, "fast": "1.0"}
    check_without(lane(tree), packages, ())
    check_without(lane(tree), {"torch": TORCH}, ("fast",))
    with pytest.raises(
        AdoptionError, match=r"--torch 2\.15\.0 --package fast\), or give it up: --without fast$"
    ):
        check_without(lane(tree), {"torch": TORCH}, ())
    with pytest.raises(AdoptionError, match=r"the candidate has fast 1\.0: leave the option out$"):
        check_without(lane(tree), packages, ("fast",))
    given_up(tree, "fast")
    check_without(lane(tree), {"torch": TORCH}, ())
    check_without(lane(tree), {"torch": TORCH}, ("fast",))


def record(*not_run: str, **rows: int | None) -> SimpleNamespace:
    judged = (
        Judgement(Row(f"a/b/{name}", value, "n", 1, "C1", test="t.py::t"), Verdict.PASS, "")
        for name, value in rows.items()
    )
    return SimpleNamespace(record=Record({"not_run": [f"{row}: why" for row in not_run]}, tuple(judged)))


def test_lost_rows_are_those_that_only_the_adopted_side_has() -> None:
    old = Baseline(
        "h200", {}, dict.fromkeys(("a/b/peer", "a/b/tpu", "a/b/own", "a/b/lost"), Reviewed(1, "n", "exact"))
    )
    good = record("a/b/tpu", peer=1, own=1, new=1, lost=1, gone=None)
    bad = record("a/b/peer", "a/b/tpu", "a/b/new", "a/b/own", "a/b/gone", own=1)
    gate: Any = SimpleNamespace(adopted=good, candidate=bad)
    assert lost_rows(gate, old) == {"a/b/peer": "why"}
    gate.adopted = SimpleNamespace(record=None)
    assert lost_rows(gate, old) == {}


@pytest.mark.parametrize(
    ("reason", "own"),
    [
        ("flash-attn is not installed (--without)", True),
        ("flash_attn is not installed", True),
        ("mamba_ssm is not installed; flash_attn is not installed", True),
        ("lane h200 has given flash-attn up (lanes/h200/lane.toml)", True),
        ("flash-attn 2.8.3 is built for torch 2.11, not 2.15.0", True),
        ("flash_attn-2.8.3+cu130-cp312-cp312-linux_x86_64.whl: sha256 aaaa, expected bbbb", True),
        ("not built: bumpgate wheels build --lane h200 --torch 2.15.0 --package flash-attn", True),
        ("no wheel of flash-attn 2.8.3 was found", True),
        ("flash-attn: flash_attn_2_cuda.so needs libc10_cuda.so, which torch 2.15.0 does not have", True),
        ("liger_kernel is not installed", False),
        ("flash-attn-3 is not installed", False),
        ("flash is not installed", False),
        ("no allocator here", False),
    ],
)
def test_rows_are_given_up_if_their_reason_names_the_wheel(reason: str, own: bool) -> None:
    lost = {"a/b/one": reason, "a/b/two": "liger_kernel is not installed"}
    assert given_up_rows(lost, ("flash-attn",)) == ({"a/b/one"} if own else frozenset())
    assert given_up_rows(lost, ()) == frozenset()
