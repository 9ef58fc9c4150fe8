"""Environments of commits, made by a user's command: `bumpgate bisect --builder CMD --repository DIR`."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from bumpgate.bisect import blame
from bumpgate.bisect.answer import Answer
from bumpgate.bisect.commits import DIGITS, Clone, column, raw
from bumpgate.bisect.probe import ProbeError
from bumpgate.core.errors import one_line
from bumpgate.core.rows import write_atomic
from bumpgate.env.build import BuildError, Environment, NotInstallable
from bumpgate.env.request import Request
from bumpgate.process.child import ChildFault, Interpreter, last_line, run_child
from bumpgate.process.runner import IMPORT_SECONDS, child_environment

FOLDER, NOTE = "BUMPGATE_BUILD", "environment.json"
SKIP, NOT_RUN = 125, (126, 127)
INSTALLED = """
import importlib.metadata, json, re
found = reversed([*importlib.metadata.distributions()])
print(json.dumps({re.sub("[-_.]+", "-", d.metadata["Name"]).lower(): d.version for d in found}))
"""


def installed(python: Path) -> dict[str, str]:
    """Return the packages of an interpreter, canonical name to version. Raises ChildFault if it does not run."""
    child = Interpreter(python, python.parent, child_environment(python, None))
    packages: dict[str, str] = child.json("-I", "-c", INSTALLED, timeout=IMPORT_SECONDS)
    return packages


@dataclass
class Builder:
    """Makes the environment of one commit at a time, all in one build folder, so that a compiler cache applies.

    command: for /bin/sh, with the commit as its last argument; it prints the path of an interpreter on its last line,
    or exits with 125 if the commit cannot be built. out: the folder of the bisect.
    """

    command: str
    clone: Clone
    package: str
    out: Path
    _current: str = ""

    def request(self, commit: str) -> Request:
        where = self.clone.folder.absolute().as_uri()
        return Request((f"{self.package} @ git+{where}@{commit}",), name=f"{self.package} {commit}")

    def variables(self, commit: str) -> dict[str, str]:
        """Return the environment variables of CMD. The build folder is the user's, else one of this bisect."""
        return {
            "BUMPGATE_COMMIT": self.clone.commit(commit).hash,
            "BUMPGATE_REPOSITORY": str(self.clone.folder.absolute()),
            FOLDER: str(Path(os.environ.get(FOLDER) or self.out / "build").absolute()),
        }

    def line(self, commit: str) -> str:
        """Return the shell command that builds a commit, for a user to repeat."""
        variables = self.variables(commit)
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        return f"{settings} {self.command} {variables['BUMPGATE_COMMIT']}"

    def __call__(self, request: Request) -> Environment:
        """Build the commit of a request, unless it is the one that was built last.

        Raises NotInstallable on exit 125, BuildError on another failure, ProbeError if CMD itself is wrong.
        """
        commit = request.requirements[0].rpartition("@")[2]
        if commit != self._current:
            self._current = ""
            self._run(request, commit)
            self._current = commit
        return self.recall(request)

    def recall(self, request: Request) -> Environment:
        """Return the environment of a commit as it was built; by now the build folder may hold another one."""
        commit = request.requirements[0].rpartition("@")[2]
        path = self._place(commit) / NOTE
        if not path.exists():
            self._run(request, commit)
        note = json.loads(path.read_text(encoding="utf-8"))
        return Environment(request.title, Path(note["python"]), commit, note["packages"])

    def described(self, found: Answer) -> Answer:
        """Add titles, dates, pull requests, the compare link and the build to the answer of a bisect."""
        clone, versions = self.clone, found.range.versions
        assert found.result.last_old is not None, "a found result has a candidate before it"
        suspects = [clone.commit(versions[i]) for i in found.result.suspects]
        before, culprit = clone.commit(versions[found.result.last_old]), suspects[-1]
        lines = column("" if len(suspects) == 1 else "one of", suspects)
        link: tuple[str, ...] = ()
        if clone.github:
            home = f"https://github.com/{clone.github}"
            lines += column("pull", [f"{home}/pull/{c.pull}" for c in suspects if c.pull])
            link = (f"{home}/compare/{before.hash}...{culprit.hash}",)
        early, late = ("--bad", "--good") if found.plan.find_fix else ("--good", "--bad")
        for merge in (c for c in suspects if len(c.parents) > 1):
            main, tip = map(clone.commit, merge.parents[:2])
            base = clone.base(main, tip)[:DIGITS]
            lines += column(
                "merge", [f"bisect the commits of {merge.short} with {early} {base} {late} {tip.short}"]
            )
        lines += column("build", [f"{self.line(found.bad)}  # log: {self._place(found.bad) / 'build.log'}"])
        return replace(found, notes=tuple(lines), commits=raw(suspects), links=link)

    def _run(self, request: Request, commit: str) -> None:
        place = self._place(commit)
        place.mkdir(parents=True, exist_ok=True)
        variables = self.variables(commit)
        full = variables["BUMPGATE_COMMIT"]
        Path(variables[FOLDER]).mkdir(parents=True, exist_ok=True)
        log, printed = place / "build.log", place / "stdout.log"
        line = f"{{ {self.command} {full}\n}} > {shlex.quote(str(printed.absolute()))}"
        code, _ = run_child(["/bin/sh", "-c", line], Path.cwd(), os.environ | variables, None, log)
        if code in NOT_RUN:
            raise ProbeError(f"--builder ended with {code} ({last_line(log)}): is it a command?")
        why = f"{request.title}: --builder ended with {code} ({last_line(log)}; log: {log})"
        if code == SKIP:
            raise NotInstallable(f"{request.title}: --builder skipped it (exit 125; log: {log})", log, "")
        if code:
            raise BuildError(why, log, "")
        name = last_line(printed)
        python = Path(name)
        if not (python.is_absolute() and os.access(python, os.X_OK) and python.is_file()):
            raise ProbeError(f"the last line of --builder is not the path of an interpreter: {name}")
        try:
            packages = installed(python)
        except ChildFault as fault:
            raise BuildError(
                f"{request.title}: {python} does not run: {one_line(fault, 120)}", log, ""
            ) from None
        environment = Environment(request.title, python, commit, packages)
        built = blame.commit(environment, self.package)
        if built and not full.startswith(built):
            raise ProbeError(
                f"--builder made commit {built} of {self.package} instead of {full}: it must check out the commit"
            )
        note = {"commit": full, "python": str(python), "packages": packages}
        write_atomic(place / NOTE, json.dumps(note, indent=1) + "\n")

    def _place(self, commit: str) -> Path:
        return self.out / "builds" / commit
