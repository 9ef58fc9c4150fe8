"""The CI files are valid and pinned, and each workflow runs as on a hosted runner, against a recorded forge."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.support.hosted import Job, Runner
from tests.support.tree import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTION = ROOT / "action.yml"
PINNED = re.compile(
    r"(\./( # zizmor: .*)?|OWNER/bumpgate@v1|[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+)$"
)
UNTRUSTED = re.compile(r"\$\{\{[^}]*(inputs|github\.event|matrix\.test|needs)\b[^}]*\}\}")


def load(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text())


def steps(path: Path) -> Iterator[dict[str, Any]]:
    raw = load(path)
    yield from raw["runs"]["steps"] if "runs" in raw else ()
    for job in raw.get("jobs", {}).values():
        yield from job["steps"]


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda p: p.name)
def test_ci_file_is_valid_pinned_and_pastes_no_untrusted_input(path: Path) -> None:
    assert [path.stem for path in WORKFLOWS] == ["mutation", "nightly", "pull_request", "release"]
    schema = "vendor.github-actions" if path == ACTION else "vendor.github-workflows"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [s["run"] for s in steps(path) if UNTRUSTED.search(s.get("run", ""))] == []
    assert path == ACTION or load(path)["permissions"]["contents"] == "read"
    for page in (path, ROOT / "docs" / "ci.md"):
        assert [name for name in re.findall(r"uses: (.+)", page.read_text()) if not PINNED.match(name)] == []


def test_every_ci_tox_environment_exists() -> None:
    raw = load(ROOT / ".github" / "workflows" / "pull_request.yml")["jobs"]
    named = [*raw["tiers"]["strategy"]["matrix"]["environment"], "cpu"]
    tox = (ROOT / "tox.ini").read_text()
    sections = re.findall(r"\[testenv:([^\]]+)\]", tox)
    families = [re.sub(r"\{([^}]*)\}", lambda m: f"({m[1].replace(',', '|')})", name) for name in sections]
    assert all(any(re.fullmatch(family, name) for family in families) for name in named)


# Programs of a hosted runner, which write what they were called with. `python3 -m venv` makes one that holds them all.
TOOL = """#!/usr/bin/env bash
name=$(basename "$0")
case "$name $1 $2" in
  "python3 - ") exec PYTHON - ;;
  "python3 -c "*) exec PYTHON "$@" ;;
  "python3 -m venv") mkdir -p "$3/bin" && cp "$(dirname "$0")"/{python,bumpgate} "$3/bin/"; exit ;;
esac
echo "$name $*${HYPOTHESIS_PROFILE:+, $HYPOTHESIS_PROFILE}" >> "$CALLS"
[ -z "$UV_TORCH_BACKEND" ] || echo "$name with torch for $UV_TORCH_BACKEND" >> "$CALLS"
case "$name $1 $2" in
  "tox run "*) touch record.json; exit "${TOX:-0}" ;;
  "python -m build") mkdir dist && touch dist/bumpgate-0.2.0-py3-none-any.whl ;;
  "python -m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$(dirname "$0")/bumpgate" "$3/bin/" ;;
  "cyclonedx-py environment "*) touch sbom.cdx.json ;;
  "bumpgate lanes candidates") cat "$LISTED" ;;
  "bumpgate lanes moved") cd "$GITHUB_WORKSPACE" && exec PYTHON -c 'from bumpgate.cli import main; main()' "$@" ;;
  "bumpgate versions "*) printf '2.13.0  2026-05-01\\n2.14.0  2026-07-01\\n2.14.1  2026-08-01  yanked\\n' ;;
  "bumpgate gate "*) mkdir -p "$7"; [ -z "$DECISION" ] && exit 125
    echo "{\\"lane\\": \\"$3\\", \\"decision\\": \\"$DECISION\\", \\"finished\\": true}" > "$7/gate.json"
    case $DECISION in ADOPT) exit 0 ;; HOLD) exit 1 ;; *) exit 125 ;; esac ;;
  "bumpgate report "*) echo "$DECISION: torch 2.14.0" > "${2%.json}.md"; touch record.md ;;
  "bumpgate bisect "*) mkdir -p "$7" && echo '{}' > "$7/bisect.json" ;;
  "bumpgate reproduce "*) [ -z "$NO_PROGRAM" ] || exit 4; touch "$4" ;;
  "bumpgate adopt "*) mkdir -p lanes/cpu && echo "# adopted" >> lanes/cpu/pylock.toml ;;
  "gh api "*) [ -z "$READ_ONLY" ] || exit 1; [[ "$*" != *--paginate* ]] || echo "$COMMENTS" ;;
  "gh pr list") echo 0 ;;
