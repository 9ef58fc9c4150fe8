"""What an adoption moves where its lane is declared: tables of kernel wheels, and pins that no other lane needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bumpgate.core import lanes
from bumpgate.core.errors import BumpgateError
from bumpgate.core.toml import tomllib
from bumpgate.env.lane import LaneContext, lane_lock
from bumpgate.env.locks import Lock, Locked, Wheel, read_lock
from bumpgate.env.requirements import requirements_file
from bumpgate.process.file_transaction import AdoptionError
from bumpgate.review.declarations import check_without, moved_declaration, moved_requirements, taken_back
from tests.support.lane_files import FAST, save_lock, write_lane
from tests.support.tree import ROOT

OLD, NEW = "a" * 64, "b" * 64
SOURCES = f'sha256 = "{OLD}"\nsdist = "{"5" * 64}"\npatch = "fast.patch"\n'
TORCH = "2.15.0+cu130"


def lock_of(python: str = "", **versions: str) -> Lock:
    files = {n: Wheel(f"{n}-{v}-py3-none-any.whl", NEW) for n, v in versions.items()}
    return Lock(tuple(Locked(n.replace("_", "-"), v, (files[n],)) for n, v in versions.items()), python)


def fast(version: str = "1.0", sha256: str = NEW, file: str = "") -> Lock:
    """Return a set of torch and the kernel wheel fast."""
    wheel = Wheel(file or f"fast-{version}-py3-none-any.whl", sha256)
    return Lock((*lock_of(torch="2.15.0").packages, Locked("fast", version, (wheel,))), "3.12")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A lane with the kernel wheel fast, built for torch 2.15."""
    write_lane(tmp_path, "h200", FAST.format(torch="2.15.0") + SOURCES)
    return tmp_path


def lane(tree: Path) -> LaneContext:
    return LaneContext(tree, "h200")


def moved(tree: Path, found: Lock, *without: str) -> dict[str, Any]:
    path, text = moved_declaration(lane(tree), found, TORCH, without)
    assert path == tree / "lanes/h200/lane.toml"
    return tomllib.loads(text) if text else {}


@pytest.mark.parametrize(
    ("lock", "version", "torch", "sources"),
    [
        (fast(), "1.0", TORCH, {"sdist": "5" * 64, "patch": "fast.patch"}),
        (fast("1.1"), "1.1", TORCH, {}),
        (fast("1.0+cu130"), "1.0+cu130", TORCH, {"sdist": "5" * 64, "patch": "fast.patch"}),
        (fast("1.0+torch2.15"), "1.0+torch2.15", "2.15", {"sdist": "5" * 64, "patch": "fast.patch"}),
        (fast("1.1+torch2.15"), "1.1+torch2.15", "2.15", {}),
        (fast(file="fast-1.0+torch2.15-py3-none-any.whl"), "1.0", "2.15", {"sdist": "5" * 64, "patch": "fast.patch"}),
    ],
)  # fmt: skip
def test_other_build_moves_its_table(
    tree: Path, lock: Lock, version: str, torch: str, sources: dict[str, str]
) -> None:
    """The hash of the sources is of one version; a label of the version or the file states the torch of the build."""
    row = moved(tree, lock)
    assert row["wheels"]["fast"] == {"version": version, "torch": torch, "sha256": NEW, **sources}
    assert "without" not in row


def test_adopted_build_is_left_as_it_is(tree: Path) -> None:
    assert moved(tree, fast(sha256=OLD)) == {}
    write_lane(tree, "h200", FAST.format(torch="2.15.0"))
    save_lock(lane_lock(tree, "h200"), fast(sha256=OLD))
    assert moved(tree, fast(sha256=OLD)) == {}, "the lane's lock has the hash that the table does not state"
    assert moved(tree, fast())["wheels"]["fast"]["sha256"] == NEW
    write_lane(tree, "h200")
    assert moved(tree, fast()) == {}, "no kernel wheels"


def given_up(tree: Path, *names: str) -> None:
    write_lane(tree, "h200", FAST.format(torch="2.15.0") + SOURCES, without=list(names))


def test_given_up_wheel_keeps_the_table_it_is_built_from(tree: Path) -> None:
    given_up(tree, "slow")
    row = moved(tree, lock_of(torch="2.15.0"), "fast")
    assert (row["wheels"]["fast"]["sdist"], row["without"]) == ("5" * 64, ["fast", "slow"])


