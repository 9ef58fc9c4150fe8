"""`bumpgate rollback LANE --adoption` undoes one adoption, however often it is cut short and repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from bumpgate.env.lane import lane_lock
from bumpgate.history import adoptions
from bumpgate.history.adoptions import Adoption
from bumpgate.process.file_transaction import ADOPTION, Operation, digest
from suites.support.planted import planted
from tests.support.adopting import LANE, LOG, WRITTEN, AdoptTree, patched, wheels
from tests.support.local_index import LocalIndex
from tests.support.project import Result

pytestmark = pytest.mark.long(40)

ADOPT = ("adopt", "9.10.0/gate.json")
UNDO = ("rollback", "cpu", "--adoption", "--no-smoke")
EARLIER = LANE.replace("reason", "earlier reason")


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdoptTree]:
    """A tree that adopted 9.9.0 after 9.8.0, with the finished gate of 9.10.0."""
    folder = tmp_path_factory.mktemp("undo")
    with LocalIndex(wheels(folder / "wheels")) as index:
        tree = AdoptTree(folder / "tree", index, folder / "home")
        path = "lanes/cpu/lane.toml"
        now = (tree.root / path).read_text()
        (tree.home / "adoptions").mkdir(parents=True, exist_ok=True)
        (tree.home / "adoptions" / digest(EARLIER)).write_text(EARLIER)
        entry = Adoption(
            lane="cpu",
            day=date(2026, 1, 2),
            candidate="torch==9.9.0",
            old="9.8.0",
            new="9.9.0",
            decision="ADOPT",
            gate="",
            commit="",
            before={path: digest(EARLIER)},
            after={path: digest(now)},
        )
        tree.write(LOG, adoptions.text(adoptions.Log((entry,))))
        done = tree.gate("9.10.0")
        assert done.code == 0, done.out + done.err
        yield tree
        tree.end()


def written(tree: AdoptTree) -> list[bytes | None]:
    """Return the content of the files that an adoption writes, but for its log."""
    found = tree.files()
    return [found[Path(path).name] for path in WRITTEN]


def adopted(tree: AdoptTree) -> list[bytes | None]:
    """Adopt 9.10.0; return the files before it."""
    before = written(tree)
    done = tree.bumpgate(*ADOPT)
    assert done.code == 0, done.err
    assert written(tree) != before
    return before


def undone(tree: AdoptTree, before: list[bytes | None], *arguments: str) -> Result:
    """Run the command, after which exactly the adoption of 9.10.0 is undone."""
    done = tree.bumpgate(*(arguments or UNDO))
    assert done.code == 0, done.out + done.err
    assert written(tree) == before
    open_entries = [a.new for a in adoptions.load(tree.root).entries if not a.rolled_back]
    assert open_entries == ["9.9.0"]
    assert not list(tree.root.rglob("*.partial"))
    assert not tree.journal.exists()
    return done


@planted("C39", "kill -9 between two of a rollback's writes")
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_killed_rollback_is_finished_by_the_same_command(tree: AdoptTree, at: int) -> None:
    before = adopted(tree)
    kill = f"if len(seen) == {at}: os.kill(os.getpid(), 9)"
    assert patched(tree, kill, *UNDO)[0] == -9
    if at == 2:
        gate = tree.gate("9.9.0")
        words = (
            "the rollback of lane cpu was cut short here: finish it with: bumpgate rollback cpu --adoption"
        )
        assert (gate.code, words in gate.err) == (4, True), gate.err
    done = undone(tree, before)
    assert ": the rollback of lane cpu was cut short\nrestored " in done.out


def test_adoption_of_another_lane_that_was_cut_short_is_no_undo(tree: AdoptTree) -> None:
    before = adopted(tree)
    tree.write("lanes/h200/pylock.toml", "new")
    files = {"lanes/h200/pylock.toml": {"before": None, "after": digest("new")}}
    cut = vars(Operation(ADOPTION, "h200"))
    tree.cut_short(json.dumps({**cut, "files": files}))
    done = undone(tree, before)
    assert done.out.startswith("restored lanes/h200/pylock.toml: the adoption of lane h200 was cut short\n")
    assert not (tree.root / "lanes/h200/pylock.toml").exists()


def test_adoption_that_was_cut_short_is_all_that_is_undone(tree: AdoptTree) -> None:
    before = tree.files()
    assert patched(tree, "if len(seen) == 4: os.kill(os.getpid(), 9)", *ADOPT)[0] == -9
    done = tree.bumpgate(*UNDO)
    assert done.code == 0, done.err
    assert "the adoption of lane cpu was cut short\n" in done.out
    assert tree.files() == before


@planted("C39", "a rollback whose rebuild fails, and that is repeated")
@pytest.mark.parametrize("adoption", [(), ("--adoption",)])
def test_failed_rollback_is_finished_before_another_one(
    tree: AdoptTree, tmp_path: Path, adoption: tuple[str, ...]
) -> None:
    before = adopted(tree)
    (tree.home / "store").rename(tmp_path / "store")
    (tmp_path / "none").mkdir()
    index, cache = tree.env["UV_DEFAULT_INDEX"], tree.env["UV_CACHE_DIR"]
    tree.env |= {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/none", "UV_CACHE_DIR": str(tmp_path / "none")}
    for first in (True, False):
        done = tree.bumpgate(*UNDO)
        assert done.code, done.out
        assert done.out.startswith("restored " if first else "the files of lane cpu are restored, its set is")
        words = "the files of lane cpu are restored, but its set is not verified: finish it with: bumpgate rollback cpu"
        assert words in done.err.splitlines()
        assert written(tree) == before
    assert adoptions.load(tree.root).unverified == {"cpu"}
    tree.env |= {"UV_DEFAULT_INDEX": index, "UV_CACHE_DIR": cache}
    done = undone(tree, before, "rollback", "cpu", *adoption, "--no-smoke")
    assert "rollback cpu: 2 wheels built by their hashes in " in done.out
    assert adoptions.load(tree.root).unverified == frozenset()
    assert tree.bumpgate(*UNDO).code == 0
    assert (tree.root / "lanes/cpu/lane.toml").read_text() == EARLIER


def test_first_adoption_of_a_lane_without_a_lock_is_undone(tree: AdoptTree) -> None:
    lane_lock(tree.root, "cpu").unlink()
    gate = tree.bumpgate("gate", "--lane", "cpu", "--candidate", "torch==9.10.0", "--out", "first")
    assert gate.code == 0, gate.err
    before = written(tree)
    assert tree.bumpgate("adopt", "first/gate.json").code == 0
    done = undone(tree, before)
    words = "rollback cpu: the lane had no lock before the adoption, so there is no set to rebuild"
    assert (done.out.splitlines()[1:], done.err) == ([words], "")
    assert not lane_lock(tree.root, "cpu").exists()
    assert adoptions.load(tree.root).unverified == frozenset()
    assert tree.bumpgate("rollback", "cpu").code == 4


def test_adoption_supersedes_an_unverified_rollback(tree: AdoptTree) -> None:
    log = adoptions.load(tree.root)
    (entry,) = log.entries
    later = adoptions.Log(log.entries, frozenset({"cpu", "h200"})).adding(entry)
    assert (later.entries, later.unverified) == ((entry, entry), {"h200"})
    tree.write(LOG, adoptions.text(later))
    assert adoptions.load(tree.root) == later


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"files": {}}', '{"kind": "adoption", "lane": "cpu", "files": 1}']
)
def test_corrupt_journal_is_one_line(tree: AdoptTree, text: str) -> None:
    tree.cut_short(text)
    for command in (UNDO, ADOPT, ("gate", "--lane", "cpu", "--candidate", "torch==9.9.0", "--out", "g")):
        done = tree.bumpgate(*command)
        assert (done.code, done.out, len(done.err.splitlines())) == (4, "", 1), done.err
        assert f"{tree.journal}: not a journal (" in done.err
