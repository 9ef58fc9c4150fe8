"""`bumpgate adopt`: from a gate of real environments to the adopted set in one step, or a refusal in one line."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core import accepted
from bumpgate.core.baseline import load
from bumpgate.env.lane import lane_lock
from bumpgate.env.locks import read_lock
from bumpgate.history import adoptions
from bumpgate.process.tree_digest import bind
from suites.support.planted import planted
from tests.support.adopting import LANE, LOG, NODE, WRITTEN, AdoptTree, Change, patched, rewrite_gate, wheels
from tests.support.local_index import LocalIndex, fake_wheel
from tests.support.reports import save_record

pytestmark = pytest.mark.long(54)

REVIEWED = ("--reviewed", "release/facts/category", "--reason", "deprecated classes became future ones")


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdoptTree]:
    """The tree with one finished gate per candidate; tests must not change it."""
    folder = tmp_path_factory.mktemp("adopt")
    with LocalIndex(wheels(folder / "wheels")) as index:
        tree = AdoptTree(folder / "tree", index, folder / "home")
        for version, code in (("9.10.0", 0), ("9.11.0", 1), ("9.12.0", 1)):
            done = tree.gate(version)
            assert done.code == code, done.out + done.err
            review = " --reviewed ROW --reason TEXT, for each intended change" if code else ""
            assert done.err.endswith(f"to adopt it: bumpgate adopt {version}/gate.json{review}\n")
        yield tree
        tree.end()


def adopt(tree: AdoptTree, version: str, *more: str) -> Any:
    return tree.bumpgate("adopt", f"{version}/gate.json", *more)


def refused(tree: AdoptTree, words: str, version: str, *more: str) -> None:
    before = tree.files()
    done = adopt(tree, version, *more)
    assert (done.code, done.out, len(done.err.splitlines())) == (4, "", 1), done.out + done.err
    assert words in done.err
    assert tree.files() == before


def test_adopt_writes_the_candidate_as_adopted_set(tree: AdoptTree) -> None:
    before = load(tree.root / "baselines/cpu.json", "cpu")
    done = adopt(tree, "9.10.0")
    assert (done.code, done.err) == (0, "fetching torch-9.10.0-py3-none-any.whl\n"), done.out + done.err
    assert done.out.startswith("lane cpu: torch 9.9.0 -> 9.10.0, ADOPT of the gate of ")
    assert "  torch 9.9.0 -> 9.10.0\n" in done.out
    assert read_lock(lane_lock(tree.root, "cpu")).versions == {"pytest": "99.0", "torch": "9.10.0"}
    assert (tree.root / "lanes/cpu/lane.toml").read_text() == LANE
    project = (tree.root / "pyproject.toml").read_text()
    assert 'cpu = ["bumpgate[suite]", "torch==9.10.0"]' in project
    assert "# A lane pins the torch it was adopted with" in project, "comments are kept"
    after = load(tree.root / "baselines/cpu.json", "cpu")
    moved = {row: r.value for row, r in after.rows.items() if r != before.rows.get(row)}
    assert moved == {"release/facts/code_hash": "bbbb"}
    kept = after.rows["release/facts/saved_bytes"]
    assert (kept.value, kept.tolerance, kept.note) == (100, 0.02, "widened by hand")
    assert after.made_with["torch"] == "9.10.0"
    entry = adoptions.load(tree.root).last("cpu")
    assert entry
    assert (entry.old, entry.new, entry.decision, entry.reviewed) == ("9.9.0", "9.10.0", "ADOPT", ())
    assert not tree.journal.exists()
    refused(tree, "9.10.0/gate.json is stale (tree: baselines/adoptions.toml, baselines/cpu.json, ", "9.10.0")


def test_lane_is_green_after_adopt_and_red_after_rollback(tree: AdoptTree) -> None:
    """The complete flow: the lane is red in the candidate, green after adoption, and red again after rollback."""
    python = json.loads((tree.root / "9.11.0/gate.json").read_text())["sides"]["candidate"]["python"]

    def lane() -> int:
        command = [python, "-m", "pytest", "-m", "cpu", "-n", "0", "--gate", "--record=record.json"]
        env = tree.env | {"PYTHONPATH": str(tree.root)}
        return subprocess.run(command, cwd=tree.root, env=env, capture_output=True, timeout=120).returncode

    files = tree.files()
    assert lane() == 1
    done = adopt(tree, "9.11.0", *REVIEWED)
    assert done.code == 0, done.err
    assert f"check: {python} -m pytest -m cpu --gate\n" in done.out
    assert lane() == 0
    back = tree.bumpgate("rollback", "cpu", "--adoption")
    assert back.code == 0, back.out + back.err
    assert back.out.startswith(f"restored {', '.join(WRITTEN)}: lane cpu, torch 9.11.0 -> 9.9.0\n")
    assert "rollback cpu: 2 wheels verified, built offline in " in back.out
    assert "suites/canaries green in " in back.out
    restored = tree.files()
    closed = restored.pop(Path(LOG).name)
    assert restored == {name: text for name, text in files.items() if name in restored}
    assert closed
    assert b"rolled_back = " in closed
    assert lane() == 1


def test_adopt_stores_wheels_of_both_sets(tree: AdoptTree) -> None:
    """A rollback works offline although the earlier set was never frozen on this host."""
    shutil.rmtree(tree.home / "store")
    done = adopt(tree, "9.10.0")
    fetched = {line for line in done.err.splitlines() if line.startswith("fetching ")}
    expected = {f"fetching torch-{version}-py3-none-any.whl" for version in ("9.9.0", "9.10.0")}
    assert (done.code, fetched >= expected) == (0, True), done.err
    back = tree.bumpgate("rollback", "cpu", "--adoption")
    assert "rollback cpu: 2 wheels verified, built offline in " in back.out, back.out + back.err


def test_adopt_says_what_rollback_cannot_restore(tree: AdoptTree) -> None:
    shutil.rmtree(tree.home / "store")
    tree.env["UV_DEFAULT_INDEX"] = tree.env["UV_DEFAULT_INDEX"].replace("/index", "/empty")
    done = adopt(tree, "9.10.0")
    assert done.code == 0, done.err
    assert "torch-9.9.0-py3-none-any.whl: rollback cannot restore the earlier set\n" in done.err


def test_reviewed_finding_is_adopted_and_recorded(tree: AdoptTree) -> None:
    done = adopt(tree, "9.11.0", *REVIEWED)
    assert done.code == 0, done.out + done.err
    assert (
        "reviewed release/facts/category (CHANGED category): deprecated classes became future ones"
        in done.out
    )
    rows = load(tree.root / "baselines/cpu.json", "cpu").rows
    assert rows["release/facts/category"].value == "FutureWarning"
    entry = adoptions.load(tree.root).last("cpu")
    assert entry
    assert [vars(r) for r in entry.reviewed] == [
        {
            "row": "release/facts/category",
            "finding": "CHANGED category",
            "reason": "deprecated classes became future ones",
        }
    ]


def test_dry_run_prints_the_diff_and_writes_nothing(tree: AdoptTree) -> None:
    before = tree.files()
    done = adopt(tree, "9.11.0", *REVIEWED, "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert tree.files() == before
    assert '+version = "9.11.0"\n' in done.out
    heads = [line for line in done.out.splitlines() if line.startswith("+++ ")]
    assert heads == [f"+++ b/{path}" for path in (*WRITTEN, LOG)]
    patch = done.out[: done.out.index("lane cpu: torch")]
    applied = subprocess.run(["patch", "-p1"], cwd=tree.root, input=patch, text=True, capture_output=True)
    assert applied.returncode == 0, applied.stdout
    by_patch = tree.files()
    for path, text in zip((tree.root / p for p in (*WRITTEN, LOG)), before.values()):
        path.unlink() if text is None else path.write_bytes(text)
    assert adopt(tree, "9.11.0", *REVIEWED).code == 0
    assert tree.files() == by_patch, "the printed diff equals what is written"


def problem(raw: dict[str, Any]) -> None:
    raw["problems"] = [{"test": NODE, "kind": "failed", "why": "boom"}]


def of_side(side: str, **packages: str) -> Change:
    return lambda raw: raw["sides"][side]["packages"].update(packages)


# Evidence that does not suffice, in a gate that was judged from it: (words, change of gate.json, of candidate.json).
INSUFFICIENT: dict[str, tuple[str, Change, Change]] = {
    "another gap": (
        "a review does not close gaps in the evidence: INSTRUMENT instrument graphs: read 2",
        lambda raw: raw["sides"]["candidate"].update(canaries={"graphs": "read 2, knows 1"}),
        bool,
    ),
    "unfinished": (
        "the gate is not finished: resume it with its command and --resume",
        lambda raw: raw.update(finished=False),
        bool,
    ),
    "selection": (
        "measured a part of lane cpu (suites/release): gate the whole lane",
        lambda raw: raw["config"].update(selection=["suites/release"]),
        bool,
    ),
    "another adopted set": (
        "compares with torch==9.8.0, not with the adopted set",
        lambda raw: raw["config"].update(adopted="torch==9.8.0"),
        bool,
    ),
    "other adopted interpreter": (
        "does not compare with the adopted set (torch 9.9.0 -> 9.7.0)",
        lambda raw: (raw["config"].update(python_adopted="/x"), of_side("adopted", torch="9.7.0")(raw)),
        bool,
    ),
    "commit": ("is stale (commit 123 -> none)", lambda raw: raw["binding"].update(commit="123"), bool),
    "bumpgate": ("is stale (bumpgate 0.0 -> ", lambda raw: raw["binding"].update(bumpgate="0.0"), bool),
    "packages": (
        "is not the set that was measured (torch 9.11.0 -> 9.8.0)",
        of_side("candidate", torch="9.8.0"),
        bool,
    ),
    "failed test": ("a failed test cannot be reviewed away: PROBLEM", bool, problem),
}


@planted("C39", "a gate that shows nothing, or another thing, is adopted")
@pytest.mark.parametrize("name", INSUFFICIENT)
def test_adopt_refuses_insufficient_gate(tree: AdoptTree, name: str) -> None:
    words, gate, candidate = INSUFFICIENT[name]
    rewrite_gate(tree.root / "9.11.0", gate, candidate)
    refused(tree, words, "9.11.0", *REVIEWED)


def test_adopt_refuses_a_gate_with_a_gap(tree: AdoptTree) -> None:
    broken = {"graphs": "read 2, knows 1"}
    rewrite_gate(tree.root / "9.10.0", lambda raw: raw["sides"]["adopted"].update(canaries=broken))
    refused(tree, "UNKNOWN, with 1 gaps in the evidence", "9.10.0")


def of_record(side: str, change: Change, *, sealed: bool = True) -> Callable[[Path], Any]:
    """Return an edit of a side's record. sealed: with the digest that a run would have given it."""

    def edit(folder: Path) -> None:
        path = folder / f"{side}.json"
        raw = json.loads(path.read_text())
        change(raw)
        save_record(path, raw) if sealed else path.write_text(json.dumps(raw))

    return edit


