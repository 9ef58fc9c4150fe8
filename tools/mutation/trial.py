"""Runs the tests that depend on a mutated file, the nearest first, in clones of the repository."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

from bumpgate.affected import Graph
from tools.mutation.sample import Mutation, changed_lines

KILLED, SURVIVED, UNDECIDED, UNTESTED = "killed", "survived", "undecided", "untested"
# A mutant that takes this many times as long as the unchanged tree, plus a start, hangs: it is killed.
SLOWER, START_SECONDS = 4, 30
NEARLY_ALL = 0.8  # of the time for one mutant
# Exit codes of pytest if all tests passed or one failed, and a value for a run that the time limit ended.
PASSED, FAILED, TIMED_OUT = 0, 1, -1


@dataclass(frozen=True)
class Result:
    """Outcome of one mutant.

    killer: the test file that failed, or "". seconds: spent with the mutant in place. left: how many test files that
    depend on the mutated file did not run for lack of time. digests: content hashes of the mutant ("") and of what ran.
    """

    name: str
    group: str
    diff: str
    outcome: str
    killer: str
    seconds: float
    left: int
    digests: Mapping[str, str] = field(default_factory=dict)

    def valid(self, root: Path, mutant: str) -> bool:
        """Return whether this result is of the same mutant and the same tests."""
        return self.digests.get("") == digest(mutant) and all(
            (root / path).is_file() and digest((root / path).read_text(encoding="utf-8")) == known
            for path, known in self.digests.items()
            if path
        )


def digest(text: str) -> str:
    """Return a short content hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def nearest(graph: Graph, path: str, tests: set[str]) -> list[str]:
    """Return the test files that depend on `path`, by the number of imports between, then by name."""
    users: dict[str, set[str]] = {}
    for user, needs in graph.items():
        for needed in needs:
            users.setdefault(needed, set()).add(user)
    found, seen, ring = [], {path}, {path}
    while ring:
        found += sorted(ring & tests)
        ring = {user for needed in ring for user in users.get(needed, ())} - seen
        seen |= ring
    return found


def by_mention(files: Sequence[str], texts: Mapping[str, str], path: str, definition: str) -> list[str]:
    """Return `files` with those first that name the mutated place; otherwise their order is kept.

    Two points for the module's name in the test's, two for a test folder or a test of the package's name, one for a
    test that mentions the function or class. texts: file -> its source. definition: that name, "" at module level.
    """
    module, package = Path(path).stem.strip("_"), Path(path).parent.name
    name = re.compile(rf"\b{re.escape(definition)}\b") if definition else None

    def points(file: str) -> int:
        place = Path(file)
        in_package = package in (place.parent.name, place.stem.removeprefix("test_"))
        return 2 * (module in place.stem) + 2 * in_package + bool(name and name.search(texts[file]))

    return sorted(files, key=lambda file: -points(file))


@dataclass(frozen=True)
class PytestRun:
    """How the tests of a group run. arguments: of pytest; env_vars: added to the environment."""

    arguments: tuple[str, ...] = ()
    env_vars: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """A mutant to try. files: the test files that judge it. nearest: ids of tests that execute its line, which run
    first and take `seconds` in all; none without a measurement of what the tests execute.
    """

    mutation: Mutation
    group: str
    tests: PytestRun
    files: Sequence[str]
    nearest: Sequence[str] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Suite:
    """Where a group's tests are, and how they run."""

    folder: str
    run: PytestRun

    def has(self, path: str) -> bool:
        """Return whether a file belongs to this suite."""
        return path.startswith(f"{self.folder}/")


# Several mutants run at once, so no test of the lane that is timed runs, nor one that is long or cold: a mutant that
# only these would notice survives.
SUITES = {
    "lane": Suite("suites", PytestRun(("-m", "cpu", "--fast"))),
    "interpret": Suite("suites/kernels/interpret", PytestRun(("-m", "cpu"), {"TRITON_INTERPRET": "1"})),
    "h200": Suite("suites", PytestRun(("-m", "h200"))),
    "v6e": Suite("suites", PytestRun(("-m", "v6e"))),
    "self": Suite("tests", PytestRun(("-m", "not browser and not fleet"))),
}