@pytest.mark.parametrize(("sha256", "others"), [(NEW, []), (OLD, []), (NEW, ["slow"])])
def test_wheel_of_the_set_is_taken_back(tree: Path, sha256: str, others: list[str]) -> None:
    """Whether it was built again, or its file fits the new torch as it is."""
    given_up(tree, "fast", *others)
    assert (lane(tree).known_kernel_wheels, lane(tree).kernel_wheels) == (("fast",), ())
    assert taken_back(lane(tree), fast()) == ("fast",)
    assert taken_back(lane(tree), lock_of(torch="2.15.0")) == ()
    row = moved(tree, fast(sha256=sha256))
    assert (row["wheels"]["fast"]["sha256"], row.get("without", [])) == (sha256, others)


def test_table_of_another_file_is_moved(tree: Path) -> None:
    """A guest declares its lanes in bumpgate.toml or pyproject.toml."""
    (tree / "lanes/h200/lane.toml").unlink()
    text = FAST.format(torch="2.15.0").replace("[", "[tool.bumpgate.lanes.h200.")
    (tree / "pyproject.toml").write_text(text)
    path, new = moved_declaration(lane(tree), fast(), TORCH, ())
    assert path == tree / "pyproject.toml"
    assert new == text.replace('"2.15.0"\n', f'"{TORCH}"\nsha256 = "{NEW}"\n')


@pytest.mark.parametrize("lock", [fast(sha256=OLD), fast("1.0+torch2.14")], ids=["kept", "built again"])
def test_wheel_of_another_torch_contradicts_the_set(tree: Path, lock: Lock) -> None:
    write_lane(tree, "h200", FAST.format(torch="2.14.0") + SOURCES)
    words = (
        r"built against torch 2\.14.*, the row has 2\.15\.0: build that wheel for the new torch \(bumpgate "
    )
    with pytest.raises(AdoptionError, match=words):
        moved(tree, lock)


def test_each_lacking_wheel_must_be_given_up(tree: Path) -> None:
    packages = {"torch": TORCH, "fast": "1.0"}
    check_without(lane(tree), packages, ())
    check_without(lane(tree), {"torch": TORCH}, ("fast",))
    words = r"--torch 2\.15\.0 --package fast\), or give it up: --without fast$"
    with pytest.raises(AdoptionError, match=words):
        check_without(lane(tree), {"torch": TORCH}, ())
    with pytest.raises(AdoptionError, match=r"the candidate has fast 1\.0: leave the option out$"):
        check_without(lane(tree), packages, ("fast",))
    given_up(tree, "fast")
    check_without(lane(tree), {"torch": TORCH}, ())
    check_without(lane(tree), {"torch": TORCH}, ("fast",))


PROJECT = """[project]
name = "mine"
{dependencies}
[project.optional-dependencies]
gpu = ["torch==2.11.0", "flash-attn==2.8.3"]  # shared
h200 = ["mine[gpu]"]
h200x2 = ["mine[gpu]", "nvidia-ml-py>=12"]
testing = ["torch==2.11.0+cpu", "torch==2.9.1; sys_platform == 'darwin'", "torch==2.8.0; python_version < '3.5'"]
capped = ["torch<2.12"]
"""
LANES = """[lanes.h200]
[lanes.h200x2]
[lanes.cpu]
extra = "testing"
[lanes.capped]
[lanes.files]
requirements = "requirements.txt"
[lanes.more]
requirements = "requirements.txt"
"""
REQUIREMENTS = "# The set.\r\ntorch==2.11.0  # reviewed\r\nflash-attn==2.8.3\r\n"
NEXT = lock_of(torch="2.15.0", flash_attn="2.8.3")
EARLIER = lock_of(torch="2.11.0", flash_attn="2.8.3")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PROJECT.format(dependencies='dependencies = ["numpy>=2"]'))
    (tmp_path / "bumpgate.toml").write_text(LANES)
    (tmp_path / "requirements.txt").write_bytes(REQUIREMENTS.encode())
    return tmp_path