def of_gate(change: Change) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        raw = json.loads((folder / "gate.json").read_text())
        change(raw)
        (folder / "gate.json").write_text(json.dumps(raw))

    return edit


def swap(folder: Path) -> None:
    shutil.copy(folder / "adopted.json", folder / "candidate.json")


EDITED: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "adopt": ("other decision", of_gate(lambda raw: raw.update(decision="ADOPT", findings=[]))),
    "no findings": (
        "states HOLD, and its worst finding is ADOPT",
        of_gate(lambda raw: raw.update(findings=[])),
    ),
    "harmless": (
        "states HOLD, and its worst finding is ADOPT",
        of_gate(lambda raw: [f.update(decision="ADOPT") for f in raw["findings"]]),
    ),
    "head": ("other findings", of_gate(lambda raw: raw["findings"][0].update(head="nothing"))),
    "other row": ("other findings", of_gate(lambda raw: raw["findings"][0].update(rows=["a/b/c"]))),
    "moved": ("other moved", of_gate(lambda raw: raw.update(moved=[]))),
    "finished": ("finished must be a bool, got 'no'", of_gate(lambda raw: raw.update(finished="no"))),
    "config": ("config must be a dict, got None", of_gate(lambda raw: raw.update(config=None))),
    "selection": (
        "not a gate that can be resumed (TypeError: ",
        of_gate(lambda raw: raw["config"].update(selection=3)),
    ),
    "packages": ("evidence changed since", of_gate(of_side("candidate", torch="9.10.0"))),
    "no digests": ("it does not hold what it was judged from", of_gate(lambda raw: raw.pop("digests"))),
    "no inputs": ("it does not hold what it was judged from", of_gate(lambda raw: raw.update(inputs=None))),
    "no binding": ("evidence changed since", of_gate(lambda raw: raw.update(binding=None))),
    "swapped": ("candidate.json changed since the verdict", swap),
    "no rows": ("candidate.json changed since", of_record("candidate", lambda raw: raw.update(rows=[]))),
    "a value": (
        "adopted.json changed since",
        of_record("adopted", lambda raw: raw["rows"][1]["row"].update(value="FutureWarning")),
    ),
    "complete": (
        "changed since the verdict",
        of_record("candidate", lambda raw: raw.update(complete="false"), sealed=False),
    ),
    "lost": ("candidate.json changed since", lambda folder: (folder / "candidate.json").unlink()),
}


