"""Runs the jobs of a workflow as a hosted runner does, without a forge.

An ordinary user, a clean HOME, no git identity and no user namespaces. Actions of the forge are small stand-ins: a
checkout is a clone, an artifact is a folder. Programs of `tools` come first on PATH; every other one is the host's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

# Root without capabilities may do what an ordinary user may: no mount, no namespace, no other user's files.
ORDINARY = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
TOKEN = re.compile(r"'(?:[^']|'')*'|[A-Za-z_][\w-]*(?:\.(?:[\w-]+|\*))*|&&|\|\||==|!=|!|[(),]|\d+|\s+")
OPERATORS = {"&&": " and ", "||": " or ", "!": " not ", "true": "True", "false": "False", "null": "None"}
REFUSED = '#!/bin/sh\necho "unshare: unshare failed: Operation not permitted" >&2\nexit 1\n'
GIT = ("git", "-c", "safe.directory=*")


@dataclass
class Job:
    """The outcome of a job. result: success, failure or skipped. log: what its steps printed."""

    result: str = "success"
    outputs: dict[str, str] = field(default_factory=dict)
    log: str = ""


@dataclass
class Runner:
    """One run of a workflow. source: the repository. folder: empty. github: values of the context, by dotted name."""

    source: Path
    folder: Path
    tools: Mapping[str, str]
    github: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)  # by the steps of the job that runs

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("tools", "artifacts", "home"):
            (self.folder / name).mkdir()
        for name, text in {"unshare": REFUSED, **self.tools}.items():
            path = self.folder / "tools" / name
            path.write_text(text)
            path.chmod(0o755)

    def run(self, workflow: Path) -> dict[str, Job]:
        """Run every job, each after those that it needs; return them by name."""
        for name, raw in YAML(typ="safe").load(workflow.read_text())["jobs"].items():
            needs = raw.get("needs", [])
            needs = [needs] if isinstance(needs, str) else needs
            context = {f"needs.{n}.outputs.{k}": v for n in needs for k, v in self.jobs[n].outputs.items()}
            context |= {f"needs.{n}.result": self.jobs[n].result for n in needs}
            results = {self.jobs[n].result for n in needs}
            after_skipped = "skipped" in results and "always()" not in str(raw.get("if"))
            if after_skipped or not self.holds(raw.get("if"), context, "failure" in results):
                self.jobs[name] = Job("skipped")
                continue
            ran = [
                self.run_job(f"{name}-{n}", raw, context | more)
                for n, more in enumerate(self.matrix(raw, context))
            ]
            result = "failure" if any(job.result == "failure" for job in ran) else "success"
            self.jobs[name] = Job(result, ran[-1].outputs, "".join(job.log for job in ran))
        return self.jobs

    def matrix(self, raw: Mapping[str, Any], context: Mapping[str, Any]) -> list[dict[str, Any]]:
        matrix = raw.get("strategy", {}).get("matrix")
        if matrix is None:
            return [{}]
        if "include" in matrix:
            rows = self.value(matrix["include"], context)
        else:
            ((key, values),) = matrix.items()
            rows = [{key: value} for value in values]
        assert rows, "a job with an empty matrix is an error of the workflow"
        return [{f"matrix.{key}": value for key, value in row.items()} for row in rows]

    def run_job(self, name: str, raw: Mapping[str, Any], context: Mapping[str, Any]) -> Job:
        place = self.folder / name
        for part in ("checkout", "temp"):
            (place / part).mkdir(parents=True)
        job, self.exported = Job(), {}
        self.value(raw["runs-on"], context)
        here = {"github.workspace": str(place / "checkout"), "runner.temp": str(place / "temp")}
        self.steps(job, place, raw["steps"], {**context, **here})
        given = {**context, **{k: v for k, v in job.outputs.items() if k.startswith("steps.")}}
        job.outputs = {k: self.value(v, given) for k, v in raw.get("outputs", {}).items()}
        return job

    def steps(self, job: Job, place: Path, steps: list[Any], context: dict[str, Any]) -> None:
        for number, step in enumerate(steps):
            known = context | job.outputs
            if not self.holds(step.get("if"), known, job.result == "failure"):
                continue
            given = {name: self.value(value, known) for name, value in step.get("with", {}).items()}
            if "run" in step:
                code = self.script(job, place, step, known)
            elif step["uses"].startswith("./"):
                code = self.composite(job, place, step, given, known)
            else:
                code = self.action(place, step["uses"], given)
            if code:
                job.result = "failure"
                job.log += f"step {number} ({step.get('name', step.get('uses', ''))}) ended with {code}\n"

    def composite(
        self, job: Job, place: Path, step: Any, given: dict[str, Any], known: Mapping[str, Any]
    ) -> int:
        action = YAML(typ="safe").load((self.source / "action.yml").read_text())
        inputs = {name: self.value(raw.get("default", ""), known) for name, raw in action["inputs"].items()}
        assert given.keys() <= inputs.keys(), "an input that the action does not have"
        inside = {name: value for name, value in known.items() if not name.startswith("steps.")}
        inner = Job()
        inside |= {f"inputs.{k}": self.text(v) for k, v in (inputs | given).items()}  # always texts
        self.steps(inner, place, action["runs"]["steps"], inside)
        job.log += inner.log
        outputs = {k: self.value(v["value"], inside | inner.outputs) for k, v in action["outputs"].items()}
        job.outputs |= {f"steps.{step.get('id', 'action')}.outputs.{k}": v for k, v in outputs.items()}
        return inner.result == "failure"

    def script(self, job: Job, place: Path, step: Any, known: Mapping[str, Any]) -> int:
        output, summary = place / "output", self.folder / "summary"
        exports = place / "env"
        output.touch()
        exports.write_text("")
        env = {"HOME": str(self.folder / "home"), "GIT_CONFIG_NOSYSTEM": "1", "LANG": "C.UTF-8", "CI": "true"}
        paths = [self.folder / "tools", Path(sys.executable).parent, "/usr/local/bin", "/usr/bin", "/bin"]
        env |= {"PATH": os.pathsep.join(map(str, paths)), "GITHUB_ACTION_PATH": str(self.source)}
        env |= {"RUNNER_TEMP": str(place / "temp"), "GITHUB_OUTPUT": str(output), "GITHUB_ENV": str(exports)}
        env |= {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_WORKSPACE": str(place / "checkout")}
        env |= {"GITHUB_REF_NAME": str(self.github.get("ref_name", "")), **self.variables, **self.exported}
        env |= {name: self.text(self.value(value, known)) for name, value in step.get("env", {}).items()}
        strict = ["--noprofile", "--norc", "-eo", "pipefail"] if step.get("shell") == "bash" else ["-e"]
        command = ["bash", *strict, "-c", self.text(self.value(step["run"], known))]
        if os.geteuid() == 0:
            command = [*ORDINARY, *command]
        done = subprocess.run(command, cwd=place / "checkout", env=env, capture_output=True, text=True)
        job.log += done.stdout + done.stderr
        for line in output.read_text().splitlines():
            name, _, value = line.partition("=")
            job.outputs[f"steps.{step.get('id', '')}.outputs.{name}"] = value
        output.write_text("")
        self.exported |= dict(line.split("=", 1) for line in exports.read_text().splitlines())
        return done.returncode

    def action(self, place: Path, name: str, given: Mapping[str, Any]) -> int:
        """Do what an action of the forge does; an unknown one has no effect."""
        work, artifacts = place / "checkout", self.folder / "artifacts"
        if name.startswith("actions/checkout@"):
            subprocess.run([*GIT, "clone", "--quiet", str(self.source), str(work)], check=True)
        elif name.startswith("actions/upload-artifact@"):
            found = [
                path
                for path in sorted(work.glob(str(given["path"])))
                if path.is_file() or any(path.iterdir())
            ]
            if not found:
                return given.get("if-no-files-found") == "error"
            target = artifacts / str(given["name"])
            if target.exists():
                return 1  # as the forge, which keeps one artifact of a name
            target.mkdir()
            for path in found:
                (shutil.copytree if path.is_dir() else shutil.copy)(path, target / path.name)
            if found[0].is_dir():
                shutil.rmtree(target)
                shutil.copytree(found[0], target)
        elif name.startswith("actions/download-artifact@"):
            one = given.get("name")
            for each in sorted(artifacts.glob(str(one or given.get("pattern", "*")))):
                target = work / str(given.get("path", "" if one else each.name))
                shutil.copytree(each, target, dirs_exist_ok=True)
            return bool(one) and not (artifacts / str(one)).exists()
        return 0

    def holds(self, condition: Any, context: Mapping[str, Any], failed: bool) -> bool:
        """Evaluate an `if`: without a status function it also asks for success."""
        text = str(condition if condition is not None else "success()")
        text = EXPRESSION.sub(lambda m: m[1], text)
        value = bool(self.evaluate(text, context, failed))
        return value and (not failed or re.search(r"\b(always|failure)\(\)", text) is not None)

    def value(self, raw: Any, context: Mapping[str, Any]) -> Any:
        """Replace the expressions of a text; a text that is one expression has its value."""
        if not isinstance(raw, str):
            return raw
        if whole := re.fullmatch(r"\s*\$\{\{((?:(?!\}\}).)*)\}\}\s*", raw, re.DOTALL):
            return self.evaluate(whole[1], context, False)
        return EXPRESSION.sub(lambda m: self.text(self.evaluate(m[1], context, False)), raw)

    def text(self, value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return (
            "" if value is None else str(value) if not isinstance(value, (list, dict)) else json.dumps(value)
        )

    def evaluate(self, text: str, context: Mapping[str, Any], failed: bool) -> Any:
        functions: dict[str, Callable[..., Any]] = {
            "always": lambda: True,
            "success": lambda: not failed,
            "failure": lambda: failed,
            "fromJSON": json.loads,
            "format": lambda form, *values: re.sub(r"\{(\d)\}", lambda m: str(values[int(m[1])]), form),
            "contains": lambda where, what: what in where,
        }
        given = {**context, "runner.environment": "github-hosted"}
        given |= {f"github.{name}": value for name, value in self.github.items()}
        out = []
        rest = text
        while rest:
            token = TOKEN.match(rest)
            assert token, f"cannot read the expression {text!r}"
            rest = rest[token.end() :]
            each = token[0]
            if re.fullmatch(r"[A-Za-z_].*", each) and each not in OPERATORS:
                place = re.match(r"\s*\(", rest)
                out.append(f"functions[{each!r}]" if place else repr(given.get(each, "")))
            else:
                out.append(
                    OPERATORS.get(
                        each, each.replace("''", "\\'") if each[0] == "'" and len(each) > 2 else each
                    )
                )
        return eval("".join(out).strip(), {"functions": functions})
