"""The CI files are valid, pinned, call existing commands, and are not green if a lane is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from suites.support.lanes import LANES
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


def script(workflow: str, name: str) -> str:
    (found,) = (s["run"] for s in steps(ROOT / ".github" / "workflows" / workflow) if s.get("name") == name)
    return found


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


def a_gate(folder: Path, lane: str, decision: str) -> Path:
    findings = [{"decision": "HOLD", "repro": f"pytest -m {lane} -n 0 'suites/a.py::t[x y]'"}]
    versions = (("adopted", "2.13.0+cpu"), ("candidate", "2.14.0+cpu"))
    raw = {"lane": lane, "decision": decision, "finished": True}
    raw |= {"findings": findings if decision == "HOLD" else []}
    raw |= {"sides": {side: {"packages": {"torch": version}} for side, version in versions}}
    path = folder / f"bumpgate-{lane}" / "gate.json"
    path.parent.mkdir()
    path.write_text(json.dumps(raw))
    return path


def run_script(name: str, folder: Path, **variables: str) -> tuple[int, str]:
    """Run a script of nightly.yml; return its exit code and output."""
    command = ["bash", "-e", "-o", "pipefail", "-c", script("nightly.yml", name)]
    env = os.environ | variables
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_nightly_gates_every_lane() -> None:
    raw = load(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]
    assert raw["gate"]["strategy"]["matrix"]["lane"] == "${{ fromJSON(needs.lanes.outputs.names) }}"
    assert 'bumpgate" lanes --json' in script("nightly.yml", "List the lanes")
    assert (raw["every-lane"]["if"], raw["every-lane"]["needs"]) == ("always()", ["lanes", "gate"])


@pytest.mark.parametrize(
    ("spoil", "verdict"),
    [
        (lambda path: None, "ADOPT"),
        (lambda path: path.unlink(), "NO REPORT"),
        (lambda path: path.write_text("{"), "NO REPORT"),
        (lambda path: path.write_text(path.read_text().replace("ADOPT", "HOLD")), "HOLD"),
        (lambda path: path.write_text(path.read_text().replace("ADOPT", "UNKNOWN")), "UNKNOWN"),
        (lambda path: path.write_text(path.read_text().replace("true", "false")), "UNKNOWN"),
        (lambda path: path.write_text(path.read_text().replace('"h200"', '"cpu"')), "UNKNOWN"),
    ],
    ids=["green", "absent", "cut off", "held", "unknown", "not finished", "of another lane"],
)
def test_nightly_is_green_only_if_every_lane_adopts(tmp_path: Path, spoil: Any, verdict: str) -> None:
    files = {lane: a_gate(tmp_path, lane, "ADOPT") for lane in LANES}
    spoil(files["h200"])
    found = dict.fromkeys(LANES, "ADOPT") | {"h200": verdict}
    printed = "".join(f"{lane}: {what}\n" for lane, what in found.items())
    ran = run_script("Every lane reported, and adopts", tmp_path, LANES=" ".join(LANES))
    assert ran == (verdict != "ADOPT", printed)


def test_red_nightly_bisects_the_held_findings(tmp_path: Path) -> None:
    for lane, decision in (("cpu", "HOLD"), ("h200", "UNKNOWN"), ("v6e", "ADOPT")):
        a_gate(tmp_path, lane, decision)
    output = tmp_path / "output"
    assert run_script("What each lane holds back for", tmp_path, GITHUB_OUTPUT=str(output))[0] == 0
    name, _, found = output.read_text().strip().partition("=")
    held = {"lane": "cpu", "good": "2.13.0", "bad": "2.14.0", "test": "suites/a.py::t[x y]"}
    assert (name, json.loads(found)) == ("held", [held])


STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$LOG"
case "$(basename "$0") $1" in
  "bumpgate versions") printf '2.13.0  2026-05-01\\n2.14.0  2026-07-01\\n2.14.1  2026-08-01  yanked\\n' ;;
  "bumpgate gate") mkdir -p bumpgate-mine && echo '{}' > bumpgate-mine/gate.json; exit "${CODE:-0}" ;;
  "bumpgate report") echo "HOLD: torch 2.14.0" > bumpgate-mine/gate.md ;;
  "gh api") [[ "$*" == *--paginate* ]] && cat "$COMMENTS"; exit 0 ;;
esac
"""