@planted("C39", "a gate is edited after its verdict, and then believed")
@pytest.mark.parametrize("name", EDITED)
def test_edited_gate_is_believed_nowhere(tree: AdoptTree, name: str) -> None:
    words, edit = EDITED[name]
    edit(tree.root / "9.11.0")
    refused(tree, words, "9.11.0", *REVIEWED)
    for command in (("report",), ("history", "add")):
        done = tree.bumpgate(*command, "9.11.0/gate.json")
        assert (done.code, done.out, len(done.err.splitlines())) == (4, "", 1), done.out + done.err
        assert words in done.err
    assert not (tree.root / "9.11.0/gate.html").exists()


@pytest.mark.parametrize("lane", ["tpu", 3, None])
def test_gate_of_a_lane_that_is_not_declared_is_one_line(tree: AdoptTree, lane: object) -> None:
    of_gate(lambda raw: raw.update(lane=lane))(tree.root / "9.11.0")
    before = tree.files()
    done = adopt(tree, "9.11.0", *REVIEWED)
    assert (done.code, done.out, len(done.err.splitlines())) == (4, "", 1), done.out + done.err
    assert tree.files() == before


def test_adopt_refuses_gate_whose_acceptance_expired(tree: AdoptTree) -> None:
    """The verdict of that day would be another one today."""
    day = accepted.today() - timedelta(days=1)
    entry = 'lane = "cpu"\nrow = "release/facts/category"\nvalue = "x"\nowner = "ada"\nreason = "why"\n'
    tree.write("baselines/accepted.toml", f"[[accepted]]\n{entry}since = {day}\nexpires = {day}\n")
    now = bind(tree.root, tree.root / "9.11.0").to_json()
    rewrite_gate(tree.root / "9.11.0", lambda raw: raw.update(started=f"{day}T00:00:00+00:00", binding=now))
    words = f"is stale (the acceptance of release/facts/category expired {day}): gate again"
    refused(tree, words, "9.11.0", *REVIEWED)
    resumed = tree.gate("9.11.0", "--resume")
    assert resumed.code == 4
    assert words in resumed.err


