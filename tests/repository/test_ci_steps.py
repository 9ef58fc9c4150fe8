"""The scripts of the action, the workflows and docs/ci.md, run by bash with a stub `bumpgate`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.support.documented import FENCE, scripts
from tests.support.project import interruptible
from tests.support.tree import ROOT

CI = ROOT / "docs" / "ci.md"
CALLS = "calls"
# The stub logs its arguments. `gate` writes the report of $DECISION to --out (none if that is "crash").
STUB = """#!{python}
import json, os, pathlib, sys
arguments = sys.argv[1:]
with open("{calls}", "a") as log:
    print(*arguments, file=log)
decision = os.environ.get("DECISION", "")
if arguments[0] == "versions":
    print("2.14.0  2026-09-02\\n2.15.0  2026-10-28  yanked: no\\ndays without a nightly: 2026-10-01")
elif arguments[0] == "gate":
    if decision == "crash":
        sys.exit(137)
    folder = pathlib.Path(arguments[arguments.index("--out") + 1])
    folder.mkdir(exist_ok=True)
    (folder / "gate.json").write_text(json.dumps({{"decision": decision}}))
    sys.exit({{"ADOPT": 0, "HOLD": 1, "UNKNOWN": 125, "INTERRUPTED": 130}}[decision])
elif arguments[0] == "report":
    found = pathlib.Path(arguments[1])
    if not found.is_file():
        sys.exit("bumpgate: " + arguments[1] + ": No such file or directory")
    found.with_suffix(".md").write_text("# report\\n")
"""
DECISIONS = {"ADOPT": 0, "HOLD": 1, "UNKNOWN": 125}


class Runner:
    """A CI machine: one folder, environment variables, and the stub on PATH next to a silent `python -m pip`."""

    def __init__(self, folder: Path, decision: str) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.output, self.summary = folder / "output", folder / "summary"
        self.bin.mkdir()
        self.program("bumpgate", STUB.format(python=sys.executable, calls=folder / CALLS))
        self.env = os.environ | {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "DECISION": decision,
            "GITHUB_OUTPUT": str(self.output),
            "GITHUB_STEP_SUMMARY": str(self.summary),
        }

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, script: str, env: Mapping[str, str] = {}, *, options: tuple[str, ...] = ("-e",)) -> int:
        """Run a script, by default with the shell options of GitHub's `shell: bash`; return its exit code."""
        line = ["bash", "--noprofile", "--norc", *options, "-o", "pipefail", "-c", script]
        return subprocess.run(line, cwd=self.folder, env=self.env | env, timeout=60).returncode

    @property
    def calls(self) -> list[str]:
        """Return the arguments of each call of `bumpgate`."""
        log = self.folder / CALLS
        return log.read_text().splitlines() if log.exists() else []

    @property
    def outputs(self) -> dict[str, str]:
        lines = self.output.read_text().splitlines() if self.output.exists() else []
        return dict(line.split("=", 1) for line in lines)


def expand(text: str, values: Mapping[str, str]) -> str:
    """Expand `${{ name }}` like GitHub: an unknown name is empty."""
    return re.sub(r"\$\{\{\s*([^}]+?)\s*\}\}", lambda m: values.get(m[1], ""), text)


def run_action(
    runner: Runner, candidate: str = "torch==2.14.0", selection: str = ""
) -> tuple[int, dict[str, int]]:
    """Execute the steps of action.yml in order -> (exit code of the job, exit code of each step that ran).

    As on GitHub, after a failed step only those with `if: always()` run, and any failed step fails the job.
    """
    raw = YAML(typ="safe").load((ROOT / "action.yml").read_text())
    values = {"inputs.lane": "cpu", "inputs.candidate": candidate, "inputs.selection": selection}
    codes: dict[str, int] = {}
    for step in raw["runs"]["steps"]:
        skipped = any(codes.values()) and step.get("if") != "always()"
        if "uses" in step or "pip install" in step["run"] or skipped:
            continue
        env = {name: expand(text, values) for name, text in step.get("env", {}).items()}
        codes[step["name"]] = runner.run(expand(step["run"], values), env)
        if "id" in step:
            values |= {f"steps.{step['id']}.outputs.{k}": v for k, v in runner.outputs.items()}
    return next(filter(None, reversed(codes.values())), 0), codes


