"""The pins that an adoption moves: of the lane's own requirements, and of nothing that another lane needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bumpgate.core import lanes
from bumpgate.core.toml import tomllib
from bumpgate.env.lane import LaneContext, lane_lock
from bumpgate.env.locks import Lock, Locked, Wheel, read_lock
from bumpgate.env.requirements import requirements_file
from bumpgate.process.file_transaction import AdoptionError
from bumpgate.review.requirements import moved_requirements
from tests.support.adopting import LANE, VERSIONS, AdoptTree, wheels
from tests.support.lane_files import save_lock
from tests.support.local_index import LocalIndex, fake_wheel
from tests.support.tree import ROOT

pytestmark = pytest.mark.long(60)

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
NEW = {"torch": "2.15.0", "flash-attn": "2.8.3"}


def lock_of(versions: dict[str, str], python: str = "") -> Lock:
    files = {n: Wheel(f"{n.replace('-', '_')}-{v}-py3-none-any.whl", "0" * 64) for n, v in versions.items()}
    found = (Locked(n, v, (files[n],)) for n, v in versions.items())
    return Lock(tuple(found), python)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "pyproject.toml").write_text(PROJECT.format(dependencies='dependencies = ["numpy>=2"]'))
    (tmp_path / "bumpgate.toml").write_text(LANES)
    (tmp_path / "requirements.txt").write_bytes(REQUIREMENTS.encode())
    return tmp_path


def moved(
    root: Path, name: str, *without: str, lock: Lock | None = None, back: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the changed file of a lane's requirements, and its new text."""
    lane = LaneContext(root, name)
    path = requirements_file(root, lane.declared)
    if not path.exists():
        return {}
    old = path.read_bytes().decode()
    new = moved_requirements(lane, old, lock or lock_of(NEW), without, back)
    return {path.relative_to(root).as_posix(): new} if new != old else {}


def test_extra_of_the_lane_moves_with_its_label(root: Path) -> None:
    """Pins of another platform or Python stay as they are."""
    old = (root / "pyproject.toml").read_text()
    assert moved(root, "cpu") == {"pyproject.toml": old.replace("2.11.0+cpu", "2.15.0")}


def test_requirements_file_moves_and_keeps_its_comments(root: Path) -> None:
    assert moved(root, "files") == {"requirements.txt": REQUIREMENTS.replace("2.11.0", "2.15.0")}
    without = {"requirements.txt": "# The set.\r\ntorch==2.15.0  # reviewed\r\n"}
    assert moved(root, "files", "flash-attn") == without


def test_package_that_is_taken_back_is_required_again(root: Path) -> None:
    """Without the local label of its build; on a line of its own if the others have one."""
    new = lock_of({"torch": "2.15.0", "fast": "1.0+cu130"})
    (text,) = moved(root, "files", lock=new, back=("fast",)).values()
    assert text.endswith("flash-attn==2.8.3\r\nfast==1.0\n")
    (text,) = moved(root, "cpu", lock=new, back=("fast",)).values()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert [name for name in extras if "fast==1.0" in extras[name]] == ["testing"]


@pytest.mark.parametrize("text", [None, "", "[tool.x]\n", '[project]\nname = "mine"\n'])
def test_absent_extras_are_nothing_to_move(text: str | None, root: Path) -> None:
    (root / "pyproject.toml").unlink()
    if text is not None:
        (root / "pyproject.toml").write_text(text)
    assert moved(root, "cpu") == {}
    assert list(moved(root, "files")) == ["requirements.txt"]


def test_shared_extra_moves_if_no_other_lane_has_a_lock(root: Path) -> None:
    assert "2.15.0" in moved(root, "h200")["pyproject.toml"]
    save_lock(lane_lock(root, "h200x2"), lock_of(NEW))
    assert "2.15.0" in moved(root, "h200")["pyproject.toml"], "its lock has the new version already"


@pytest.mark.parametrize(
    ("lane", "other", "without", "words"),
    [
        (
            "h200",
            "h200x2",
            (),
            "pyproject.toml: extra gpu has torch==2.11.0, which is also a pin of lane h200x2, whose lock has torch "
            "2.11.0: write the pin into the own extra of each lane (h200, h200x2) instead, and gate again",
        ),
        (
            "h200",
            "h200x2",
            ("flash-attn",),
            "extra gpu has flash-attn==2.8.3, which is also a pin of lane h200x2",
        ),
        (
            "files",
            "more",
            (),
            "requirements.txt has torch==2.11.0, which is also a pin of lane more, whose lock",
        ),
    ],
)
def test_pin_that_another_lock_needs_is_refused(
    lane: str, other: str, without: tuple[str, ...], words: str, root: Path
) -> None:
    save_lock(lane_lock(root, other), lock_of({"torch": "2.11.0", "flash-attn": "2.8.3"}))
    with pytest.raises(AdoptionError) as caught:
        moved(root, lane, *without)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("lane", "where"), [("capped", "extra capped"), ("cpu", "dependencies")])
def test_requirement_that_contradicts_the_set_is_refused(lane: str, where: str, root: Path) -> None:
    if lane == "cpu":
        text = PROJECT.format(dependencies='dependencies = ["torch<2.12"]')
        (root / "pyproject.toml").write_text(text)
    words = rf"^pyproject.toml: {where} has torch<2.12, which contradicts the new set \(torch 2.15.0\), and the next"
    with pytest.raises(AdoptionError, match=words):
        moved(root, lane)


