"""`bumpgate adopt` of a gate of two prepared interpreters: the set is resolved, and must be what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core.baseline import load
from bumpgate.core.toml import tomllib
from bumpgate.env.inventory import content_of
from bumpgate.env.lane import lane_lock
from bumpgate.env.locks import read_lock
from bumpgate.env.store import sha256_of
from bumpgate.history import adoptions
from bumpgate.review.measured_set import OF_IMAGE
from suites.support.planted import planted
from tests.support.adopting import LANE, WRITTEN, Change, rewrite_gate, wheels
from tests.support.local_index import LocalIndex
from tests.support.prepared import EXTRA, SDIST, PreparedTree
from tests.support.project import Result

pytestmark = pytest.mark.long(60)

CANDIDATE = ("--candidate", "torch==9.11.0")
WITHOUT = ("--without", "faster")
REVIEWED = ("--reviewed", "release/facts/category", "--reason", "future ones now")
REVIEW = """# Why each is intended.
[[reviewed]]
rows = ["release/facts/cat*"]
reason = "future ones now"
"""


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreparedTree]:
    """The tree with one gate of interpreters: the candidate has another build of fast, and no faster."""
    folder = tmp_path_factory.mktemp("prepared")
    with LocalIndex(wheels(folder / "wheels")) as index:
        tree = PreparedTree(folder / "tree", index, folder / "home")
        old, new = tree.kernels / "old", tree.kernels / "new"
        good = tree.interpreter("good", "torch==9.9.0", *old.glob("*.whl"))
        bad = tree.interpreter("bad", "torch==9.11.0", *new.glob("fast-*.whl"))
        done = tree.gate_interpreters(good, bad, "g", "--without", "faster")
        assert done.code == 1, done.out + done.err
        assert done.err.endswith(
            "to adopt it: bumpgate adopt g/gate.json --candidate torch==9.11.0 --without faster"
            " --reviewed ROW --reason TEXT, for each intended change\n"
        )
        yield tree
        tree.end()


@pytest.fixture
def links(gated: PreparedTree) -> tuple[str, ...]:
    return ("--find-links", str(gated.kernels / "new"))


def adopt(tree: PreparedTree, *more: str) -> Result:
    """Adopt the gate of interpreters, which must succeed."""
    done = tree.bumpgate("adopt", "g/gate.json", *more)
    assert done.code == 0, done.out + done.err
    return done


def refused(tree: PreparedTree, words: str, *more: str) -> None:
    tree.refused(words, "adopt", "g/gate.json", *more)


def edit(tree: PreparedTree, gate: Change = bool, candidate: Change = bool) -> None:
    rewrite_gate(tree.root / "g", gate, candidate)


def peers(tree: PreparedTree) -> dict[str, Any]:
    """Return the reviewed rows of the kernel wheels."""
    rows = load(tree.root / "baselines/cpu.json", "cpu").rows
    return {row.split("/")[1]: found.value for row, found in rows.items() if row.startswith("kernels/")}


def test_gate_records_the_build_of_each_kernel_wheel(gated: PreparedTree) -> None:
    sides = json.loads((gated.root / "g/gate.json").read_text())["sides"]
    old, new = ({n: content_of(gated.wheel(b, n)) for n in ("fast", "faster")} for b in ("old", "new"))
    assert sides["adopted"]["wheels"] == old
    assert sides["candidate"]["wheels"] == {"fast": new["fast"]}
    assert old["fast"] != new["fast"], "the digests tell the builds apart"


LOST = "not run under --gate: kernels/faster/over_peer"


def test_interpreter_is_adopted_as_the_set_it_had(tree: PreparedTree, links: tuple[str, ...]) -> None:
    """The lane is red in the candidate before, green after the adoption, and red again after its rollback."""
    code, out = tree.run_lane("g")
    assert (code, LOST in out) == (1, True)
    files = tree.files()
    tree.write("../review.toml", REVIEW)
    done = adopt(tree, *CANDIDATE, *WITHOUT, *links, "--review", "../review.toml")
    fetched = {f"fetching {n}-py3-none-any.whl" for n in ("torch-9.11.0", "fast-1.0")}
    assert {*done.err.splitlines()} == fetched
    assert done.out.startswith("lane cpu: torch 9.9.0 -> 9.11.0, HOLD of the gate of ")
    for words in (
        "  reviewed release/facts/category (CHANGED category): future ones now\n",
        "packages: 2 moved\n  faster 1.0 -> (absent)\n  torch 9.9.0 -> 9.11.0\n",
        "given up: faster, with 1 row\n",
        f"check: {tree.candidate('g')} -m pytest -m cpu --gate\n",
    ):
        assert words in done.out
    locked = {p.name: p for p in read_lock(lane_lock(tree.root, "cpu")).packages}
    assert {n: p.version for n, p in locked.items()} == {"fast": "1.0", "pytest": "99.0", "torch": "9.11.0"}
    new = sha256_of(tree.wheel("new", "fast"))
    assert locked["fast"].wheels[0].sha256 == new
    fast = f'version = "1.0"\ntorch = "9.11.0"\nsha256 = "{new}"\nsdist = "{SDIST}"  # from PyPI\n'
    faster = '[wheels.faster]\nversion = "1.0"\ntorch = "9.9.0"\n'
    declaration = (tree.root / "lanes/cpu/lane.toml").read_text()
    head = LANE + 'without = ["faster"]\n\n'
    assert declaration.startswith(f"{head}[wheels.fast]\n{fast}\n{faster}\n[wheels.faster.smoke]\n")
    extra = EXTRA.replace("9.9.0", "9.11.0").replace('    "faster==1.0",\n', "")
    assert extra in (tree.root / "pyproject.toml").read_text()
    assert peers(tree) == {"fast": 2}
    entry = adoptions.load(tree.root).last("cpu")
    assert entry
    assert (entry.candidate, entry.new, entry.without) == ("torch==9.11.0", "9.11.0", ("faster",))
    assert [r.reason for r in entry.reviewed] == ["future ones now"]
    code, out = tree.run_lane("g")
    assert (code, "MISSING" in out) == (0, False), out
    assert "NOT RUN       kernels/faster/over_peer: lane cpu has given faster up (lanes/cpu/lane.toml)" in out
    back = tree.bumpgate("rollback", "cpu", "--adoption")
    assert "rollback cpu: 4 wheels verified, built offline in " in back.out, back.out + back.err
    restored = tree.files()
    assert [restored[Path(p).name] for p in WRITTEN] == [files[Path(p).name] for p in WRITTEN]
    assert tree.run_lane("g")[0] == 1


def test_wheel_is_taken_back_by_a_later_adoption(tree: PreparedTree, links: tuple[str, ...]) -> None:
    """Its requirement, its table and its reviewed row are back; the lane needs it again."""
    done = adopt(tree, *CANDIDATE, *WITHOUT, *links, *REVIEWED, "--no-store")
    assert done.err == "", "no wheel is fetched"
    both = tree.interpreter("both", "torch==9.11.0", *(tree.kernels / "new").glob("*.whl"))
    gated = tree.gate_interpreters(Path(tree.candidate("g")), both, "h")
    assert (gated.code, "NEW" in gated.out, "kernels/faster/over_peer" in gated.out) == (0, True, True)
    done = tree.bumpgate("adopt", "h/gate.json", *CANDIDATE, *links)
    assert done.code == 0, done.err
    declaration = tomllib.loads((tree.root / "lanes/cpu/lane.toml").read_text())
    assert "without" not in declaration
    faster = {"version": "1.0", "torch": "9.11.0", "sha256": sha256_of(tree.wheel("new", "faster"))}
    assert {**declaration["wheels"]["faster"], "smoke": 0} == faster | {"smoke": 0}
    assert '    "faster==1.0",\n]' in (tree.root / "pyproject.toml").read_text()
    assert peers(tree) == {"fast": 2, "faster": 2}
    assert tree.run_lane("h")[0] == 0
    code, out = tree.run_lane("g")
    assert (code, LOST in out) == (1, True)


def test_packages_of_both_sides_are_listed_and_other_rows_kept(
    tree: PreparedTree, links: tuple[str, ...]
) -> None:
    """What the set lacks is named, but for packages of any image."""

    def both(raw: dict[str, Any]) -> None:
        for side in raw["sides"].values():
            side["packages"] = {n: side["packages"][n] for n in ("torch", "pytest", "fast")}
            side["packages"] |= {"Helper_B": "2.0", "helper-a": "1.0"}
        raw["sides"]["adopted"]["packages"]["faster"] = "1.0"
        raw["sides"]["candidate"]["packages"] |= dict.fromkeys(OF_IMAGE, "1")

    def lose(raw: dict[str, Any]) -> None:
        raw["provenance"]["not_run"].append("release/facts/code_hash: liger_kernel is not installed")
        raw["rows"] = [j for j in raw["rows"] if j["row"]["id"] != "release/facts/code_hash"]

    edit(tree, both, lose)
    done = adopt(tree, *CANDIDATE, *WITHOUT, *links, *REVIEWED)
    assert "\nnot in the lock: helper-a 1.0, helper-b 2.0\n" in done.out
    kept = "release/facts/code_hash (liger_kernel is not installed)"
    assert (
        f"given up: faster, with 1 row\nnot run in the candidate, kept in the baseline: {kept}\n" in done.out
    )
    rows = load(tree.root / "baselines/cpu.json", "cpu").rows
    assert (rows["release/facts/code_hash"].value, peers(tree)) == ("aaaa", {"fast": 2})
    entry = adoptions.load(tree.root).last("cpu")
    assert entry
    assert entry.not_in_lock == {"helper-a": "1.0", "helper-b": "2.0"}


def test_options_that_name_another_set_are_refused(tree: PreparedTree, links: tuple[str, ...]) -> None:
    given = "g/gate.json: the candidate was an interpreter (--python-candidate): name the requirement whose set it is:"
    build = "bumpgate wheels build --lane cpu --torch 9.11.0 --package faster"
    unsolved = "error: No solution found when resolving dependencies"
    for options, words in (
        (WITHOUT, f"{given} bumpgate adopt g/gate.json --candidate 'torch==9.11.0'\n"),
        (("--candidate", "torch==9.10.0", *WITHOUT), f"bumpgate: torch==9.10.0: {unsolved}"),
        (("--candidate", "torch = 9", *WITHOUT), "invalid candidate 'torch = 9' ("),
        (("--candidate", "torch==9.99", *WITHOUT), "bumpgate: torch==9.99: error: No solution found"),
        (CANDIDATE, f"has no faster of lane cpu: build it and gate again ({build}), or give it up: --without faster\n"),
        ((*CANDIDATE, *WITHOUT, "--without", "fast"), "the candidate has fast 1.0: leave the option out\n"),
        ((*CANDIDATE, *WITHOUT, "--without", "numpy"), "numpy: not a kernel wheel of lane cpu (fast, faster)\n"),
    ):  # fmt: skip
        refused(tree, words, *options, *links, *REVIEWED)
    other = ("--index", "http://127.0.0.1:9/none")
    done = tree.bumpgate("adopt", "g/gate.json", *CANDIDATE, *WITHOUT, *links, *REVIEWED, *other)
    assert (done.code, done.out, len(done.err.splitlines())) == (125, "", 1), done.err
    assert "127.0.0.1:9/none" in done.err


@planted("C39", "the lock of a wheel that was built for another torch than the measured one")
@pytest.mark.parametrize("folder", ["old", "later", ""])
def test_other_build_of_a_kernel_wheel_is_refused(tree: PreparedTree, folder: str) -> None:
    links = ("--find-links", str(tree.kernels / folder)) if folder else ()
    words = "no wheel file has the content of the fast 1.0 that was measured: name the folder or page of the one that"
    refused(tree, words, *CANDIDATE, *WITHOUT, *REVIEWED, *links)


def with_packages(
    tree: PreparedTree,
    candidate: dict[str, str | None],
    adopted: dict[str, str | None] | None = None,
    **facts: Any,
) -> None:
    """Give the sides other packages, None for an absent one. facts: of the candidate's provenance."""

    def change(raw: dict[str, Any]) -> None:
        for side, versions in (("candidate", candidate), ("adopted", adopted or {})):
            found = raw["sides"][side]["packages"] | versions
            raw["sides"][side]["packages"] = {name: version for name, version in found.items() if version}

    edit(tree, change, lambda raw: raw["provenance"].update(facts))


