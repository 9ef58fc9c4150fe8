"""Mutation testing of a sample: python -m tools.mutation --number 400 --seed 1 --results mutation.jsonl

Results are appended as they come. A second run with the same file tries only mutants that are undecided, or whose
source or tests changed; --shard K/N divides a sample over N machines, and `--report A.jsonl B.jsonl` writes the page of
all of them.

Exit codes: 0 every mutant is killed or has a reason, 1 open survivors, 4 bad input.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from bumpgate.affected import Graph, graph_of
from bumpgate.core.toml import tomllib
from tests.support.tree import ROOT
from tools.mutation import sample
from tools.mutation.covered import Covered, lines_of, uses_of
from tools.mutation.covered import load as load_covered
from tools.mutation.report import merged, open_survivors, table
from tools.mutation.trial import (
    SUITES,
    SURVIVED,
    UNDECIDED,
    Result,
    Trials,
    Work,
    append,
    by_mention,
    load,
    nearest,
)

HERE = Path(__file__).parent


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__.splitlines()[0])
    made.add_argument("--number", type=int, default=400, help="how many mutants the sample has (default 400)")
    made.add_argument("--seed", type=int, default=1, help="the same seed and sources give the same sample")
    made.add_argument("--group", action="append", help="only this group of groups.toml; repeatable")
    made.add_argument(
        "--shard", default="1/1", metavar="K/N", help="every N-th mutant of the sample, from the K-th on"
    )
    made.add_argument(
        "--survivors-of", type=Path, metavar="FILE", help="only mutants that survived in these results"
    )
    made.add_argument(
        "--covered",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="output of tools.mutation.covered: run the tests that execute the mutated line; repeatable",
    )
    made.add_argument("--seconds", type=float, default=600, help="time for one mutant (default 600)")
    made.add_argument("--workers", type=int, default=2, help="mutants at the same time (default 2)")
    made.add_argument(
        "--results", type=Path, default=Path("mutation.jsonl"), help="file of results, continued if there"
    )
    made.add_argument(
        "--report",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run nothing; write the page of these results; a mutant that one of them killed is killed",
    )
    made.add_argument("--out", type=Path, help="write the page here instead of printing it")
    made.add_argument("--list", action="store_true", help="run nothing; print the sample")
    return made


def groups(names: list[str] | None) -> dict[str, dict]:
    """Return the groups of groups.toml, by default all but the optional ones. Raises SystemExit (4) on a wrong name."""
    known = tomllib.loads((HERE / "groups.toml").read_text(encoding="utf-8"))
    for name in names or ():
        if name not in known:
            fail(f"--group {name}: not a group (expected {', '.join(known)})")
    return {
        name: group
        for name, group in known.items()
        if (name in names if names else not group.get("optional"))
    }


def work_of(
    root: Path, group: str, mutation: sample.Mutation, graph: Graph, covered: Covered | None = None
) -> Work:
    """Return the test files that have to notice a mutant, those that name its place first, and how they run.

    covered: what the tests execute. With it, only files whose tests execute the mutated line are returned, if any do.
    """
    path = mutation.path
    declared = groups([group])[group]
    suite = SUITES[declared["suites"]]
    how = suite.run
    package = Path(path).parent.name
    if select := declared.get("select"):
        how = replace(how, arguments=(*how.arguments, "-k", select.format(package=package)))
    if "tests" in declared:
        files = [test.format(package=package) for test in declared["tests"]]
        return Work(mutation, group, how, files + declared.get("also", {}).get(package, []))
    tests = {known for known in graph if Path(known).name.startswith("test_") and suite.has(known)}
    texts = {test: (root / test).read_text(encoding="utf-8") for test in tests}
    files = by_mention(nearest(graph, path, tests), texts, path, mutation.definition)
    if covered is None:
        return Work(mutation, group, how, files)
    source = (root / path).read_text(encoding="utf-8")
    lines, uses = lines_of(source, mutation.line), uses_of(source, mutation.line)
    first = covered.fastest(path, uses, suite) or covered.fastest(path, lines, suite)
    if executed := covered.test_files(path, lines, suite):
        files = [f for f in files if f in executed] + sorted(executed - set(files))
        using = covered.test_files(path, uses, suite)
        files.sort(key=lambda file: file not in using)
    return Work(mutation, group, how, files, first, sum(covered.seconds[test] for test in first))


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def fail(message: str) -> None:
    """End with exit code 4 and one line."""
    print(message, file=sys.stderr)
    raise SystemExit(4)


def chosen(root: Path, options: argparse.Namespace) -> list[tuple[sample.Mutation, str]]:
    """Return the (mutation, group) pairs of the sample's shard; groups share the number by lines of source."""
    try:
        k, n = map(int, options.shard.split("/"))
    except ValueError:
        k = n = 0
    if not 1 <= k <= n:
        fail(f"--shard {options.shard}: expected K/N with 1 <= K <= N")
    sources = {
        name: sample.read(root, g["files"], g.get("without", ())) for name, g in groups(options.group).items()
    }
    lines = {name: sum(text.count("\n") for text in texts.values()) for name, texts in sources.items()}
    found = []
    for name, share in sample.shares(lines, options.number).items():
        found += [(mutation, name) for mutation in sample.sample(sources[name], share, options.seed)]
    if options.survivors_of:
        survived = {(r.name, r.diff) for r in load(options.survivors_of) if r.outcome == SURVIVED}
        found = [(m, name) for m, name in found if (m.name, difference(root, m)) in survived]
    random.Random(options.seed).shuffle(found)  # a run that is cut off has tried a sample of all groups
    return found[k - 1 :: n]