esac
"""
NAMES = ("python3", "python", "bumpgate", "gh", "tox", "cyclonedx-py", "pip")


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "safe.directory=*")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def commit(folder: Path, message: str) -> None:
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", message)


def run_workflow(name: str, folder: Path, source: Path | None = None, **variables: Any) -> tuple[Any, str]:
    """Run a workflow -> its jobs by name, and the calls of programs. github_NAME: a value of the context `github`.

    source: a repository; by default what the workflows of this one read, committed or not.
    """
    copy = source or folder / "source"
    if source is None:
        copy.mkdir()
        named = (".github", "action.yml", "lanes", "CHANGELOG.md")
        subprocess.run(["cp", "-r", *(str(ROOT / file) for file in named), str(copy)], check=True)
        commit(copy, "all")
    subprocess.run(["git", "init", "--quiet", "--bare", str(folder / "o/r.git")], check=True)
    text = TOOL.replace("PYTHON", sys.executable)
    calls = folder / "calls"
    calls.touch()
    context = {"repository": "o/r", "run_id": "1", "event_name": "schedule", "token": "t"}
    context |= {"server_url": f"file://{folder}", "workflow": name, "ref_name": "v0.2.0"}
    given = {"CALLS": str(calls), "LISTED": str(folder / "listed"), "DECISION": "", "COMMENTS": ""}
    for key, value in variables.items():
        if key.startswith("github_"):
            context[key.removeprefix("github_").replace("__", ".")] = value
        else:
            given[key] = value
    runner = Runner(copy, folder / "run", dict.fromkeys(NAMES, text), context, given)
    return runner.run(copy / ".github" / "workflows" / f"{name}.yml"), calls.read_text()


def results(jobs: dict[str, Job]) -> dict[str, str]:
    return {name: job.result for name, job in jobs.items()}


LISTED = [
    {"lane": "cpu", "device": "cpu", "candidate": "torch==2.14.0"},
    {"lane": "h200", "device": "cuda", "candidate": "triton==3.9.1"},
    {"lane": "h200", "device": "cuda", "candidate": "torch==2.15.1.dev20261101"},
    {"lane": "v6e", "device": "xla", "candidate": ""},
]
ROOM = "bumpgate-cpu-torch-2.14.0"


def nightly(folder: Path, listed: Any, **variables: Any) -> tuple[dict[str, Job], str]:
    (folder / "listed").write_text(json.dumps(listed))
    return run_workflow("nightly", folder, **variables)


def test_nightly_is_green_without_a_newer_candidate(tmp_path: Path) -> None:
    jobs, calls = nightly(tmp_path, [{**each, "candidate": ""} for each in LISTED])
    every = dict.fromkeys(("candidates", "properties", "every-lane", "notify"), "success")
    assert "tox run -e cpu -- suites/model/test_properties.py, nightly" in calls
    assert results(jobs) == every | dict.fromkeys(("gate", "bisect", "adopt", "mirror"), "skipped"), jobs
    assert jobs["every-lane"].log.splitlines()[-1] == "v6e: no newer candidate"
    assert "bumpgate gate" not in calls


def test_nightly_adopts_each_lane_apart_and_opens_the_pull_request(tmp_path: Path) -> None:
    jobs, calls = nightly(tmp_path, LISTED, DECISION="ADOPT")
    skipped = dict.fromkeys(("bisect", "mirror"), "skipped")
    assert results(jobs) == dict.fromkeys(jobs, "success") | skipped, jobs
    assert [line.split()[5] for line in calls.splitlines() if line.startswith("bumpgate gate")] == [
        each["candidate"] for each in LISTED if each["candidate"]
    ]
    cpu, gpu = (f"with torch for cpu\nbumpgate report bumpgate-{lane}" for lane in ("cpu", "h200"))
    assert (cpu in calls, gpu in calls) == (True, False)
    assert "v6e: no newer candidate" in jobs["every-lane"].log
    log = git(tmp_path / "o/r.git", "log", "--all", "--format=%s%n%an")
    assert log.startswith("Adopt t")
    assert "github-actions[bot]" in log
    assert "Adopt torch==2.15.1.dev20261101" not in log, "a nightly is not adopted"
    assert f"gh pr create --repo o/r --head adopt/{ROOM} --title Adopt torch==2.14.0" in calls
    assert "bumpgate notify --github o/r\n" in calls, "nothing was bisected, and it is no dry run"


@pytest.mark.parametrize("without", ["", "1"], ids=["program", "no program"])
def test_nightly_that_holds_is_red_bisected_reproduced_and_told(tmp_path: Path, without: str) -> None:
    jobs, calls = nightly(tmp_path, LISTED[:1], DECISION="HOLD", NO_PROGRAM=without)
    red = dict.fromkeys(("gate", "every-lane"), "failure") | dict.fromkeys(("adopt", "mirror"), "skipped")
    assert results(jobs) == dict.fromkeys(jobs, "success") | red, jobs
    bisect = f"bumpgate bisect --lane cpu --from-gate {ROOM}/gate.json --out bisect-{ROOM}\n"
    reproduce = f"bumpgate reproduce {ROOM}/gate.json --out bisect-{ROOM}/reproducer.py\n"
    assert bisect in calls.partition(reproduce)[0]
    assert (tmp_path / f"run/artifacts/bisect-{ROOM}/reproducer.py").exists() == (not without)
    assert ("::warning::no reproducer: bumpgate reproduce ended with 4" in jobs["bisect"].log) == bool(
        without
    )
    assert f"--bisect bisect-{ROOM}/bisect.json" in calls


@pytest.mark.parametrize(("decision", "verdict"), [("", "NO REPORT"), ("UNKNOWN", "UNKNOWN")])
def test_nightly_is_red_for_a_lane_without_evidence(tmp_path: Path, decision: str, verdict: str) -> None:
    jobs, calls = nightly(tmp_path, LISTED[:1], DECISION=decision)
    assert (jobs["every-lane"].result, jobs["bisect"].result) == ("failure", "skipped")
    assert f"cpu: torch==2.14.0 {verdict}" in jobs["every-lane"].log
    assert "bumpgate adopt" not in calls


def test_nightly_is_red_if_the_candidates_cannot_be_listed(tmp_path: Path) -> None:
    jobs, _ = run_workflow("nightly", tmp_path)  # the file is absent
    assert (jobs["candidates"].result, jobs["every-lane"].result) == ("failure", "failure")


@pytest.mark.parametrize("name", ["pull_request", "mutation", "release"])
def test_other_workflows_run_as_an_ordinary_user(name: str, tmp_path: Path) -> None:
    jobs, calls = run_workflow(name, tmp_path)
    assert set(results(jobs).values()) == {"success"}, jobs
    assert "tox run" in calls
    if name == "pull_request":
        assert {"tox run -e cpu -- --gate", "tox run -e docs"} <= {*calls.splitlines()}


def test_red_tests_make_a_red_pull_request_with_its_report(tmp_path: Path) -> None:
    jobs, calls = run_workflow("pull_request", tmp_path, TOX="1")
    assert set(results(jobs).values()) == {"failure"}
    assert "bumpgate report record.json" in calls
    assert (tmp_path / "run/artifacts/record-cpu/record.json").exists()


USES = """on: pull_request
permissions: {contents: read, pull-requests: write}
jobs:
  bump:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd # v6.0.2
        with: {fetch-depth: 2}
      - uses: ./
        with: {lane: mine, budget: "50", selection: "tests/a.py -k 'x y'", candidate: CANDIDATE,
               adopt: "${{ contains(github.event.pull_request.labels.*.name, 'adopt') }}"}