@pytest.mark.parametrize(("decision", "code"), DECISIONS.items())
def test_action_steps(tmp_path: Path, decision: str, code: int) -> None:
    runner = Runner(tmp_path, decision)
    assert run_action(runner) == (code, {"Gate": 0, "Report": 0, "Verdict": code})
    assert runner.outputs == {"code": str(code), "decision": decision}
    assert runner.summary.read_text() == "# report\n"
    assert runner.calls == [
        "gate --lane cpu --candidate torch==2.14.0 --out bumpgate-cpu --anchor history",
        "report bumpgate-cpu/gate.json",
        "history add bumpgate-cpu/gate.json",
    ]


def test_action_is_red_after_a_crash_without_report(tmp_path: Path) -> None:
    runner = Runner(tmp_path, "crash")
    code, steps = run_action(runner)
    assert code == 137
    assert steps["Gate"] == 0, "the exit code is kept for the verdict"
    assert steps["Report"] != 0
    assert runner.outputs == {"code": "137", "decision": "UNKNOWN"}
    assert [call.split()[0] for call in runner.calls] == ["gate", "report"]


def test_action_is_red_if_the_gate_step_fails(tmp_path: Path) -> None:
    """Without a version to gate, the step ends before it writes an exit code."""
    runner = Runner(tmp_path, "ADOPT")
    runner.program("bumpgate", "#!/bin/sh\nexit 4\n")
    code, steps = run_action(runner, candidate="")
    assert code == 125
    assert steps["Gate"] != 0
    assert runner.outputs == {}


def test_action_takes_the_newest_version_not_yanked(tmp_path: Path) -> None:
    runner = Runner(tmp_path, "ADOPT")
    assert run_action(runner, candidate="", selection="suites/compile -k nam52")[0] == 0
    assert runner.calls[:2] == [
        "versions torch --pre",
        "gate --lane cpu --candidate torch==2.14.0 --out bumpgate-cpu --anchor history -- suites/compile -k nam52",
    ]


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ("suites/compile\nsuites/launch\n", ["suites/compile", "suites/launch"]),
        ("suites -k 'a and not b'", ["suites", "-k", "a and not b"]),
        ("\n", []),
    ],
    ids=["two lines", "quotes", "empty"],
)
def test_action_passes_the_whole_selection(tmp_path: Path, selection: str, words: list[str]) -> None:
    runner = Runner(tmp_path, "ADOPT")
    runner.program("bumpgate", f'#!/bin/sh\n[ "$1" != gate ] || printf "%s\\n" "$@" > {tmp_path / CALLS}\n')
    run_action(runner, selection=selection)
    assert runner.calls[9:] == (["--", *words] if words else [])
    assert runner.calls[:1] == ["gate"]


def test_action_is_red_for_an_open_quote_in_the_selection(tmp_path: Path) -> None:
    runner = Runner(tmp_path, "ADOPT")
    assert run_action(runner, selection="suites -k 'a")[0] == 125
    assert runner.calls[:1] != ["gate"]


def workflow(name: str, step: str) -> str:
    raw = YAML(typ="safe").load((ROOT / ".github" / "workflows" / name).read_text())
    (text,) = (text for found, text in scripts(raw) if found == step)
    return text


def test_pull_request_report_step(tmp_path: Path) -> None:
    runner = Runner(tmp_path, "")
    assert runner.run(workflow("pull_request.yml", "Report")) != 0, "a lane that left no record"
    (tmp_path / "record.json").write_text("{}")
    assert runner.run(workflow("pull_request.yml", "Report")) == 0
    assert runner.summary.read_text() == "# report\n"