SET = "the interpreter did not have the set of torch==9.11.0 (set -> interpreter:"
OWN = "has packages that neither the set nor the adopted side has: apex 1.0: uninstall them and gate again, or gate the"
ADOPTED = "gate without --python-adopted, or with the interpreter that this builds: bumpgate rollback cpu --no-smoke"


@planted("C39", "an interpreter that is not the set that is adopted")
@pytest.mark.parametrize(
    ("candidate", "adopted", "words"),
    [
        ({"torch": "9.10.0"}, {}, f"{SET} torch 9.11.0 -> 9.10.0): install these versions in "),
        ({"pytest": None}, {}, f"{SET} pytest 99.0 -> (absent)): install these versions in "),
        ({"pytest": "99.0+mine"}, {}, f"{SET} pytest 99.0 -> 99.0+mine): install these versions in "),
        ({"apex": "1.0"}, {}, f"{OWN} set itself: bumpgate gate --lane cpu --candidate torch==9.11.0\n"),
        ({"apex": "1.0"}, {"apex": "0.9"}, OWN),
        ({}, {"torch": "9.9.0+cpu"}, f"compare with the adopted set (torch 9.9.0 -> 9.9.0+cpu): {ADOPTED}"),
        ({}, {"torch": "9.8.0"}, f"does not compare with the adopted set (torch 9.9.0 -> 9.8.0): {ADOPTED}\n"),
    ],
)  # fmt: skip
def test_interpreter_with_another_set_is_refused(
    tree: PreparedTree, links: tuple[str, ...], candidate: Any, adopted: Any, words: str
) -> None:
    with_packages(tree, candidate, adopted)
    refused(tree, words, *CANDIDATE, *WITHOUT, *links, *REVIEWED)


