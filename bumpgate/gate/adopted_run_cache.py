"""Keeps the adopted side's run of a gate, so that the next gate of the same tree, set and host need not repeat it.

Most of a gate's time is two runs of the lane. The adopted side's run depends on the work tree, the packages, the host
and the options alone, not on the candidate. It is reused for HOURS; canaries and paired sessions always run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path

from bumpgate.core import accepted
from bumpgate.core.rows import Record, RecordError, Verdict, read_record, write_atomic, write_record
from bumpgate.gate.environments import ROUNDS
from bumpgate.gate.runner import Bench
from bumpgate.gate.state import Gate
from bumpgate.process.home import home
from bumpgate.process.tree_digest import SOURCES
from bumpgate.table import summary

HOURS = 24
# Beginnings of the names of variables that can change a row.
READ = (
    *("AOT_", "CC", "CUDA", "CXX", "GLOO", "KMP_", "LD_", "MKL_", "NCCL_", "OMP_"),
    *("PYTORCH", "TORCH", "TRITON"),
)
# Variables of a shell itself, which differ between two shells that are alike.
SHELL = ("OLDPWD", "PWD", "SHLVL", "_")
# Files that are kept; the oldest are deleted.
MOST = 20


def folder() -> Path:
    return home() / "adopted_runs"


def recall(bench: Bench, gate: Gate) -> Gate:
    """Take the adopted side's rows from a cached run of the same tree, packages and host, if there is one."""
    usable = not (gate.sides["adopted"].measured or bench.fresh)
    found = find(name) if usable and (name := key(bench, gate)) else None
    if found is None:
        return gate
    path, started = found
    record = read_record(path)
    write_record(
        bench.out / "adopted.json",
        record.provenance,
        record.judgements,
        complete=True,
        problems=record.problems,
        tests=record.tests,
    )
    bench.view.say(f"adopted: {summary(record)}")
    bench.view.say(f"  its run of {started}: same tree, packages and host (--fresh runs it again)")
    return bench.save(gate.changed("adopted", kept=started, measured=True, record="adopted.json"))


def keep(bench: Bench, gate: Gate, record: Record) -> None:
    """Keep the adopted side's run, unless it is incomplete, the machine disturbed it, or its tree was edited."""
    now = bench.tree()
    edited = bool(gate.binding and now and gate.binding.differences(now))
    disturbed = {Verdict.INFRA, Verdict.INCONCLUSIVE, Verdict.MISSING}
    judged = {j.verdict for j in record.judgements if not j.explains}
    name = key(bench, gate)
    if not name or edited or not record.complete or record.problems or judged & disturbed:
        return
    folder().mkdir(parents=True, exist_ok=True)
    caches = bench.environments["adopted"].cache_folders.values()
    filled = [cache for cache in caches if Path(cache).is_dir()]
    write_atomic(folder() / f"{name}.caches", "".join(f"{cache}\n" for cache in filled))
    write_atomic(folder() / f"{name}.json", (bench.out / "adopted.json").read_text(encoding="utf-8"))
    by_age = sorted(folder().glob("*.json"), key=lambda kept: kept.stat().st_mtime)
    for old in by_age[:-MOST]:
        old.unlink(missing_ok=True)
        old.with_suffix(".caches").unlink(missing_ok=True)


def key(bench: Bench, gate: Gate) -> str:
    """Return the name of the adopted side's run: a digest of everything that its rows depend on.

    "" if they may depend on more than can be recorded: a user's interpreter can change while its versions stay.
    """
    side, config, tree = gate.sides["adopted"], bench.config, gate.binding
    if bench.environments["adopted"].lock is None or tree is None:
        return ""
    entries = accepted.load(bench.root / "baselines" / accepted.FILE)
    what = {
        "lane": config.lane,
        "selection": config.selection,
        "command": config.command,
        "base": config.base,
        "without": config.without,
        "variables": {"rounds": ROUNDS, **bench.tiers(gate), **_variables(bench.root, tree.files)},
        "tree": tree.tree,
        "bumpgate": tree.bumpgate,
        # The cached rows are judged by the acceptances that hold today.
        "accepted": sorted(repr(a) for a in entries if a.lane == config.lane and not a.expired(bench.today)),
        "python": side.python,
        "packages": {**side.packages},
        "git_version": {**side.git_version},
        "host": gate.host,
        "gpus": [len(s.gpus) for s in bench.halves(["adopted"])[0]],
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def _variables(root: Path, files: Iterable[str]) -> dict[str, str]:
    """Return the variables of this shell that a lane run may read: by their beginning, or named in one of the files.

    files: paths of sources below root. A name within a longer word counts as well.
    """
    others = {name for name in os.environ if not name.startswith(READ) and name not in SHELL}
    named: set[str] = set()
    for path in (root / file for file in files if file.endswith(SOURCES)):
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        named |= {name for name in others - named if name in text}
    return {name: value for name, value in os.environ.items() if name.startswith(READ) or name in named}


def find(name: str, now: datetime | None = None) -> tuple[Path, str] | None:
    """Return the file of a kept run and its start (UTC, ISO 8601); None if there is none, or one that is too old.

    None as well if a compile cache that the run filled is gone: the first session would compile everything.
    """
    path = folder() / f"{name}.json"
    try:
        filled = path.with_suffix(".caches").read_text(encoding="utf-8").splitlines()
        started = str(read_record(path).provenance["started"])
        age = (now or datetime.now(timezone.utc)) - datetime.fromisoformat(started)
    except (OSError, RecordError, KeyError, ValueError, TypeError):
        return None
    usable = timedelta(0) <= age <= timedelta(hours=HOURS) and all(map(os.path.isdir, filled))
    return (path, started) if usable else None