class Trials:
    """Runs mutants in clones of one commit. budget: seconds for one mutant, the unchanged tree's runs left out."""

    def __init__(self, root: Path, folder: Path, graph: Graph, budget: float, workers: int) -> None:
        self.root, self.graph, self.budget = root, graph, budget
        self.idle: SimpleQueue[Path] = SimpleQueue()
        self.workers = workers
        self._unchanged: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
        self._locks: dict[tuple[str, tuple[str, ...]], threading.Lock] = {}
        self._lock = threading.Lock()
        for n in range(workers):
            clone = folder / f"clone{n}"
            subprocess.run(["git", "clone", "--quiet", "--shared", root, clone], check=True)
            self.idle.put(clone)

    def run(self, work: list[Work], done: Callable[[Result], None]) -> None:
        """Try each mutant, and pass every result to `done` in the order of ending."""
        with ThreadPoolExecutor(self.workers) as pool:
            for future in [pool.submit(self._one, item, done) for item in work]:
                future.result()

    def _one(self, work: Work, done: Callable[[Result], None]) -> None:
        clone = self.idle.get()
        try:
            result = self._try(clone, work)
        finally:
            self.idle.put(clone)
        with self._lock:
            done(result)

    def _try(self, clone: Path, work: Work) -> Result:
        mutation, tests = work.mutation, work.tests
        path = clone / mutation.path
        source = path.read_text(encoding="utf-8")
        mutant = mutation.apply(source)
        digests, used, left = {"": digest(mutant)}, 0.0, 0

        def result(outcome: str, killer: str = "") -> Result:
            diff = changed_lines(source, mutant)
            return Result(mutation.name, work.group, diff, outcome, killer, used, left, digests)

        if work.nearest:
            begun = time.monotonic()
            killed = self._fails_again(clone, work, mutant, source)
            used += time.monotonic() - begun
            if killed:
                near = sorted({test.split("::")[0] for test in work.nearest})
                digests |= {file: digest((clone / file).read_text(encoding="utf-8")) for file in near}
                return result(KILLED, ", ".join(near))
        waiting, postponed = deque(work.files), set()
        while waiting:
            file = waiting.popleft()
            if file not in postponed and self._is_being_measured(file, tests):
                postponed.add(file)
                waiting.append(file)
                continue
            if used > NEARLY_ALL * self.budget and (file, tests.arguments) not in self._unchanged:
                left += 1  # too little time is left to be worth the run without the mutant
                continue
            code, seconds = self.unchanged(clone, file, tests)
            if code == TIMED_OUT or (code == PASSED and used + seconds > self.budget):
                left += 1
            if code != PASSED or used + seconds > self.budget:
                continue  # a test that is red or empty without the mutant is no witness
            with _written(path, mutant, source):
                begun = time.monotonic()
                code = self._pytest(clone, [file], tests, SLOWER * seconds + START_SECONDS)
                if code not in (PASSED, TIMED_OUT):
                    # A failure that does not repeat is the machine's, not the mutant's.
                    code = self._again(clone, [file], tests, SLOWER * seconds + START_SECONDS, code)
                used += time.monotonic() - begun
            digests[file] = digest((clone / file).read_text(encoding="utf-8"))
            if code != PASSED:
                return result(KILLED, file)
        return result(UNDECIDED if left else SURVIVED if len(digests) > 1 else UNTESTED)

    def _fails_again(self, clone: Path, work: Work, mutant: str, source: str) -> bool:
        """Return whether the nearest tests fail twice with the mutant, and pass without it."""
        limit = SLOWER * work.seconds + START_SECONDS
        with _written(clone / work.mutation.path, mutant, source):
            code = self._pytest(clone, work.nearest, work.tests, limit)
            if code == PASSED or self._again(clone, work.nearest, work.tests, limit, code) == PASSED:
                return False
        return self._again(clone, work.nearest, work.tests, limit, code) == PASSED

    def unchanged(self, clone: Path, file: str, tests: PytestRun) -> tuple[int, float]:
        """Return pytest's exit code for a test file on the unchanged tree, and the seconds; measured once."""
        key = (file, tests.arguments)
        with self._lock_of(key):
            if key not in self._unchanged:
                begun = time.monotonic()
                code = self._pytest(clone, [file], tests, self.budget)
                self._unchanged[key] = (code, time.monotonic() - begun)
        return self._unchanged[key]

    def _lock_of(self, key: tuple[str, tuple[str, ...]]) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())

    def _is_being_measured(self, file: str, tests: PytestRun) -> bool:
        """Return whether another worker runs this file on the unchanged tree, for up to `budget` seconds."""
        key = (file, tests.arguments)
        return key not in self._unchanged and self._lock_of(key).locked()

    def no_witness(self) -> list[str]:
        """Return the test files that cannot judge a mutant here: red or empty on the unchanged tree, or too slow."""
        return sorted({file for (file, _), (code, _) in self._unchanged.items() if code != PASSED})

    def _again(self, clone: Path, places: Sequence[str], tests: PytestRun, seconds: float, code: int) -> int:
        """Run only the test that failed in the last run, which ended with `code`; all of them if no test did."""
        arguments = ("--lf", "--lfnf=all") if code == FAILED else ()
        return self._pytest(clone, places, replace(tests, arguments=(*tests.arguments, *arguments)), seconds)

    def _pytest(self, clone: Path, places: Sequence[str], tests: PytestRun, seconds: float) -> int:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *tests.arguments, *places]
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("PYTEST_", "BUMPGATE_"))}
        # Child processes in other folders must import the mutant, not the installed tree.
        clean["PYTHONPATH"] = os.pathsep.join(filter(None, (str(clone), os.environ.get("PYTHONPATH"))))
        child = subprocess.Popen(
            command,
            cwd=clone,
            env=clean | dict(tests.env_vars) | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            # Also the children of a test that the mutant left behind.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@contextmanager
def _written(path: Path, mutant: str, source: str) -> Iterator[None]:
    path.write_text(mutant, encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(source, encoding="utf-8")


def append(path: Path, result: Result) -> None:
    """Add a result to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as f:
        f.write(json.dumps(asdict(result)) + "\n")


def load(path: Path) -> list[Result]:
    """Return the results of a file of JSON lines; the last one of a mutant counts, a cut-off last line does not."""
    found: dict[tuple[str, str], Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            result = Result(**json.loads(line))
        except ValueError:
            continue
        found[result.name, result.diff] = result
    return list(found.values())