"""


def use_action(folder: Path, pin: str, candidate: str = "", **variables: Any) -> tuple[Job, str]:
    """Run the action on a pull request of a foreign repository that moves its requirement; return the job and calls."""
    theirs = folder / "theirs"
    files = {"bumpgate.toml": '[lanes.mine]\nrequirements = "bumps/requirements.txt"\n'}
    files |= {".github/workflows/bump.yml": USES.replace("CANDIDATE", json.dumps(candidate))}
    files |= {"action.yml": ACTION.read_text(), "bumps/requirements.txt": "torch==2.13.0\npytest>=8.3\n"}
    for name, text in files.items():
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).write_text(text)
    for message, text in (("base", files["bumps/requirements.txt"]), ("bump", f"{pin}\npytest>=8.3\n")):
        (theirs / "bumps/requirements.txt").write_text(text)
        commit(theirs, message)
    given = {"github_event_name": "pull_request", "github_event__pull_request__number": "7"}
    jobs, calls = run_workflow("bump", folder, theirs, **given, **variables)
    return jobs["bump"], calls


def test_action_gates_what_a_bot_moves_and_comments_once(tmp_path: Path) -> None:
    job, calls = use_action(tmp_path, "torch==2.14.0", DECISION="HOLD")
    assert job.result == "failure", job.log
    gate = "bumpgate gate --lane mine --candidate torch==2.14.0 --out bumpgate-mine-torch-2.14.0 --anchor history"
    assert f"{gate} --budget 50 -- tests/a.py -k x y\nbumpgate with torch for cpu\n" in calls
    assert "gh api --silent --method POST repos/o/r/issues/7/comments -F body=@" in calls
    comment = (tmp_path / "run/bump-0/temp/comment.md").read_text()
    assert comment == "<!-- bumpgate mine -->\nHOLD: torch 2.14.0\n"
    assert (tmp_path / "run/summary").read_text() == "HOLD: torch 2.14.0\n"
    adopted = (tmp_path / "run/bump-0/checkout/bumps/requirements.txt").read_text()
    assert adopted.startswith("torch==2.13.0")


def test_label_adopts_the_candidate_on_the_branch_of_the_bot(tmp_path: Path) -> None:
    labelled = {"github_event__pull_request__labels__*__name": ["adopt"], "github_head_ref": "bot/torch"}
    job, calls = use_action(tmp_path, "torch==2.14.0", DECISION="HOLD", github_actor="ada", **labelled)
    assert job.result == "success", job.log
    reason = "--no-store --reviewed * --reason label of pull request 7, given by ada"
    assert f"bumpgate adopt bumpgate-mine-torch-2.14.0/gate.json {reason}" in calls
    adopted = git(tmp_path / "theirs", "show", "--stat", "--format=%s", "bot/torch")
    assert adopted.startswith("Adopt torch==2.14.0 on lane mine\n")
    assert ("lanes/cpu/pylock.toml" in adopted, "gate.json" in adopted) == (True, False)


def test_action_updates_its_comment(tmp_path: Path) -> None:
    job, calls = use_action(tmp_path, "torch==2.14.0", "torch==2.15.0", DECISION="ADOPT", COMMENTS="41\n42")
    assert job.result == "success", job.log
    assert "gh api --silent --method PATCH repos/o/r/issues/comments/41 -F body=@" in calls
    assert ("lanes moved" in calls, "POST" in calls) == (False, False)


def test_pull_request_of_a_fork_has_the_summary_alone(tmp_path: Path) -> None:
    job, _ = use_action(tmp_path, "torch==2.14.0", DECISION="ADOPT", READ_ONLY="1")
    assert job.result == "success", job.log
    assert "::warning::bumpgate could not comment" in job.log
    assert (tmp_path / "run/summary").read_text() == "ADOPT: torch 2.14.0\n"


def test_action_has_nothing_to_gate_if_no_package_of_the_lane_moves(tmp_path: Path) -> None:
    job, calls = use_action(tmp_path, "torch==2.13.0")
    assert job.result == "success", job.log
    assert "nothing to gate" in job.log
    assert "bumpgate gate" not in calls


def test_action_installs_its_own_files() -> None:
    (install,) = (s["run"] for s in steps(ACTION) if s.get("name") == "Install the controller")
    assert '"$GITHUB_ACTION_PATH[report]"' in install
