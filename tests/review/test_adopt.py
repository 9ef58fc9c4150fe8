"""`bumpgate adopt` and its undo: from gates of real environments to the adopted set in one step, or a refusal."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core import accepted
from bumpgate.core.baseline import load
from bumpgate.env.lane import lane_lock
from bumpgate.env.locks import read_lock
from bumpgate.history import adoptions
from bumpgate.history.adoptions import Adoption
from bumpgate.process.file_transaction import ADOPTION, Operation, digest
from bumpgate.process.tree_digest import bind
from suites.support.planted import planted
from tests.support.adopting import (
    CANARY_NODE,
    LANE,
    LOG,
    NODE,
    VERSIONS,
    WRITTEN,
    AdoptTree,
    Change,
    patched,
    rewrite_gate,
    torch_wheel,
    wheels,
)
from tests.support.local_index import LocalIndex
from tests.support.project import Result
from tests.support.reports import save_record

pytestmark = pytest.mark.long(54)

REVIEWED = ("--reviewed", "release/facts/category", "--reason", "deprecated classes became future ones")
ADOPT, HELD = ("adopt", "9.10.0/gate.json"), ("adopt", "9.11.0/gate.json")
UNDO = ("rollback", "cpu", "--adoption", "--no-smoke")
KILL = "if len(seen) == {}: os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdoptTree]:
    """The tree with one finished gate per candidate; tests must not change it."""
    folder = tmp_path_factory.mktemp("adopt")
    with LocalIndex(wheels(folder / "wheels")) as index:
        tree = AdoptTree(folder / "tree", index, folder / "home")
        for version, code in (("9.10.0", 0), ("9.11.0", 1)):
            done = tree.gate(version)
            assert done.code == code, done.out + done.err
            review = " --reviewed ROW --reason TEXT, for each intended change" if code else ""
            assert done.err.endswith(f"to adopt it: bumpgate adopt {version}/gate.json{review}\n")
        yield tree
        tree.end()


def ran(tree: AdoptTree, *command: str) -> Result:
    """Run a command that must succeed, and must leave no journal and no half-written file."""
    done = tree.bumpgate(*command)
    assert done.code == 0, done.out + done.err
    assert not tree.journal.exists()
    assert not list(tree.root.rglob("*.partial"))
    return done


def written(tree: AdoptTree) -> dict[str, bytes | None]:
    """Return the content of the files that an adoption writes, but for its log."""
    return {name: text for name, text in tree.files().items() if name != Path(LOG).name}


def test_adopt_writes_the_candidate_as_adopted_set(tree: AdoptTree) -> None:
    before = load(tree.root / "baselines/cpu.json", "cpu")
    done = ran(tree, *ADOPT)
    assert done.err == "fetching torch-9.10.0-py3-none-any.whl\n"
    assert done.out.startswith("lane cpu: torch 9.9.0 -> 9.10.0, ADOPT of the gate of ")
    assert "  torch 9.9.0 -> 9.10.0\n" in done.out
    assert read_lock(lane_lock(tree.root, "cpu")).versions == {"pytest": "99.0", "torch": "9.10.0"}
    assert (tree.root / "lanes/cpu/lane.toml").read_text() == LANE
    project = (tree.root / "pyproject.toml").read_text()
    assert 'cpu = [{ include-group = "suite" }, "torch==9.10.0"]' in project
    assert "# A lane pins the torch it was adopted with" in project, "comments are kept"
    after = load(tree.root / "baselines/cpu.json", "cpu")
    moved = {row: r.value for row, r in after.rows.items() if r != before.rows.get(row)}
    assert moved == {"release/facts/code_hash": "bbbb"}
    kept = after.rows["release/facts/saved_bytes"]
    assert (kept.value, kept.tolerance, kept.note) == (100, 0.02, "widened by hand")
    assert after.made_with["torch"] == "9.10.0"
    assert f"  tests       1 new: {CANARY_NODE}\n" in done.out
    assert (tree.root / "baselines/cpu.tests").read_text() == f"{CANARY_NODE}\n{NODE}\n"
    entry = adoptions.load(tree.root).last("cpu")
    assert entry
    assert (entry.old, entry.new, entry.decision, entry.reviewed) == ("9.9.0", "9.10.0", "ADOPT", ())
    tree.refused("9.10.0/gate.json is stale (tree: baselines/adoptions.toml, baselines/cpu.json, ", *ADOPT)
    ran(tree, "freeze", "--lane", "cpu")
    assert (tree.root / "pyproject.toml").read_text() == project, "a freeze keeps the adoption"


def test_lane_is_green_after_adopt_and_red_after_rollback(tree: AdoptTree) -> None:
    """The complete flow with a reviewed finding: the lane is red in the candidate before and after."""
    before = written(tree)
    assert tree.run_lane("9.11.0")[0] == 1
    done = ran(tree, *HELD, *REVIEWED)
    assert f"check: {tree.candidate('9.11.0')} -m pytest -m cpu --gate\n" in done.out
    assert f"reviewed release/facts/category (CHANGED category): {REVIEWED[3]}" in done.out
    rows = load(tree.root / "baselines/cpu.json", "cpu").rows
    assert rows["release/facts/category"].value == "FutureWarning"
    entry = adoptions.load(tree.root).last("cpu")
    assert entry
    (kept,) = entry.reviewed
    assert (kept.row, kept.finding, kept.reason) == (REVIEWED[1], "CHANGED category", REVIEWED[3])
    assert tree.run_lane("9.11.0")[0] == 0
    back = ran(tree, "rollback", "cpu", "--adoption")
    assert back.out.startswith(f"restored {', '.join(WRITTEN)}: lane cpu, torch 9.11.0 -> 9.9.0\n")
    assert "rollback cpu: 2 wheels verified, built offline in " in back.out
    assert "suites/canaries green in " in back.out
    assert written(tree) == before
    assert "rolled_back = " in (tree.root / LOG).read_text()
    assert tree.run_lane("9.11.0")[0] == 1


def test_adopt_stores_wheels_of_both_sets(tree: AdoptTree) -> None:
    """A rollback works offline although the earlier set was never frozen here; else adopt says what it lacks."""
    shutil.rmtree(tree.home / "store")
    done = ran(tree, *ADOPT)
    fetched = {line for line in done.err.splitlines() if line.startswith("fetching ")}
    assert fetched >= {f"fetching torch-{version}-py3-none-any.whl" for version in ("9.9.0", "9.10.0")}
    assert "rollback cpu: 2 wheels verified, built offline in " in ran(tree, *UNDO).out
    shutil.rmtree(tree.home / "store")
    (tree.root / LOG).unlink()
    tree.env["UV_DEFAULT_INDEX"] = tree.env["UV_DEFAULT_INDEX"].replace("/index", "/empty")
    assert "torch-9.9.0-py3-none-any.whl: rollback cannot restore the earlier set\n" in ran(tree, *ADOPT).err


def test_dry_run_prints_the_diff_and_writes_nothing(tree: AdoptTree) -> None:
    before = tree.files()
    done = ran(tree, *HELD, *REVIEWED, "--dry-run")
    assert (done.err, tree.files()) == ("", before)
    assert '+version = "9.11.0"\n' in done.out
    heads = [line for line in done.out.splitlines() if line.startswith("+++ ")]
    assert heads == [f"+++ b/{path}" for path in (*WRITTEN, LOG)]
    patch = done.out[: done.out.index("lane cpu: torch")]
    applied = subprocess.run(["patch", "-p1"], cwd=tree.root, input=patch, text=True, capture_output=True)
    assert applied.returncode == 0, applied.stdout
    by_patch = tree.files()
    for path, text in zip((tree.root / p for p in (*WRITTEN, LOG)), before.values()):
        path.unlink() if text is None else path.write_bytes(text)
    ran(tree, *HELD, *REVIEWED)
    assert tree.files() == by_patch, "the printed diff equals what is written"


def put(*keys: str, **values: Any) -> Change:
    """Return an edit that changes these values below the keys."""

    def change(raw: dict[str, Any]) -> None:
        for key in keys:
            raw = raw[key]
        raw.update(values)

    return change


def other_python(raw: dict[str, Any]) -> None:
    put("config", python_adopted="/x")(raw)
    put("sides", "adopted", "packages", torch="9.7.0")(raw)


BROKEN = {"graphs": "read 2, knows 1"}
BOOM = {"problems": [{"test": NODE, "kind": "failed", "why": "boom"}]}
GAP = "a review does not close gaps in the evidence: INSTRUMENT instrument graphs: read 2"
# Evidence that does not suffice, in a gate that was judged from it: (change of gate.json, words).
INSUFFICIENT: dict[str, tuple[Change, str]] = {
    "another gap": (put("sides", "candidate", canaries=BROKEN), GAP),
    "unfinished": (put(finished=False), "the gate is not finished: resume it with its command and --resume"),
    "selection": (put("config", selection=["a/b"]), "measured a part of lane cpu (a/b): gate the whole lane"),
    "other adopted": (put("config", adopted="torch==9.8"), "compares with torch==9.8, not with the adopted set"),
    "other python": (other_python, "does not compare with the adopted set (torch 9.9.0 -> 9.7.0)"),
    "commit": (put("binding", commit="123"), "is stale (commit 123 -> none)"),
    "bumpgate": (put("binding", bumpgate="0.0"), "is stale (bumpgate 0.0 -> "),
    "packages": (put("sides", "candidate", "packages", torch="9.8"), "the set that was measured (torch 9.11.0 -> 9.8)"),
}  # fmt: skip


@planted("C39", "a gate that shows nothing, or another thing, is adopted")
@pytest.mark.parametrize("name", INSUFFICIENT)
def test_adopt_refuses_insufficient_gate(tree: AdoptTree, name: str) -> None:
    change, words = INSUFFICIENT[name]
    rewrite_gate(tree.root / "9.11.0", change)
    tree.refused(words, *HELD, *REVIEWED)


def test_adopt_refuses_a_gate_with_a_failed_test_or_a_gap(tree: AdoptTree) -> None:
    rewrite_gate(tree.root / "9.11.0", candidate=put(**BOOM))
    tree.refused("a failed test cannot be reviewed away: PROBLEM", *HELD, *REVIEWED)
    rewrite_gate(tree.root / "9.10.0", put("sides", "adopted", canaries=BROKEN))
    tree.refused("UNKNOWN, with 1 gaps in the evidence", *ADOPT)


def of_gate(change: Change) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        raw = json.loads((folder / "gate.json").read_text())
        change(raw)
        (folder / "gate.json").write_text(json.dumps(raw))

    return edit


def without_rows(folder: Path) -> None:
    """Edit a record and give it the digest that a run would have given it."""
    raw = json.loads((folder / "candidate.json").read_text())
    save_record(folder / "candidate.json", raw | {"rows": []})


def harmless(raw: dict[str, Any]) -> None:
    for finding in raw["findings"]:
        finding["decision"] = "ADOPT"


# tests/gate/test_evidence.py has every edit of a gate; these reach each command that reads one.
EDITED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "decision": (of_gate(put(decision="ADOPT", findings=[])), "other decision"),
    "harmless": (of_gate(harmless), "states HOLD, and its worst finding is ADOPT"),
    "row": (of_gate(lambda raw: raw["findings"][0].update(rows=["a/b/c"])), "other findings"),
    "selection": (of_gate(put("config", selection=3)), "not a gate that can be resumed (TypeError: "),
    "no digests": (of_gate(lambda raw: raw.pop("digests")), "it does not hold what it was judged from"),
    "no binding": (of_gate(put(binding=None)), "evidence changed since"),
    "no rows": (without_rows, "candidate.json changed since"),
    "lane": (of_gate(put(lane="tpu")), ""),
    "no lane": (of_gate(put(lane=None)), ""),
}


@planted("C39", "a gate is edited after its verdict, and then believed")
@pytest.mark.parametrize("name", EDITED)
def test_edited_gate_is_believed_nowhere(tree: AdoptTree, name: str) -> None:
    edit, words = EDITED[name]
    edit(tree.root / "9.11.0")
    for command in (
        (*HELD, *REVIEWED),
        ("report", HELD[1]),
        ("history", "add", HELD[1]),
        ("bisect", "--from-gate", HELD[1]),
    ):
        tree.refused(words, *command)
    assert not (tree.root / "9.11.0/gate.html").exists()


def test_adopt_refuses_gate_whose_acceptance_expired(tree: AdoptTree) -> None:
    """The verdict of that day would be another one today."""
    day = accepted.today() - timedelta(days=1)
    entry = 'lane = "cpu"\nrow = "release/facts/category"\nvalue = "x"\nowner = "ada"\nreason = "why"\n'
    tree.write("baselines/accepted.toml", f"[[accepted]]\n{entry}since = {day}\nexpires = {day}\n")
    now = bind(tree.root, tree.root / "9.11.0").to_json()
    rewrite_gate(tree.root / "9.11.0", lambda raw: raw.update(started=f"{day}T00:00:00+00:00", binding=now))
    words = f"is stale (the acceptance of release/facts/category expired {day}): gate again"
    tree.refused(words, *HELD, *REVIEWED)
    resumed = tree.gate("9.11.0", "--resume")
    assert (resumed.code, words in resumed.err) == (4, True)


def test_options_and_files_that_do_not_fit_the_gate_are_refused(tree: AdoptTree) -> None:
    given = "--candidate torch==9.11.0: 9.11.0/gate.json is of --candidate torch==9.11.0, whose set it has resolved:"
    for options, words in (
        ((), "not reviewed (1): CHANGED release/facts/category; name each with --reviewed ROW"),
        (("--candidate", "torch==9.11.0"), f"{given} leave --candidate out\n"),
        (("--index", "http://x"), "resolved: leave --index out\n"),
        (("--find-links", "x"), "--find-links x: 9.11.0/gate.json is of --candidate "),
        ((*REVIEWED, "--without", "fast"), "--without fast: not a kernel wheel of lane cpu (none)"),
    ):
        tree.refused(words, *HELD, *options)
    unknown = "candidate.pylock.toml does not exist, so the candidate's wheels are unknown"
    (tree.root / "9.10.0/candidate.pylock.toml").unlink()
    tree.refused(unknown, *ADOPT)
    tree.refused("none/gate.json: cannot be read", "adopt", "none/gate.json")
    record = "is the record of one run: name the gate.json of a gate"
    tree.refused(record, "adopt", "9.11.0/candidate.json")
    tree.write("suites/release/conftest.py", "")
    tree.refused("9.11.0/gate.json is stale (tree: suites/release/conftest.py): gate again", *HELD, *REVIEWED)


@planted("C39", "kill -9 between two of an adoption's writes")
@pytest.mark.parametrize("at", [1, 2, 5])
def test_killed_adoption_is_undone_by_the_next_command(tree: AdoptTree, at: int) -> None:
    before = tree.files()
    assert patched(tree, KILL.format(at), *HELD, *REVIEWED)[0] == -9
    assert tree.journal.exists()
    cut = tree.files()
    words = "the adoption of lane cpu was cut short here: undo it with: bumpgate rollback cpu --adoption"
    for command in (
        ("gate", "--lane", "cpu", "--candidate", "torch==9.9.0"),
        (*HELD, *REVIEWED, "--dry-run"),
    ):
        tree.refused(words, *command)
        assert tree.files() == cut, "a gate and a dry run recover nothing"
    if at % 2:
        assert "the adoption of lane cpu was cut short\n" in ran(tree, *UNDO).out
        assert tree.files() == before, "that is all that is undone"
    ran(tree, *HELD, *REVIEWED)
    assert len(adoptions.load(tree.root).entries) == 1


def test_edit_after_a_killed_adoption_is_kept(tree: AdoptTree) -> None:
    patched(tree, KILL.format(3), *HELD, *REVIEWED)
    tree.write("pyproject.toml", "mine")
    words = "pyproject.toml was edited after the adoption of lane cpu was cut short: restore it with git"
    tree.refused(words, *HELD, *REVIEWED)


@pytest.mark.parametrize(("at", "error"), [(1, "ENOSPC"), (5, "EROFS")])
def test_failed_write_leaves_every_file_unchanged(tree: AdoptTree, at: int, error: str) -> None:
    before = tree.files()
    number = getattr(errno, error)
    fault = f"if len(seen) == {at}: raise OSError({number}, os.strerror({number}), str(b))"
    code, out, err = patched(tree, fault, *ADOPT)
    assert (code, out, err.splitlines()[-1].endswith("; nothing was adopted")) == (125, "", True)
    assert (tree.files(), tree.journal.exists(), list(tree.root.rglob("*.partial"))) == (before, False, [])


def test_full_disk_while_staging_changes_nothing(tree: AdoptTree) -> None:
    """Uses a real process limit, not a patched call."""
    before = tree.files()
    program = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    program += "resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))\nfrom bumpgate.cli import main; main()"
    process = tree.start("-c", program, *ADOPT, "--no-store")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, tree.files()) == (125, "", before), err
    assert "File too large; nothing was adopted" in err


def test_failing_index_changes_nothing(tree: AdoptTree) -> None:
    tree.env["UV_DEFAULT_INDEX"] = "http://127.0.0.1:9/index"
    edited = tree.root / "9.10.0/candidate.pylock.toml"
    edited.write_text(edited.read_text().replace("127.0.0.1:", "127.0.0.1:9/x"))
    before = tree.files()
    done = tree.bumpgate(*ADOPT)
    assert (done.code, done.out, tree.files()) == (4, "", before)
    assert "cannot be fetched" in done.err.splitlines()[-1]


def test_guest_adopts_a_wheel_file_without_lock_and_pyproject(tree: AdoptTree) -> None:
    """What `bumpgate init` makes: bumpgate.toml, a requirements file, and no lock."""
    markers = "".join(f"    {line}\n" for line in ("cpu: a lane", "planted: a fault", "affected: a test"))
    tree.write(
        "pytest.ini", f"[pytest]\naddopts = -p bumpgate.plugin -n 0\npythonpath = .\nmarkers =\n{markers}"
    )
    lane = 'device = "cpu"\nrequirements = "requirements.txt"\ncanaries = "suites/canaries"\n'
    tree.write("bumpgate.toml", f"[lanes.cpu]\n{lane}")
    tree.write("requirements.txt", "pytest==99.0\ntorch==9.9.0  # reviewed\n")
    (tree.root / "pyproject.toml").unlink()
    shutil.rmtree(tree.root / "lanes")
    wheel = torch_wheel(tree.root.parent / "my wheels", "9.15.0", VERSIONS["9.9.0"])
    gated = tree.bumpgate("gate", "--lane", "cpu", "--candidate", f"../my wheels/{wheel.name}", "--out", "g")
    assert gated.code == 0, gated.out + gated.err
    shutil.rmtree(tree.home / "store")
    done = ran(tree, "adopt", "g/gate.json")
    files = ("lanes/cpu/pylock.toml", "requirements.txt", *WRITTEN[2:], LOG)
    assert f"wrote {', '.join(files)}; review: git diff\n" in done.out
    assert (tree.root / "requirements.txt").read_text() == "pytest==99.0\ntorch==9.15.0  # reviewed\n"
    assert read_lock(lane_lock(tree.root, "cpu")).versions["torch"] == "9.15.0"
    wheel.unlink()
    ran(tree, "rollback", "cpu", "--no-smoke")
    back = ran(tree, *UNDO)
    words = "rollback cpu: the lane had no lock before the adoption, so there is no set to rebuild"
    assert (back.out.splitlines()[1:], back.err) == ([words], "")
    assert not lane_lock(tree.root, "cpu").exists()
    assert adoptions.load(tree.root).unverified == frozenset()
    assert tree.bumpgate("rollback", "cpu").code == 4


def test_rollback_refuses_files_edited_since_adoption(tree: AdoptTree) -> None:
    tree.refused("lane cpu has no adoption to undo: baselines/adoptions.toml lists them\n", *UNDO)
    ran(tree, *ADOPT)
    tree.write("baselines/cpu.json", (tree.root / "baselines/cpu.json").read_text() + "\n")
    tree.refused("baselines/cpu.json changed since 9.10.0 was adopted on ", *UNDO)


EARLIER = LANE.replace("reason", "earlier reason")


@pytest.fixture
def adopted(tree: AdoptTree) -> dict[str, bytes | None]:
    """The files before the adoption of 9.10.0, which itself follows an adoption of 9.9.0."""
    path = "lanes/cpu/lane.toml"
    before = written(tree)
    ran(tree, *ADOPT)
    (tree.home / "adoptions" / digest(EARLIER)).write_text(EARLIER)
    files = {path: digest(EARLIER)}, {path: digest(LANE)}
    entry = Adoption("cpu", date(2026, 1, 2), "torch==9.9.0", "9.8.0", "9.9.0", "ADOPT", "", "", *files)
    log = adoptions.load(tree.root)
    tree.write(LOG, adoptions.text(adoptions.Log((entry, *log.entries))))
    assert written(tree) != before
    return before


def undone(tree: AdoptTree, before: dict[str, bytes | None], *command: str) -> Result:
    """Run the command, after which exactly the adoption of 9.10.0 is undone."""
    done = ran(tree, *(command or UNDO))
    assert written(tree) == before
    assert [a.new for a in adoptions.load(tree.root).entries if not a.rolled_back] == ["9.9.0"]
    return done


@planted("C39", "kill -9 between two of a rollback's writes")
@pytest.mark.parametrize("at", [1, 3, 5])
def test_killed_rollback_is_finished_by_the_same_command(
    tree: AdoptTree, adopted: dict[str, bytes | None], at: int
) -> None:
    assert patched(tree, KILL.format(at), *UNDO)[0] == -9
    words = "the rollback of lane cpu was cut short here: finish it with: bumpgate rollback cpu --adoption"
    tree.refused(words, "gate", "--lane", "cpu", "--candidate", "torch==9.9.0")
    assert ": the rollback of lane cpu was cut short\nrestored " in undone(tree, adopted).out


def test_adoption_of_another_lane_that_was_cut_short_is_no_undo(
    tree: AdoptTree, adopted: dict[str, bytes | None]
) -> None:
    tree.write("lanes/h200/pylock.toml", "new")
    files = {"lanes/h200/pylock.toml": {"before": None, "after": digest("new")}}
    tree.cut_short(json.dumps({**vars(Operation(ADOPTION, "h200")), "files": files}))
    done = undone(tree, adopted)
    assert done.out.startswith("restored lanes/h200/pylock.toml: the adoption of lane h200 was cut short\n")
    assert not (tree.root / "lanes/h200/pylock.toml").exists()


@planted("C39", "a rollback whose rebuild fails, and that is repeated")
@pytest.mark.parametrize("adoption", [(), ("--adoption",)])
def test_failed_rollback_is_finished_before_another_one(
    tree: AdoptTree, adopted: dict[str, bytes | None], tmp_path: Path, adoption: tuple[str, ...]
) -> None:
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
        assert written(tree) == adopted
    assert adoptions.load(tree.root).unverified == {"cpu"}
    tree.env |= {"UV_DEFAULT_INDEX": index, "UV_CACHE_DIR": cache}
    done = undone(tree, adopted, "rollback", "cpu", *adoption, "--no-smoke")
    assert "rollback cpu: 2 wheels built by their hashes in " in done.out
    assert adoptions.load(tree.root).unverified == frozenset()
    ran(tree, *UNDO)
    assert (tree.root / "lanes/cpu/lane.toml").read_text() == EARLIER


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"files": {}}', '{"kind": "adoption", "lane": "cpu", "files": 1}']
)
def test_corrupt_journal_is_one_line(tree: AdoptTree, text: str) -> None:
    tree.cut_short(text)
    for command in (UNDO, ADOPT, ("gate", "--lane", "cpu", "--candidate", "torch==9.9.0", "--out", "g")):
        tree.refused(f"{tree.journal}: not a journal (", *command)
