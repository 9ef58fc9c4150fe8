"""A shell in the environment of one version, and a bisect whose probes a user judges at a prompt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import typer

from bumpgate.bisect.command_probe import CommandTest
from bumpgate.bisect.probe import BackError, Cause, ProbeResult, Reading, fresh_caches
from bumpgate.bisect.search import ProbeOutcome
from bumpgate.core.findings import Finding
from bumpgate.env.build import Environment
from bumpgate.env.request import Request, without_url
from bumpgate.env.uv import public_url
from bumpgate.process.child import SIGNALLED
from bumpgate.process.runner import child_environment

CODES = {"good": 0, "bad": 1, "skip": 125}
WORDS = (*CODES, "retry", "back")


def shell(environment: Environment, variables: dict[str, str] | None = None) -> int:
    """Run the user's shell with the environment first on PATH, and return its exit code."""
    place = {"VIRTUAL_ENV": str(environment.python.parent.parent)}
    return _foreground(
        [os.environ.get("SHELL") or "/bin/sh"], environment, {**place, **(variables or {})}, None
    )


def origin(request: Request, environment: Environment) -> str:
    """Describe how an environment was built, for the start of its shell."""
    sources = [*filter(None, [request.index]), *request.find_links]
    lines = {
        request.title: str(environment.python),
        "built from": ", ".join(map(without_url, request.requirements)),
        "sources": ", ".join(map(public_url, sources)) or "the index of this host",
        "packages": f"{len(environment.packages)}; list them with: uv pip list --python {environment.python}",
    }
    return "\n".join(f"{name:15} {value}" for name, value in lines.items() if value)


@dataclass
class InteractiveTest:
    """A user's judgement at a prompt. command: run at each version; without one, a shell if there is a terminal."""

    command: CommandTest | None = None
    prompt: Callable[[str], str] = input
    deciding: tuple[str, ...] = ()
    differs: bool = True

    def run(self, environment: Environment, place: Path) -> Reading:
        """Read an answer. Raises BackError on `back`, KeyboardInterrupt at the end of input."""
        started = time.monotonic()
        with suppress(ImportError):
            import readline  # noqa: F401 - input() then edits lines and keeps a history
        with fresh_caches(place) as caches:
            self._show(environment, caches)
            while True:
                try:
                    line = self.prompt(f"{environment.name}: {', '.join(WORDS[:-1])} or {WORDS[-1]}? ")
                except EOFError:
                    raise KeyboardInterrupt from None
                matches = [word for word in WORDS if line.strip() and word.startswith(line.strip().lower())]
                if len(matches) != 1:
                    continue  # "b" is both bad and back
                if matches[0] == "back":
                    raise BackError
                if matches[0] in CODES:
                    break
                self._show(environment, caches)
        seconds = time.monotonic() - started
        return Reading(
            place, Cause.RAN, CODES[matches[0]], seconds=seconds, packages=dict(environment.packages)
        )

    def _show(self, environment: Environment, caches: dict[str, str]) -> None:
        if self.command:
            line = self.command.line(environment)
            code = _foreground(["/bin/sh", "-c", line], environment, caches, subprocess.DEVNULL)
            typer.echo(f"exit {code}")
        elif sys.stdin.isatty():
            typer.echo(f"{environment.name}: {environment.python}; leave the shell to judge it")
            shell(environment, caches)
        else:
            typer.echo(f"{environment.name}: {environment.python}")

    def unusable(self, reading: Reading) -> ProbeResult | None:
        result = self.judge(reading)
        return result if result.outcome is ProbeOutcome.SKIP else None

    def learn(self, good: Sequence[Reading], bad: Sequence[Reading]) -> None:
        """Do nothing: the user judges every version."""

    def judge(self, reading: Reading) -> ProbeResult:
        if reading.cause is not Cause.RAN:
            return ProbeResult(ProbeOutcome.SKIP, reading.failure)
        word = next(word for word, code in CODES.items() if code == reading.code)
        return ProbeResult(ProbeOutcome[word.upper()], "answered")

    def findings(self, good: str, before: Reading, bad: str, after: Reading) -> list[Finding]:
        return []

    def repro(self, environment: Environment, reading: Reading | None) -> str:
        return self.command.repro(environment, reading) if self.command else str(environment.python)


def _foreground(
    command: list[str], environment: Environment, variables: dict[str, str], stdin: int | None
) -> int:
    """Run a command on this terminal and return its exit code; ctrl-C is for the command alone."""
    # A handler, unlike SIG_IGN, is not inherited.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        env = child_environment(environment.python, None, variables)
        code = subprocess.call(command, env=env, stdin=stdin)
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else SIGNALLED - code