def test_bisect_step(tmp_path: Path) -> None:
    runner = Runner(tmp_path, "")
    env = {"LANE": "cpu", "GOOD": "2.13.0", "BAD": "2.14.0", "TEST": "suites/a.py::t[x y]"}
    assert runner.run(workflow("bisect.yml", "Bisect"), env) == 0
    assert runner.calls == [
        "bisect --lane cpu --good 2.13.0 --bad 2.14.0 --out bisect-cpu -- suites/a.py::t[x y]"
    ]


def example(language: str, words: str) -> str:
    """Return the code block of docs/ci.md that contains `words`."""
    (body,) = (m[3] for m in FENCE.finditer(CI.read_text()) if m[2] == language and words in m[3])
    return body


@pytest.mark.parametrize(("decision", "code"), [*DECISIONS.items(), ("crash", 137)])
def test_buildkite_step(tmp_path: Path, decision: str, code: int) -> None:
    ((_, script),) = scripts(YAML(typ="safe").load(example("yaml", "buildkite-agent")))
    runner = Runner(tmp_path, decision)
    runner.program("python", "#!/bin/sh\n")
    runner.program("buildkite-agent", "#!/bin/sh\ncat > annotation\n")
    # Buildkite expands the matrix, and $$ to $, before an agent sees the script.
    script = script.replace("{{matrix}}", "cpu").replace("$$", "$")
    found = runner.run(script, {"CANDIDATE": "torch==2.14.0"})
    if decision == "crash":
        assert found != 0
        return
    assert found == code
    assert (tmp_path / "annotation").read_text() == "# report\n"
    assert runner.calls[0] == "gate --lane cpu --candidate torch==2.14.0 --anchor history --out bumpgate-cpu"


@pytest.mark.parametrize(("decision", "code"), [*DECISIONS.items(), ("INTERRUPTED", 0), ("crash", 137)])
def test_slurm_job(tmp_path: Path, decision: str, code: int) -> None:
    runner = Runner(tmp_path, decision)
    runner.program("scontrol", f"#!/bin/sh\necho scontrol $* >> {tmp_path / CALLS}\n")
    env = {"CANDIDATE": "torch==2.14.0", "SLURM_JOB_ID": "7"}
    assert runner.run(example("bash", "#SBATCH"), env, options=()) == code
    gate = "gate --lane h200 --candidate torch==2.14.0 --anchor history --out bumpgate-h200-7"
    after = ["report bumpgate-h200-7/gate.json", "history add bumpgate-h200-7/gate.json"]
    assert runner.calls == [gate, *(["scontrol requeue 7"] if decision == "INTERRUPTED" else after)]
    if decision == "INTERRUPTED":
        assert runner.run(example("bash", "#SBATCH"), env, options=()) == 0
        assert runner.calls[2] == f"{gate} --resume", "a requeued job resumes"


def test_slurm_job_interrupts_its_gate_before_the_time_limit(tmp_path: Path) -> None:
    """A background job of a script ignores SIGINT, so the gate would run on until Slurm kills it."""
    runner = Runner(tmp_path, "")
    log = tmp_path / CALLS
    gate = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
    runner.program("bumpgate", f"#!{sys.executable}\n{gate}open({str(log)!r}, 'w')\ntime.sleep(30)\n")
    runner.program("scontrol", f"#!/bin/sh\necho scontrol $* >> {log}\n")
    env = runner.env | {"CANDIDATE": "torch==2.14.0", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(
        ["bash", "-c", example("bash", "#SBATCH")], cwd=tmp_path, env=env, preexec_fn=interruptible
    )
    while not log.exists() and job.poll() is None:
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    assert job.wait(20) == 0
    assert runner.calls == ["scontrol requeue 7"]
