"""Environment variables that a training process needs before Python starts: set them, or refuse to run.

Torch reads most of these variables once, at import. This module therefore imports only the standard library: `enter`
exports missing ones and re-executes the program; `check` refuses values that differ from contract.toml, in one line.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from launch import caches
from launch.contract import Contract, ContractError, load

REFUSED, DISK_FULL = 3, 5
# Set by a launcher that replaces a failed run, in the environment of the new process.
RETRY = "BUMPGATE_RETRY"
# Name of a run: its compile caches are its own, seeded from the shared ones and published to them at its end.
RUN = "BUMPGATE_RUN"


def shared_root(given: Mapping[str, str]) -> Path:
    """Return the cache root that runs share, and in which each named run has its own below `runs`."""
    return Path(given.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bumpgate"


def cache_root(given: Mapping[str, str]) -> Path:
    """Return the cache root that is used if no cache variable is set: the shared one, or a named run's own (see RUN).

    Raises ContractError if the name has a character other than letters, digits, '.', '_' and '-'.
    """
    if not (run := given.get(RUN, "")):
        return shared_root(given)
    if not re.fullmatch(r"[\w-][\w.-]*", run):
        raise ContractError(f"{RUN}={run}: expected a name of letters, digits, '.', '_' and '-'")
    return shared_root(given) / "runs" / run


def child_environment(contract: Contract, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a training process: `given` and the contract's additions.

    A given value is never overwritten: `check` refuses a wrong one.
    """
    child = {**given}
    for name, folder in contract.cache_folders.items():
        child.setdefault(name, str(cache_root(child) / folder))
    for name, value in expected(contract, child).items():
        child.setdefault(name, value)
    return child


def expected(contract: Contract, given: Mapping[str, str]) -> dict[str, str]:
    """Map each variable to the value that the contract requires in this process."""
    return {**contract.variables, **(contract.rank_variables if given.get("LOCAL_RANK") else {})}


def check(contract: Contract, given: Mapping[str, str] = os.environ) -> None:
    """Refuse a process that violates the contract; called before torch can touch a device.

    Raises ContractError, one line, on a document that is not the reviewed one, a variable that differs, a switch that
    disables the compiler, or an unusable cache directory; caches.DiskFull if one is full.
    """
    _check_document(contract.path)
    faults = list(_faults(contract, given))
    if faults:
        raise ContractError(faults[0] + (f" (and {len(faults) - 1} more)" if faults[1:] else ""))
    for name in contract.cache_folders:
        caches.usable(Path(given[name]), contract.minimum_free_bytes, name)


def _check_document(path: Path) -> None:
    """Check the document's hash, as `sha256sum -c launch/contract.lock` does."""
    lock, command = path.with_suffix(".lock"), "sha256sum launch/contract.toml > launch/contract.lock"
    try:
        pinned = lock.read_text().split()[0]
    except (OSError, IndexError):
        raise ContractError(f"{lock.name}: no pinned sha256; after review: {command}") from None
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != pinned:
        raise ContractError(
            f"{path.name}: sha256 {found[:12]} is not the reviewed {pinned[:12]}; after review: {command}"
        )


def _faults(contract: Contract, given: Mapping[str, str]) -> Iterator[str]:
    required = expected(contract, given)
    for name, value in required.items():
        if name not in given:
            yield f"{name} is not set, the contract requires {value}"
        elif given[name] != value:
            yield f"{name}={given[name]}, the contract requires {value}: {contract.reasons[name]}"
    for name in contract.rank_variables:
        if name not in required and name in given:
            yield f"{name} is set without LOCAL_RANK: {contract.reasons[name]}"
    for name in contract.refused_variables:
        if given.get(name):
            yield f"{name}={given[name]}: {contract.reasons[name]}; unset it"
    for name in contract.cache_folders:
        if not given.get(name):
            yield f"{name} is not set: {contract.reasons[name]}"


def enter() -> None:
    """Re-execute this program under the contract's environment, or return if it already has it.

    Called by a launcher's main module before it imports torch. Exits with 3 (refused) or 5 (disk full), one line.
    """
    try:
        contract = load()
        env_vars = child_environment(contract, os.environ)
        for name in contract.cache_folders:
            if name not in os.environ:  # create only defaults; a directory set by the user must exist
                with caches.writing(f"{name}={env_vars[name]}"):
                    Path(env_vars[name]).mkdir(parents=True, exist_ok=True)
        env_vars = _with_usable_caches(contract, env_vars)
        if private := caches.own_private(env_vars.get(caches.PRIVATE)):
            # exec drops this handler, and the new process registers it again.
            atexit.register(shutil.rmtree, private, ignore_errors=True)
        check(contract, env_vars)
    except caches.DiskFull as error:
        leave(f"disk full: {error.strerror}", DISK_FULL)
    except ContractError as error:
        leave(f"refused: {error}", REFUSED)
    if env_vars != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env_vars)


def leave(line: str, code: int) -> NoReturn:
    """Print one line to stderr and exit with `code`."""
    print(line, file=sys.stderr, flush=True)
    raise SystemExit(code)


def _with_usable_caches(contract: Contract, env_vars: dict[str, str]) -> dict[str, str]:
    """Return `env_vars`, with unusable caches replaced by private ones (noted on stderr) if the contract allows it."""
    if contract.unusable_cache != "private":
        return env_vars
    try:
        for name in contract.cache_folders:
            caches.usable(Path(env_vars[name]), contract.minimum_free_bytes, name)
    except (caches.CacheError, caches.DiskFull) as error:
        private = caches.make_private(contract.cache_folders)
        why = error.strerror if isinstance(error, OSError) else error
        print(f"private cache: {private[caches.PRIVATE]}, since {why}", file=sys.stderr, flush=True)
        return {**env_vars, **private}
    return env_vars


def run_caches(contract: Contract, given: Mapping[str, str] = os.environ) -> list[tuple[Path, Path]]:
    """Return (shared, own) directories of a named run; none for other runs, and none for directories set by a user."""
    places = [(shared_root(given) / f, cache_root(given) / f, n) for n, f in contract.cache_folders.items()]
    return [(shared, own) for shared, own, name in places if shared != own and given.get(name) == str(own)]


def seed_caches(contract: Contract, given: Mapping[str, str] = os.environ) -> int:
    """Fill a named run's caches from the shared ones -> files copied. One process of a host calls it, before the first
    compilation. Raises CacheError or DiskFull.
    """
    return sum(
        len(caches.sync(shared, own)) for shared, own in run_caches(contract, given) if shared.is_dir()
    )


def publish_caches(contract: Contract, given: Mapping[str, str] = os.environ) -> int:
    """Copy what a named run compiled to the shared caches -> files copied. Of several ranks only rank 0 calls it.

    A failure is one line on stderr: the training is complete and saved.
    """
    copied = 0
    try:
        for shared, own in run_caches(contract, given):
            with caches.writing(str(shared)):
                shared.mkdir(parents=True, exist_ok=True)
            copied += len(caches.sync(own, shared))
    except (caches.CacheError, OSError) as error:
        print(f"caches not published: {error}", file=sys.stderr)
    return copied


def cache_report(contract: Contract, given: Mapping[str, str] = os.environ) -> dict[str, str | bool | None]:
    """Cache locations of this process for its summary, and whether they are private to it."""
    places = {name: given.get(name) for name in contract.cache_folders}
    return {**places, "private": caches.own_private(given.get(caches.PRIVATE)) is not None}