def test_interpreter_of_another_python_or_without_contents_is_refused(
    tree: PreparedTree, links: tuple[str, ...]
) -> None:
    edit(tree, lambda raw: raw["sides"]["candidate"].pop("wheels"))
    words = "the gate does not record the files of fast 1.0 in "
    refused(tree, words, *CANDIDATE, *WITHOUT, *links, *REVIEWED)
    python = read_lock(lane_lock(tree.root, "cpu")).python
    with_packages(tree, {}, python="3.7.9")
    words = f"the candidate ran Python 3.7, and the set of lane cpu is for {python}: gate an interpreter of Python"
    refused(tree, words, *CANDIDATE, *WITHOUT, *links, *REVIEWED)


@planted("C39", "another variant of torch, whose label the index omits")
@pytest.mark.parametrize(
    ("provenance", "build"),
    [
        ({"torch": "9.11.0+cpu"}, "9.11.0+cpu (git f00d)"),
        ({"torch_git": "beef"}, "9.11.0 (git beef)"),
        ({"torch_git": None}, "9.11.0 (git unknown)"),
        ({"torch": None}, "of an unknown version (git f00d)"),
        ({}, ""),
    ],
)
def test_only_the_same_build_of_a_labelled_torch_is_adopted(
    tree: PreparedTree, links: tuple[str, ...], provenance: dict[str, Any], build: str
) -> None:
    """The candidate's torch is 9.11.0+cpu by its metadata, and the index has 9.11.0."""
    with_packages(tree, {"torch": "9.11.0+cpu"}, **provenance)
    if not build:
        adopt(tree, *CANDIDATE, *WITHOUT, *links, *REVIEWED)
        assert read_lock(lane_lock(tree.root, "cpu")).versions["torch"] == "9.11.0"
        return
    words = (
        f"the interpreter had torch 9.11.0+cpu, which is {build}, and torch-9.11.0-py3-none-any.whl of the set is"
        " 9.11.0 (git f00d): name the variant that was measured: --candidate torch==9.11.0+cpu --index URL\n"
    )
    refused(tree, words, *CANDIDATE, *WITHOUT, *links, *REVIEWED)
    hint = "name the requirement whose set it is: bumpgate adopt g/gate.json --candidate 'torch==9.11.0+cpu'"
    refused(tree, f"{hint}\n", *WITHOUT, *links, *REVIEWED)


