"""Test of a bisect: a user's command, judged by its exit code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from bumpgate.bisect.probe import (
    LOG,
    Cause,
    ProbeError,
    ProbeResult,
    Reading,
    fresh_caches,
    import_fault,
    without_verdict,
)
from bumpgate.bisect.search import ProbeOutcome
from bumpgate.core.errors import one_line, text_lines
from bumpgate.core.findings import Decision, Finding
from bumpgate.env.build import Environment
from bumpgate.process.child import SIGNALLED, EndingKind, ending, last_line, run_child
from bumpgate.process.runner import child_environment

NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)'")
# Lines with an exception: the one after the frames of a traceback, and any that begins with the name of an error, as
# after a traceback that rich draws.
FRAMES = r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*"
RAISED = re.compile(rf"^(?:{FRAMES}(?=\S)|(?=(?:\w+\.)*\w*(?:Error|Exception)\b))(.*)", re.MULTILINE)
LAST_SIGNAL = 64
LOG_LINES = 3


@dataclass
class CommandTest:
    """User command: exit 0 is GOOD, 1 to 124 BAD, 125 SKIP; a crash is BAD if the package imports.

    command: for /bin/sh; {python} and {version} are substituted, and the environment's bin folder is first on PATH.
    timeout: seconds; a run that takes longer has no verdict.
    """

    command: str
    package: str
    folder: Path
    timeout: float | None = None
    deciding: tuple[str, ...] = ()
    differs: bool = True

    def line(self, environment: Environment) -> str:
        """Return the shell command line for an environment."""
        version = environment.packages.get(self.package, "")
        line = self.command.replace("{python}", shlex.quote(str(environment.python)))
        return line.replace("{version}", version)

    def run(self, environment: Environment, place: Path) -> Reading:
        log = place / LOG
        line = ["/bin/sh", "-c", self.line(environment)]
        with fresh_caches(place) as caches:
            variables = child_environment(environment.python, None, caches)
            code, seconds = run_child(line, self.folder, variables, self.timeout, log)
        ended = ending(code, seconds, self.timeout)
        cause, failure = Cause.RAN, str(ended)
        if ended.kind is EndingKind.TIMEOUT:
            cause = Cause.MACHINE
        elif code > 125 or code < -LAST_SIGNAL:
            status = code if code > 0 else SIGNALLED - code
            raise ProbeError(
                f"--command ended with {status} ({last_line(log)}): 0 is good, 1-124 bad, 125 skip"
            )
        elif code < 0:
            if ended.signal == "SIGINT":
                raise KeyboardInterrupt
            cause = Cause.RAN if ended.crash else Cause.MACHINE
        if (code or failure) and code != 125 and (fault := import_fault(environment, self.package, "torch")):
            cause, failure = Cause.BROKEN, fault
        elif code > 0 and code != 125 and (missing := _missing_module(log, environment)):
            cause, failure = Cause.BROKEN, f"no module {missing} in this environment; add --with {missing}"
        return Reading(place, cause, code, failure, seconds, dict(environment.packages))

    def unusable(self, reading: Reading) -> ProbeResult | None:
        result = self.judge(reading)
        return None if result.outcome in (ProbeOutcome.GOOD, ProbeOutcome.BAD) else result

    def learn(self, good: Sequence[Reading], bad: Sequence[Reading]) -> None:
        """Do nothing: an exit code means the same for every candidate."""

    def judge(self, reading: Reading) -> ProbeResult:
        if result := without_verdict(reading):
            return result
        if reading.code == 125:
            return ProbeResult(ProbeOutcome.SKIP, "the command skipped it (exit 125)")
        how = reading.failure or f"exit {reading.code}"
        return (
            ProbeResult(ProbeOutcome.GOOD, how) if reading.code == 0 else ProbeResult(ProbeOutcome.BAD, how)
        )

    def findings(self, good: str, before: Reading, bad: str, after: Reading) -> list[Finding]:
        reason = self.judge(after).reason
        return [Finding(Decision.HOLD, "BAD", "", reason, (), _last_lines(before), _last_lines(after))]

    def repro(self, environment: Environment, reading: Reading | None) -> str:
        path = "" if "{python}" in self.command else f"PATH={environment.python.parent}:$PATH "
        return f"{path}{self.line(environment)}"


def _missing_module(log: Path, environment: Environment) -> str:
    """Return the missing module that the last exception in a log names; "" if a package of the environment has it."""
    raised = RAISED.findall(log.read_text(encoding="utf-8", errors="replace"))
    missing = NO_MODULE.match(raised[-1]) if raised else None
    return missing[1] if missing and canonicalize_name(missing[1]) not in environment.packages else ""


def _last_lines(reading: Reading) -> tuple[str, ...]:
    try:
        lines = _lines(reading.place / LOG)
    except OSError:
        return ()
    return tuple(one_line(line, 160) for line in lines[-LOG_LINES:]) or ("(it printed nothing)",)


def _lines(log: Path) -> list[str]:
    return text_lines(log.read_text(encoding="utf-8", errors="replace"))
