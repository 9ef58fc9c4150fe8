"""Where the CPU time of a lane goes: by phase, by test, by child program. Written as tables for docs/profile.md.

    python -m tools.cpu_profile --out docs/profile.md -- pytest -m cpu -n 2

py-spy (`pip install 'bumpgate[profile]'`) samples every Python process of the command; an idle process is not
counted. C++ compilers are sampled in /proc. What neither sees is the rest: threads without Python, processes that end
between two samples.
"""

from __future__ import annotations

import argparse
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

RATE = 10  # samples a second
COMPILERS = {"cc1plus", "cc1", "as", "ld", "collect2", "g++", "gcc", "clang++", "ptxas", "nvcc"}
FRAME = re.compile(r"(?P<function>.*) \((?P<file>.*?)(?::\d+)?\)$")
PROCESS = re.compile(r'process \d+:"(?P<command>.*)"\s*$', re.DOTALL)
END = re.compile(r'[")] (?P<count>\d+)\n?$')
# Files that run at call time, although they lie in a compiler's package.
AT_RUN_TIME = (
    "torch/_inductor/output_code.py",
    "torch/_inductor/utils.py",
    "torch/_inductor/runtime/",
    "torch/_inductor/compile_fx.py",
    "torch/_functorch/_aot_autograd/runtime_wrappers.py",
    "torch/_functorch/_aot_autograd/utils.py",
)
# Phase -> how its frames, `file:function`, begin. The first that matches counts: a later phase calls an earlier one.
PHASES = {
    "import": re.compile(r"<frozen importlib"),
    "Triton": re.compile(r"triton/(compiler|backends)"),
    "Inductor": re.compile(r"torch/_inductor/"),
    "AOTAutograd": re.compile(r"torch/_functorch/(_aot_autograd/|partitioners)"),
    "Dynamo": re.compile(r"torch/_dynamo/convert_frame.py:_compile$"),
    "collection": re.compile(r"_pytest/.*:pytest_collection$"),
}
REST = "model and test code"
START = "start and end of Python"


@dataclass
class Profile:
    """CPU seconds by phase, by (test or child program) and phase. total: of the whole process tree, by the kernel."""

    phases: Counter[str] = field(default_factory=Counter)
    places: dict[str, Counter[str]] = field(default_factory=dict)
    total: float = 0.0
    wall: float = 0.0

    def add(self, place: str, phase: str, seconds: float) -> None:
        """Count CPU seconds of one phase at one place."""
        self.phases[phase] += seconds
        self.places.setdefault(place, Counter())[phase] += seconds