OPTIONS = {
    "nothing reviewed": (
        (),
        "not reviewed (1): CHANGED release/facts/category; name each with --reviewed ROW",
    ),
    "no reason": (("--reviewed", "release/*/category"), "1 --reviewed and 0 --reason"),
    "reason alone": (("--reason", "x"), "--reason requires --reviewed"),
    "candidate": (
        ("--candidate", "torch==9.11.0"),
        "--candidate torch==9.11.0: 9.11.0/gate.json is of --candidate torch==9.11.0, whose set it has resolved:"
        " leave --candidate out\n",
    ),
    "index": (("--index", "http://x"), "resolved: leave --index out\n"),
    "find-links": (("--find-links", "x"), "--find-links x: 9.11.0/gate.json is of --candidate "),
    "no kernel wheels": (
        (*REVIEWED, "--without", "fast"),
        "--without fast: not a kernel wheel of lane cpu (none)",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_adopt_refuses_incomplete_review(tree: AdoptTree, name: str) -> None:
    options, words = OPTIONS[name]
    refused(tree, words, "9.11.0", *options)


def test_derived_row_cannot_be_reviewed_away(tree: AdoptTree) -> None:
    words = "release/facts/graph_breaks is red whatever the baseline holds (expected 13 (derived), measured 14 breaks"
    refused(tree, words.removesuffix(" breaks"), "9.12.0", "--reviewed", "release/*", "--reason", "one more")


@planted("C39", "a test that crashes in the candidate takes its derived rows along")
def test_row_of_a_crashed_test_cannot_be_reviewed_away(tree: AdoptTree) -> None:
    """Of its rows, the first is reported and unchanged; the derived one is not."""
    lines = {"torch/__init__.py": "__version__ = '9.14.0'\nCATEGORY = 'DeprecationWarning'\n"}
    lines["torch/version.py"] = "__version__ = '9.14.0'\ngit_version = 'f00d'\n"
    made = [*wheels(tree.home / "wheels"), fake_wheel(tree.home / "wheels", "torch", "9.14.0", lines)]
    with LocalIndex(made) as index:
        tree.env["UV_DEFAULT_INDEX"] = index.url
        gate = tree.gate("9.14.0")
        assert gate.code == 1, gate.out + gate.err
        refused(tree, "change its test", "9.14.0", "--reviewed", "release/*", "--reason", "gone upstream")


def test_adopt_refuses_edited_tree_and_missing_files(tree: AdoptTree) -> None:
    (tree.root / "9.10.0/candidate.pylock.toml").unlink()
    refused(tree, "candidate.pylock.toml does not exist, so the candidate's wheels are unknown", "9.10.0")
    refused(tree, "none/gate.json: cannot be read", "none")
    (tree.root / "9.11.0/gate.json").write_text((tree.root / "9.11.0/candidate.json").read_text())
    refused(tree, "is the record of one run: name the gate.json of a gate", "9.11.0")
    tree.write("suites/release/conftest.py", "")
    refused(tree, "9.12.0/gate.json is stale (tree: suites/release/conftest.py): gate again", "9.12.0")


@planted("C39", "kill -9 between two of an adoption's writes")
@pytest.mark.parametrize("at", [1, 2, 4])
def test_killed_adoption_is_undone_by_the_next_command(tree: AdoptTree, at: int) -> None:
    before = tree.files()
    arguments = ("adopt", "9.11.0/gate.json", *REVIEWED)
    code, _, _ = patched(tree, f"if len(seen) == {at}: os.kill(os.getpid(), signal.SIGKILL)", *arguments)
    assert code == -9
    assert tree.journal.exists()
    gate = tree.gate("9.9.0")
    assert (gate.code, len(gate.err.splitlines())) == (4, 1)
    words = "the adoption of lane cpu was cut short here: undo it with: bumpgate rollback cpu --adoption"
    assert words in gate.err
    cut = tree.files()
    dry = adopt(tree, "9.11.0", *REVIEWED, "--dry-run")
    assert (dry.code, dry.out, tree.files()) == (4, "", cut), "a dry run recovers nothing"
    assert words in dry.err
    if at % 2:
        back = tree.bumpgate("rollback", "cpu", "--adoption", "--no-smoke")
        assert back.code == 0, back.out + back.err
        assert tree.files() == before
    again = adopt(tree, "9.11.0", *REVIEWED)
    assert again.code == 0, again.err
    assert not list(tree.root.rglob("*.partial"))
    assert not tree.journal.exists()
    assert len(adoptions.load(tree.root).entries) == 1


def test_edit_after_a_killed_adoption_is_kept(tree: AdoptTree) -> None:
    kill = "if len(seen) == 3: os.kill(os.getpid(), signal.SIGKILL)"
    patched(tree, kill, "adopt", "9.11.0/gate.json", *REVIEWED)
    tree.write("pyproject.toml", "mine")
    words = "pyproject.toml was edited after the adoption of lane cpu was cut short: restore it with git"
    refused(tree, words, "9.11.0", *REVIEWED)


@pytest.mark.parametrize("error", ["ENOSPC", "EROFS"])
@pytest.mark.parametrize("at", [1, 4])
def test_failed_write_leaves_every_file_unchanged(tree: AdoptTree, error: str, at: int) -> None:
    before = tree.files()
    number = getattr(errno, error)
    fault = f"if len(seen) == {at}: raise OSError({number}, os.strerror({number}), str(b))"
    code, out, err = patched(tree, fault, "adopt", "9.10.0/gate.json")
    assert (code, out) == (125, "")
    assert err.splitlines()[-1].endswith("; nothing was adopted")
    assert tree.files() == before
    assert not list(tree.root.rglob("*.partial"))
    assert not tree.journal.exists()


def test_full_disk_while_staging_changes_nothing(tree: AdoptTree) -> None:
    """Uses a real process limit, not a patched call."""
    before = tree.files()
    program = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    program += "resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))\nfrom bumpgate.cli import main; main()"
    process = tree.start("-c", program, "adopt", "9.10.0/gate.json", "--no-store")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (125, ""), err
    assert "File too large; nothing was adopted" in err
    assert tree.files() == before


def test_failing_index_changes_nothing(tree: AdoptTree, gated: AdoptTree) -> None:
    tree.env["UV_DEFAULT_INDEX"] = "http://127.0.0.1:9/index"
    edited = tree.root / "9.10.0/candidate.pylock.toml"
    edited.write_text(edited.read_text().replace("127.0.0.1:", "127.0.0.1:9/x"))
    before = tree.files()
    done = adopt(tree, "9.10.0")
    assert (done.code, done.out) == (4, "")
    assert "cannot be fetched" in done.err.splitlines()[-1]
    assert tree.files() == before


def test_rollback_refuses_files_edited_since_adoption(tree: AdoptTree) -> None:
    assert tree.bumpgate("rollback", "cpu", "--adoption").err == (
        "bumpgate: lane cpu has no adoption to undo: baselines/adoptions.toml lists them\n"
    )
    assert adopt(tree, "9.10.0").code == 0
    tree.write("baselines/cpu.json", (tree.root / "baselines/cpu.json").read_text() + "\n")
    before = tree.files()
    done = tree.bumpgate("rollback", "cpu", "--adoption")
    assert (done.code, done.out, len(done.err.splitlines())) == (4, "", 1)
    assert "baselines/cpu.json changed since 9.10.0 was adopted on " in done.err
    assert tree.files() == before


def test_rollback_restores_files_from_git(tree: AdoptTree) -> None:
    def git(*arguments: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *author, *arguments], cwd=tree.root, check=True, capture_output=True)

    git("init", "-q")
    git("add", *WRITTEN)
    git("commit", "-qm", "one")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tree.root, capture_output=True, text=True
    ).stdout
    before = tree.files()
    (tree.root / ".git").rename(tree.root.parent / "git")
    assert adopt(tree, "9.10.0").code == 0
    (tree.root.parent / "git").rename(tree.root / ".git")
    for kept in (tree.home / "adoptions").glob("[0-9a-f]*"):
        kept.unlink()
    assert "neither in" in tree.bumpgate("rollback", "cpu", "--adoption").err
    tree.write(LOG, (tree.root / LOG).read_text().replace('commit = ""', f'commit = "{commit.strip()}"'))
    assert tree.bumpgate("rollback", "cpu", "--adoption", "--no-smoke").code == 0
    after = tree.files()
    assert [after[Path(p).name] for p in WRITTEN] == [before[Path(p).name] for p in WRITTEN]
