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


def test_three_workflows_and_the_action_exist() -> None:
    assert [path.stem for path in WORKFLOWS] == ["mutation", "nightly", "pull_request"]
    assert ACTION.is_file()


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda p: p.name)
def test_ci_file_is_valid_by_github_schema(path: Path) -> None:
    schema = "vendor.github-actions" if path == ACTION else "vendor.github-workflows"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION, ROOT / "docs" / "ci.md"], ids=lambda p: p.name)
def test_every_action_is_pinned_to_a_commit_with_version(path: Path) -> None:
    used = re.findall(r"uses: (.+)", path.read_text())
    assert all(PINNED.match(name) for name in used), used


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda p: p.name)
def test_scripts_do_not_interpolate_untrusted_input(path: Path) -> None:
    pasted = [s["run"] for s in steps(path) if UNTRUSTED.search(s.get("run", ""))]
    assert not pasted
    assert path == ACTION or load(path)["permissions"]["contents"] == "read"


def test_every_ci_tox_environment_exists() -> None:
    raw = load(ROOT / ".github" / "workflows" / "pull_request.yml")["jobs"]
    named = [*raw["tiers"]["strategy"]["matrix"]["environment"], "cpu"]
    tox = (ROOT / "tox.ini").read_text()
    sections = re.findall(r"\[testenv:([^\]]+)\]", tox)
    families = [re.sub(r"\{([^}]*)\}", lambda m: f"({m[1].replace(',', '|')})", name) for name in sections]
    assert all(any(re.fullmatch(family, name) for family in families) for name in named)


def a_gate(folder: Path, lane: str, decision: str, **changes: object) -> None:
    findings = [{"decision": "HOLD", "repro": f"pytest -m {lane} -n 0 'suites/a.py::t[x y]'"}]
    raw = {
        "lane": lane,
        "decision": decision,
        "finished": True,
        "findings": findings if decision == "HOLD" else [],
        "sides": {
            s: {"packages": {"torch": v}} for s, v in (("adopted", "2.13.0+cpu"), ("candidate", "2.14.0+cpu"))
        },
    }
    (folder / f"bumpgate-{lane}").mkdir()
    (folder / f"bumpgate-{lane}" / "gate.json").write_text(json.dumps(raw | changes))


def every_lane(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script("nightly.yml", "Every lane reported, and adopts")],
        cwd=folder,
        env=os.environ | {"LANES": " ".join(LANES)},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


def test_nightly_is_green_if_every_lane_adopts(tmp_path: Path) -> None:
    raw = load(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]
    assert raw["gate"]["strategy"]["matrix"]["lane"] == "${{ fromJSON(needs.lanes.outputs.names) }}"
    assert 'bumpgate" lanes --json' in script("nightly.yml", "List the lanes")
    assert raw["every-lane"]["if"] == "always()"
    assert raw["every-lane"]["needs"] == ["lanes", "gate"]
    for lane in LANES:
        a_gate(tmp_path, lane, "ADOPT")
    assert every_lane(tmp_path) == (0, "".join(f"{lane}: ADOPT\n" for lane in LANES))


@pytest.mark.parametrize(
    ("spoil", "verdict"),
    [
        (lambda path: path.unlink(), "NO REPORT"),
        (lambda path: path.write_text("{"), "NO REPORT"),
        (lambda path: path.write_text(path.read_text().replace("ADOPT", "HOLD")), "HOLD"),
        (lambda path: path.write_text(path.read_text().replace("ADOPT", "UNKNOWN")), "UNKNOWN"),
        (lambda path: path.write_text(path.read_text().replace("true", "false")), "UNKNOWN"),
        (lambda path: path.write_text(path.read_text().replace('"h200"', '"cpu"')), "UNKNOWN"),
    ],
    ids=["absent", "cut off", "held", "unknown", "not finished", "of another lane"],
)
def test_nightly_is_red_if_a_lane_is_absent_or_not_adopted(tmp_path: Path, spoil: Any, verdict: str) -> None:
    for lane in LANES:
        a_gate(tmp_path, lane, "ADOPT")
    spoil(tmp_path / "bumpgate-h200" / "gate.json")
    found = dict.fromkeys(LANES, "ADOPT") | {"h200": verdict}
    assert every_lane(tmp_path) == (1, "".join(f"{lane}: {what}\n" for lane, what in found.items()))


def test_red_nightly_bisects_the_held_findings(tmp_path: Path) -> None:
    a_gate(tmp_path, "cpu", "HOLD")
    a_gate(tmp_path, "h200", "UNKNOWN")
    a_gate(tmp_path, "v6e", "ADOPT")
    output = tmp_path / "output"
    subprocess.run(
        ["bash", "-e", "-c", script("nightly.yml", "What each lane holds back for")],
        cwd=tmp_path,
        env=os.environ | {"GITHUB_OUTPUT": str(output)},
        check=True,
    )
    name, _, found = output.read_text().strip().partition("=")
    assert name == "held"
    assert json.loads(found) == [
        {"lane": "cpu", "good": "2.13.0", "bad": "2.14.0", "test": "suites/a.py::t[x y]"}
    ]


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
    values = {
        "lane": "mine",
        "candidate": "",
        "nightly": "false",
        "selection": "",
        "budget": "",
        "token": "t",
    }
    values |= inputs
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
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", step["run"]],
            cwd=folder,
            env=os.environ
            | {"GITHUB_OUTPUT": str(outputs), "GITHUB_STEP_SUMMARY": str(folder / "summary")}
            | {"RUNNER_TEMP": str(folder / "temp"), "LOG": str(log), "COMMENTS": str(folder / "comments")}
            | {"PATH": f"{tools}:{os.environ['PATH']}"}
            | variables,
        )
        assert done.returncode == (code if step["name"] == "Verdict" else 0), step["name"]
    return log.read_text(), outputs.read_text()


def test_action_gates_the_newest_release_and_comments_once(tmp_path: Path) -> None:
    calls, outputs = use_action(tmp_path, code=1, budget="20", selection="tests/a.py -k 'x y'")
    assert "bumpgate versions torch\n" in calls
    gate = (
        "bumpgate gate --lane mine --candidate torch==2.14.0 --out bumpgate-mine --anchor history --budget 20"
    )
    assert f"{gate} -- tests/a.py -k x y\n" in calls
    assert "decision=HOLD" in outputs
    assert "gh api --silent --method POST repos/o/r/issues/7/comments -F body=@" in calls
    comment = (tmp_path / "temp" / "comment.md").read_text()
    assert comment == "<!-- bumpgate mine -->\nHOLD: torch 2.14.0\n"
    assert (tmp_path / "summary").read_text() == "HOLD: torch 2.14.0\n"


def test_action_updates_its_comment(tmp_path: Path) -> None:
    calls, _ = use_action(tmp_path, comments="41\n42\n", candidate="torch==2.15.0", nightly="true")
    assert "bumpgate versions" not in calls
    assert "gh api --silent --method PATCH repos/o/r/issues/comments/41 -F body=@" in calls
    assert "POST" not in calls


def test_action_can_list_nightlies_and_installs_from_its_own_files(tmp_path: Path) -> None:
    calls, _ = use_action(tmp_path, nightly="true")
    assert "bumpgate versions torch --pre\n" in calls
    (install,) = (s["run"] for s in steps(ACTION) if s.get("name") == "Install the controller")
    assert '"$GITHUB_ACTION_PATH[report]"' in install