def frames(stack: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the commands of the processes and the (function, file) pairs of a folded stack, outermost first."""
    commands, calls = [], []
    for part in stack.split(";"):
        if process := PROCESS.match(part):
            commands.append(process["command"])
        elif frame := FRAME.match(part):
            calls.append((frame["function"], frame["file"]))
    return commands, calls


def phase_of(calls: Iterable[tuple[str, str]]) -> str:
    """Return the phase of a stack. Without a Python frame, the interpreter starts or ends."""
    texts = [f"{file}:{function}" for function, file in calls if not file.startswith(AT_RUN_TIME)]
    found = (phase for phase, pattern in PHASES.items() if any(map(pattern.match, texts)))
    return next(found, REST if texts else START)


def place_of(commands: list[str], calls: Iterable[tuple[str, str]]) -> str:
    """Return the test that a stack belongs to, else the program that the process runs."""
    tests = (
        f"{file}::{function}" for function, file in calls if Path(file).name.startswith(("test_", "conftest"))
    )
    return next(tests, None) or program(commands[-1] if commands else "")


def program(command: str) -> str:
    """Return the module or script of a Python command line, or the beginning of the code after -c."""
    words = command.split()[1:]
    while words:
        word = words.pop(0)
        if word == "-m" and words:
            return f"process -m {words[0]}"
        if word == "-c":
            return f"process -c {' '.join(words)[:60]}"
        if word in ("-X", "-W"):
            words = words[1:]
        elif not word.startswith("-"):
            return f"process {Path(word).name}"
    return "process"


def records(folded: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield (stack, count) of py-spy's folded stacks, `frame;frame;frame count`; a command line may hold newlines."""
    record = ""
    for line in folded:
        record += line
        if end := END.search(record):
            yield record[: end.start("count") - 1], int(end["count"])
            record = ""


def read(folded: Iterable[str]) -> Profile:
    """Read py-spy's folded stacks."""
    profile = Profile()
    for stack, count in records(folded):
        commands, calls = frames(stack)
        profile.add(place_of(commands, calls), phase_of(calls), count / RATE)
    return profile


class Compilers(threading.Thread):
    """Samples the CPU seconds of the compilers below a process until `ended` is set."""

    def __init__(self, top: psutil.Process) -> None:
        super().__init__(daemon=True)
        self.top, self.ended = top, threading.Event()
        self.seconds: dict[int, float] = {}

    def run(self) -> None:
        while not self.ended.wait(1 / RATE):
            for process in self._below():
                try:
                    if process.name() in COMPILERS:
                        times = process.cpu_times()
                        self.seconds[process.pid] = times.user + times.system
                except psutil.Error:
                    continue

    def _below(self) -> Iterator[psutil.Process]:
        try:
            yield from self.top.children(recursive=True)
        except psutil.Error:
            return


def measure(command: list[str]) -> tuple[Profile, int]:
    """Run the command under py-spy; return its profile and its exit status."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "stacks"
        spy = [
            "py-spy",
            "record",
            "--subprocesses",
            "--nonblocking",
            "-r",
            str(RATE),
            "-f",
            "raw",
            "-o",
            str(raw),
        ]
        process = subprocess.Popen([*spy, "--", *command])
        compilers = Compilers(psutil.Process(process.pid))
        compilers.start()
        status = process.wait()
        compilers.ended.set()
        compilers.join()
        with raw.open(errors="replace") as folded:
            profile = read(folded)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    profile.wall = time.monotonic() - started
    profile.total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    profile.add("C++ compilers", "C++ compiler", sum(compilers.seconds.values()))
    return profile, status


def tables(profile: Profile, places: int = 40) -> str:
    """Return the profile as Markdown: the phases, then the places that use the most CPU time."""
    seen = profile.phases.total()
    phases = [*profile.phases.most_common(), ("not sampled", max(0.0, profile.total - seen))]
    total = max(profile.total, seen)
    lines = ["| phase | CPU seconds | share |", "|---|---|---|"]
    lines += [f"| {phase} | {seconds:.0f} | {seconds / total:.0%} |" for phase, seconds in phases]
    lines += [f"| total | {total:.0f} | in {profile.wall:.0f} s of wall time |", ""]
    columns = [phase for phase, _ in profile.phases.most_common()]
    lines += [f"| test or program | CPU s | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    ranked = sorted(profile.places.items(), key=lambda item: -item[1].total())
    for place, spent in ranked[:places]:
        cells = " | ".join(f"{spent[phase]:.0f}" if spent[phase] >= 0.5 else "" for phase in columns)
        lines.append(f"| `{place}` | {spent.total():.0f} | {cells} |")
    rest = sum(spent.total() for _, spent in ranked[places:])
    lines.append(f"| {len(ranked[places:])} others | {rest:.0f} |{' |' * len(columns)}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Profile a command and write the tables; return its exit status, or 4 without py-spy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="file to write the tables to")
    parser.add_argument(
        "--folded", type=Path, help="read py-spy's folded stacks instead of running a command"
    )
    parser.add_argument("command", nargs="*", help="after --: the command")
    options = parser.parse_args(arguments)
    if not (options.folded or options.command):
        parser.error("name a command after --, or stacks with --folded")
    if options.folded and not options.folded.is_file():
        parser.error(f"--folded {options.folded}: no such file")
    if options.folded:
        with options.folded.open(errors="replace") as folded:
            profile, status = read(folded), 0
    elif shutil.which("py-spy"):
        profile, status = measure(options.command)
    else:
        print("py-spy is not installed: pip install 'bumpgate[profile]'", file=sys.stderr)
        return 4
    options.out.parent.mkdir(parents=True, exist_ok=True)
    how = shlex.join(["python", "-m", "tools.cpu_profile", "--out", str(options.out), "--", *options.command])
    head = (
        f"# CPU profile\n\nMade by `{how}` on {psutil.cpu_count()} cores, with {RATE} samples a second.\n\n"
    )
    options.out.write_text(head + tables(profile))
    return status


if __name__ == "__main__":
    sys.exit(main())