def use_action(folder: Path, *, comments: str = "", code: int = 0, **inputs: str) -> tuple[str, str]:
    """Run the scripts of the action in a foreign repository, with stubs. Return the calls and the outputs."""
    tools = folder / "temp" / "bumpgate" / "bin"
    tools.mkdir(parents=True)
    for name in ("bumpgate", "gh"):
        (tools / name).write_text(STUB)
        (tools / name).chmod(0o755)
    (folder / "comments").write_text(comments)
    outputs, log = folder / "outputs", folder / "log"
    outputs.touch()
    values = {"lane": "mine", "nightly": "false", "token": "t"}
    values |= dict.fromkeys(("candidate", "selection", "budget"), "") | inputs
    given = {f"inputs.{name.replace('_', '-')}": value for name, value in values.items()}
    given |= {"runner.temp": str(folder / "temp"), "github.repository": "o/r"}
    for step in steps(ACTION):
        if "run" not in step or step["name"] == "Install the controller":
            continue
        known = dict(line.split("=", 1) for line in outputs.read_text().splitlines())
        given |= {f"steps.{id}.outputs.{name}": v for id in ("choose", "gate") for name, v in known.items()}
        given["github.event.pull_request.number"] = "7"
        variables = dict(step.get("env", {}))
        for name, value in given.items():
            variables = {k: v.replace(f"${{{{ {name} }}}}", value) for k, v in variables.items()}
        if step["name"] == "Gate":
            variables["CODE"] = str(code)
        paths = {"GITHUB_OUTPUT": outputs, "GITHUB_STEP_SUMMARY": folder / "summary", "LOG": log}
        paths |= {"RUNNER_TEMP": folder / "temp", "COMMENTS": folder / "comments"}
        env = os.environ | {name: str(path) for name, path in paths.items()}
        env |= {"PATH": f"{tools}:{os.environ['PATH']}"} | variables
        done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", step["run"]], cwd=folder, env=env)
        assert done.returncode == (code if step["name"] == "Verdict" else 0), step["name"]
    return log.read_text(), outputs.read_text()


def test_action_gates_the_newest_release_and_comments_once(tmp_path: Path) -> None:
    calls, outputs = use_action(tmp_path, code=1, budget="20", selection="tests/a.py -k 'x y'")
    gate = (
        "bumpgate gate --lane mine --candidate torch==2.14.0 --out bumpgate-mine --anchor history --budget 20"
    )
    post = "gh api --silent --method POST repos/o/r/issues/7/comments -F body=@"
    for call in ("bumpgate versions torch\n", f"{gate} -- tests/a.py -k x y\n", post):
        assert call in calls
    assert "decision=HOLD" in outputs
    comment = (tmp_path / "temp" / "comment.md").read_text()
    assert comment == "<!-- bumpgate mine -->\nHOLD: torch 2.14.0\n"
    assert (tmp_path / "summary").read_text() == "HOLD: torch 2.14.0\n"


def test_action_updates_its_comment_and_can_list_nightlies(tmp_path: Path) -> None:
    for name in ("named", "newest"):
        (tmp_path / name).mkdir()
    named = {"comments": "41\n42\n", "candidate": "torch==2.15.0", "nightly": "true"}
    calls, _ = use_action(tmp_path / "named", **named)
    assert "gh api --silent --method PATCH repos/o/r/issues/comments/41 -F body=@" in calls
    assert ("bumpgate versions" in calls, "POST" in calls) == (False, False)
    calls, _ = use_action(tmp_path / "newest", nightly="true")
    assert "bumpgate versions torch --pre\n" in calls
    (install,) = (s["run"] for s in steps(ACTION) if s.get("name") == "Install the controller")
    assert '"$GITHUB_ACTION_PATH[report]"' in install, "the action installs its own files"