def difference(root: Path, mutation: sample.Mutation) -> str:
    """Return the changed lines of a mutant."""
    source = (root / mutation.path).read_text(encoding="utf-8")
    return sample.changed_lines(source, mutation.apply(source))


def run(root: Path, options: argparse.Namespace) -> list[Result]:
    """Try the sample, except mutants whose result in the file is still valid; return the results of the sample."""
    status = ["git", "-C", str(root), "status", "--porcelain"]
    if changed := subprocess.run(status, capture_output=True, text=True, check=True).stdout.splitlines():
        fail(
            f"{changed[0][3:]} is not committed: the mutants are made in clones of HEAD, commit or stash first"
        )
    known = {(r.name, r.diff): r for r in load(options.results)}
    graph, covered = graph_of(root), load_covered(options.covered)
    results: list[Result] = []
    work: list[Work] = []
    for mutation, group in chosen(root, options):
        source = (root / mutation.path).read_text(encoding="utf-8")
        mutant = mutation.apply(source)
        old = known.get((mutation.name, sample.changed_lines(source, mutant)))
        if old and old.outcome != UNDECIDED and old.valid(root, mutant):
            results.append(old)
            continue
        item = work_of(root, group, mutation, graph, covered)
        if "h200" in item.tests.arguments and not has_gpu():
            fail(f"group {group} needs an H200: choose others with --group")
        if item.tests.env_vars and importlib.util.find_spec("triton") is None:
            fail(f"group {group} needs triton: pip install triton==3.7.1, or choose others with --group")
        work.append(item)

    def done(result: Result) -> None:
        append(options.results, result)
        results.append(result)
        print(
            f"{len(results)}/{total} {result.outcome:9} {result.seconds:5.0f} s  {result.name}  {result.diff}",
            flush=True,
        )

    total = len(results) + len(work)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        trials = Trials(root, Path(folder), graph, options.seconds, options.workers)
        trials.run(work, done)
    if files := trials.no_witness():
        print(f"red, empty or too slow without a mutant, so not used: {' '.join(files)}", file=sys.stderr)
    return results


def main() -> int:
    """Run, list or report, and return the exit code."""
    options = parser().parse_args()
    if options.list:
        for mutation, group in chosen(ROOT, options):
            print(f"{group:9} {mutation.name}  {difference(ROOT, mutation)}")
        return 0
    reported = [r for path in options.report or () for r in load(path)]
    results = merged(reported) if options.report else run(ROOT, options)
    raw = tomllib.loads((HERE / "equivalent.toml").read_text(encoding="utf-8"))
    reasons = {(m["path"], m["change"]): m["reason"] for m in raw.get("mutant", ())}
    command = shlex.join(["python", "-m", "tools.mutation", *sys.argv[1:]])
    page = table(results, reasons, command)
    if options.out:
        options.out.write_text(page, encoding="utf-8")
        print(f"wrote {options.out}")
    else:
        print(page)
    return 1 if open_survivors(results, reasons) else 0


if __name__ == "__main__":
    sys.exit(main())