@pytest.mark.parametrize("lane", lanes.load(ROOT))
def test_lanes_of_this_repository_move_their_own_extra(lane: str) -> None:
    lock = read_lock(ROOT / lanes.load(ROOT)[lane].lock)
    new = {name: "99.0" for name in lock.versions if name in ("torch", "triton", "torch-xla")}
    (text,) = moved(ROOT, lane, lock=lock_of({**lock.versions, **new}, lock.python)).values()
    before, after = (
        tomllib.loads(t)["project"]["optional-dependencies"]
        for t in ((ROOT / "pyproject.toml").read_text(), text)
    )
    assert [extra for extra in before if before[extra] != after[extra]] == [
        lanes.load(ROOT)[lane].inherits or lane
    ]


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdoptTree]:
    folder = tmp_path_factory.mktemp("pins")
    with LocalIndex(wheels(folder / "wheels")) as index:
        yield AdoptTree(folder / "tree", index, folder / "home")


@pytest.fixture
def tree(frozen: AdoptTree, tmp_path: Path) -> Iterator[AdoptTree]:
    made = frozen.copy(tmp_path / "tree", tmp_path / "home")
    yield made
    made.end()


def declare(tree: AdoptTree, field: str) -> None:
    """Declare the lane cpu with a further field."""
    tree.write("lanes/cpu/lane.toml", f"{field}\n{LANE}")


def adopted(tree: AdoptTree) -> str:
    """Gate and adopt torch 9.10.0; return the line with the written files."""
    gated = tree.gate("9.10.0")
    assert gated.code == 0, gated.out + gated.err
    done = tree.bumpgate("adopt", "9.10.0/gate.json")
    assert done.code == 0, done.out + done.err
    return next(line for line in done.out.splitlines() if line.startswith("wrote "))


@pytest.mark.parametrize("field", ['extra = "testing"', 'requirements = "requirements.txt"'])
def test_freeze_after_an_adoption_keeps_it(field: str, tree: AdoptTree) -> None:
    file = "pyproject.toml" if field.startswith("extra") else "requirements.txt"
    declare(tree, field)
    text = (tree.root / "pyproject.toml").read_text()
    if file == "pyproject.toml":
        text = text.replace('cpu = ["bumpgate[suite]", ', 'testing = ["bumpgate[suite]", ')
        tree.write(file, text.replace("bumpgate[cpu", "bumpgate[testing"))
    tree.write("requirements.txt", "pytest==99.0\ntorch==9.9.0  # reviewed\n")
    before = (tree.root / file).read_text()
    assert file in adopted(tree)
    assert (tree.root / file).read_text() == before.replace("torch==9.9.0", "torch==9.10.0")
    frozen = tree.bumpgate("freeze", "--lane", "cpu")
    assert (frozen.code, len(frozen.out.splitlines())) == (0, 1), frozen.out + frozen.err
    back = tree.bumpgate("rollback", "cpu", "--adoption", "--no-smoke")
    assert back.code == 0, back.err
    assert (tree.root / file).read_text() == before


def test_adopt_without_a_pyproject_writes_the_requirements_file(tree: AdoptTree) -> None:
    """What `bumpgate init` makes: bumpgate.toml, a requirements file, and no lock."""
    options = tomllib.loads((tree.root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = "".join(f"    {marker}\n" for marker in options["markers"])
    tree.write(
        "pytest.ini", f"[pytest]\naddopts = {options['addopts']}\npythonpath = .\nmarkers =\n{markers}"
    )
    tree.write(
        "bumpgate.toml",
        '[lanes.cpu]\ndevice = "cpu"\nrequirements = "requirements.txt"\ncanaries = "suites/canaries"\n',
    )
    tree.write("requirements.txt", "pytest==99.0\ntorch==9.9.0\n")
    (tree.root / "pyproject.toml").unlink()
    shutil.rmtree(tree.root / "lanes")
    written = "lanes/cpu/pylock.toml, requirements.txt, baselines/cpu.json, baselines/adoptions.toml"
    assert adopted(tree) == f"wrote {written}; review: git diff"
    assert (tree.root / "requirements.txt").read_text() == "pytest==99.0\ntorch==9.10.0\n"


def test_candidate_of_a_wheel_file_is_adopted(tree: AdoptTree) -> None:
    facts = "".join(f"{name} = {value!r}\n" for name, value in VERSIONS["9.9.0"].items())
    files = {
        "torch/__init__.py": f"__version__ = '9.15.0'\n{facts}",
        "torch/version.py": "__version__ = '9.15.0'\ngit_version = 'f00d'\n",
    }
    path = fake_wheel(tree.root.parent / "my wheels", "torch", "9.15.0", files)
    gated = tree.bumpgate("gate", "--lane", "cpu", "--candidate", f"../my wheels/{path.name}", "--out", "g")
    assert gated.code == 0, gated.out + gated.err
    shutil.rmtree(tree.home / "store")
    done = tree.bumpgate("adopt", "g/gate.json")
    assert done.code == 0, done.out + done.err
    assert read_lock(lane_lock(tree.root, "cpu")).versions["torch"] == "9.15.0"
    assert "torch==9.15.0" in (tree.root / "pyproject.toml").read_text()
    path.unlink()
    back = tree.bumpgate("rollback", "cpu", "--no-smoke")
    assert back.code == 0, back.err