def test_candidate_without_kernel_wheels_gives_them_up(tree: PreparedTree) -> None:
    """A gate of a requirement leaves unfit wheels out by itself."""
    gated = tree.gate("9.10.0")
    assert gated.code == 0, gated.out + gated.err
    lacking = "the candidate has no fast, faster of lane cpu: build it and gate again "
    tree.refused(lacking, "adopt", "9.10.0/gate.json")
    both = ("--without", "Faster", "--without", "fast")
    done = tree.bumpgate("adopt", "9.10.0/gate.json", *both)
    assert (done.code, "given up: fast, faster, with 2 rows\n" in done.out) == (0, True), done.err
    row = LANE + 'without = ["fast", "faster"]\n'
    assert (tree.root / "lanes/cpu/lane.toml").read_text().startswith(row)
    assert '"torch==9.10.0", # the adopted one\n]' in (tree.root / "pyproject.toml").read_text()
    assert peers(tree) == {}
    assert tree.run_lane("9.10.0")[0] == 0


def test_kernel_wheel_as_candidate_is_compared_by_its_file(tree: PreparedTree) -> None:
    """One version may be there in two builds: the named one must be the measured one."""
    builds = {"fast": "again", "faster": "old"}
    contents = {name: content_of(tree.wheel(build, name)) for name, build in builds.items()}
    edit(tree, lambda raw: raw["sides"]["candidate"]["wheels"].update(contents))
    with_packages(tree, {"torch": "9.9.0", "faster": "1.0"}, torch="9.9.0")
    again, old = (str(tree.wheel(build, "fast")) for build in ("again", "old"))
    words = f"the set of {old} has another build of fast 1.0 than the interpreter, {again}: name that file: --candidate"
    links = ("--find-links", str(tree.kernels / "again"), "--find-links", str(tree.kernels / "old"))
    refused(tree, words, "--candidate", old, *links, *REVIEWED)
    adopt(tree, "--candidate", again, *links, *REVIEWED, "--no-store")
    locked = {p.name: p.wheels[0].sha256 for p in read_lock(lane_lock(tree.root, "cpu")).packages}
    assert {name: locked[name] for name in builds} == {
        name: sha256_of(tree.wheel(build, name)) for name, build in builds.items()
    }