def pins(
    root: Path, name: str, *without: str, lock: Lock = NEXT, back: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the changed file of a lane's requirements, and its new text."""
    lane = LaneContext(root, name)
    path = requirements_file(root, lane.declared)
    if not path.exists():
        return {}
    old = path.read_bytes().decode()
    new = moved_requirements(lane, old, lock, without, back)
    return {path.relative_to(root).as_posix(): new} if new != old else {}


def test_pins_of_an_extra_and_of_a_requirements_file_move(root: Path) -> None:
    """Comments stay, as do pins of another platform or Python; a label goes if the index has none."""
    old = (root / "pyproject.toml").read_text()
    assert pins(root, "cpu") == {"pyproject.toml": old.replace("2.11.0+cpu", "2.15.0")}
    assert pins(root, "files") == {"requirements.txt": REQUIREMENTS.replace("2.11.0", "2.15.0")}
    without = {"requirements.txt": "# The set.\r\ntorch==2.15.0  # reviewed\r\n"}
    assert pins(root, "files", "flash-attn") == without


def test_package_that_is_taken_back_is_required_again(root: Path) -> None:
    """Without the local label of its build; on a line of its own if the others have one."""
    new = lock_of(torch="2.15.0", fast="1.0+cu130")
    (text,) = pins(root, "files", lock=new, back=("fast",)).values()
    assert text.endswith("flash-attn==2.8.3\r\nfast==1.0\n")
    (text,) = pins(root, "cpu", lock=new, back=("fast",)).values()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert [name for name in extras if "fast==1.0" in extras[name]] == ["testing"]


@pytest.mark.parametrize("text", [None, "", "[tool.x]\n", '[project]\nname = "mine"\n'])
def test_absent_extras_are_nothing_to_move(text: str | None, root: Path) -> None:
    (root / "pyproject.toml").unlink()
    if text is not None:
        (root / "pyproject.toml").write_text(text)
    assert pins(root, "cpu") == {}
    assert list(pins(root, "files")) == ["requirements.txt"]


def test_shared_extra_moves_if_no_other_lane_has_a_lock(root: Path) -> None:
    assert "2.15.0" in pins(root, "h200")["pyproject.toml"]
    save_lock(lane_lock(root, "h200x2"), NEXT)
    assert "2.15.0" in pins(root, "h200")["pyproject.toml"], "its lock has the new version already"


BOTH = "pyproject.toml: extra gpu has torch==2.11.0, which is also a pin of lane h200x2, whose lock has torch 2.11.0:"
OWN = "write the pin into the own extra of each lane (h200, h200x2) instead, and gate again"


@pytest.mark.parametrize(
    ("lane", "other", "without", "words"),
    [
        ("h200", "h200x2", (), f"{BOTH} {OWN}"),
        ("h200", "h200x2", ("flash-attn",), "extra gpu has flash-attn==2.8.3, which is also a pin of lane h200x2"),
        ("files", "more", (), "requirements.txt has torch==2.11.0, which is also a pin of lane more, whose lock"),
    ],
)  # fmt: skip
def test_pin_that_another_lock_needs_is_refused(
    lane: str, other: str, without: tuple[str, ...], words: str, root: Path
) -> None:
    save_lock(lane_lock(root, other), EARLIER)
    with pytest.raises(AdoptionError) as caught:
        pins(root, lane, *without)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("lane", "where"), [("capped", "extra capped"), ("cpu", "dependencies")])
def test_requirement_that_contradicts_the_set_is_refused(lane: str, where: str, root: Path) -> None:
    if lane == "cpu":
        text = PROJECT.format(dependencies='dependencies = ["torch<2.12"]')
        (root / "pyproject.toml").write_text(text)
    words = rf"^pyproject.toml: {where} has torch<2.12, which contradicts the new set \(torch 2.15.0\), and the next"
    with pytest.raises(AdoptionError, match=words):
        pins(root, lane)


@pytest.mark.parametrize("lane", lanes.load(ROOT))
def test_lanes_of_this_repository_move_their_own_group(lane: str) -> None:
    lock = read_lock(ROOT / lanes.load(ROOT)[lane].lock)
    new = {name: "99.0" for name in lock.versions if name in ("torch", "triton", "torch-xla")}
    packages = {name.replace("-", "_"): version for name, version in {**lock.versions, **new}.items()}
    (text,) = pins(ROOT, lane, lock=lock_of(lock.python, **packages)).values()
    files = ((ROOT / "pyproject.toml").read_text(), text)
    before, after = (tomllib.loads(file)["dependency-groups"] for file in files)
    own = lanes.load(ROOT)[lane].inherits or lane
    assert [group for group in before if before[group] != after[group]] == [own]


def test_a_lock_of_another_package_manager_names_its_command(tmp_path: Path) -> None:
    (tmp_path / "bumpgate.toml").write_text("[lanes.mine]\nrequirements = 'poetry.lock'\n")
    with pytest.raises(
        BumpgateError, match=r"only its package manager changes: poetry add 'torch==2\.15\.0', and"
    ):
        moved_requirements(LaneContext(tmp_path, "mine"), "", lock_of(torch="2.15.0"))
