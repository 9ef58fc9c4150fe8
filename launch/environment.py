"""What a training process must find in its environment before Python starts, and the refusal where it does not.

Torch reads most of these variables once, at import. So this module imports the standard library only: `enter` exports
what is absent and starts the same program again; `check` refuses what differs from contract.toml, in one line.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from launch import caches
from launch.contract import Contract, ContractError, load

REFUSED, DISK_FULL = 3, 5
# Set by whoever replaces a failed run by a new process, in that process's environment.
RETRY = "BUMPGATE_RETRY"


def cache_root(given: Mapping[str, str]) -> Path:
    """Where caches stand that nobody has placed."""
    return Path(given.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bumpgate"


def child_environment(
    contract: Contract, given: Mapping[str, str], rank: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What a training process must be started with: `given`, `rank`'s own variables, and what the contract adds.

    A given value stays, right or wrong: `check` refuses a wrong one, so that nobody's choice is undone in silence.
    The NCCL variables are added for a rank only, which LOCAL_RANK tells.
    """
    child = {**given, **(rank or {})}
    for name, folder in contract.cache_folders.items():
        child.setdefault(name, str(cache_root(child) / folder))
    for name, value in expected(contract, child).items():
        child.setdefault(name, value)
    return child


def expected(contract: Contract, given: Mapping[str, str]) -> dict[str, str]:
    """Variable -> the value that the contract asks for in this process."""
    return {**contract.variables, **(contract.rank_variables if given.get("LOCAL_RANK") else {})}


def check(contract: Contract, given: Mapping[str, str] = os.environ) -> None:
    """Refuses a process that breaks the contract; called before torch can touch a device.

    Raises ContractError with one line: the document is not the reviewed one, a variable differs, a switch that turns
    the compiler off is set, a cache directory is of no use. Raises caches.DiskFull where one is full.
    """
    _check_document(contract.path)
    faults = list(_faults(contract, given))
    if faults:
        raise ContractError(faults[0] + (f" (and {len(faults) - 1} more)" if faults[1:] else ""))
    for name in contract.cache_folders:
        caches.usable(Path(given[name]), contract.minimum_free_bytes, name)


def _check_document(path: Path) -> None:
    """The lock is `sha256sum`'s own format: `sha256sum -c contract.lock` says the same."""
    lock, command = path.with_suffix(".lock"), f"sha256sum {path.name} > {path.stem}.lock"
    try:
        pinned = lock.read_text().split()[0]
    except (OSError, IndexError):
        raise ContractError(f"{lock.name}: no pinned sha256; after review: {command}") from None
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != pinned:
        raise ContractError(
            f"{path.name}: sha256 {found[:12]} is not the reviewed {pinned[:12]}; after review: {command}"
        )


def _faults(contract: Contract, given: Mapping[str, str]) -> Iterator[str]:
    wanted = expected(contract, given)
    for name, value in wanted.items():
        if name not in given:
            yield f"{name} is not set, the contract says {value}"
        elif given[name] != value:
            yield f"{name}={given[name]}, the contract says {value}: {contract.reasons[name]}"
    for name in contract.rank_variables:
        if name not in wanted and name in given:
            yield f"{name} is set without LOCAL_RANK: {contract.reasons[name]}"
    for name in contract.refused_variables:
        if given.get(name):
            yield f"{name}={given[name]}: {contract.reasons[name]}; unset it"
    for name in contract.cache_folders:
        if not given.get(name):
            yield f"{name} is not set: {contract.reasons[name]}"


def enter() -> None:
    """Starts this program again under the contract's environment, or returns where it already has it.

    Called by a launcher's main module before it imports torch. Exits with 3 (refused) or 5 (disk full), one line.
    """
    try:
        contract = load()
        wanted = child_environment(contract, os.environ)
        for name in contract.cache_folders:
            if name not in os.environ:  # ours to make; a directory that somebody has named must be there
                with caches.writing(f"{name}={wanted[name]}"):
                    Path(wanted[name]).mkdir(parents=True, exist_ok=True)
        wanted = _with_usable_caches(contract, wanted)
        if private := caches.own_private(wanted.get(caches.PRIVATE)):
            # An exec forgets this, and comes by again.
            atexit.register(shutil.rmtree, private, ignore_errors=True)
        check(contract, wanted)
    except caches.DiskFull as error:
        leave(f"disk full: {error.strerror}", DISK_FULL)
    except ContractError as error:
        leave(f"refused: {error}", REFUSED)
    if wanted != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)


def leave(line: str, code: int) -> NoReturn:
    """One line on standard error, then the exit code."""
    print(line, file=sys.stderr, flush=True)
    raise SystemExit(code)


def _with_usable_caches(contract: Contract, wanted: dict[str, str]) -> dict[str, str]:
    """`wanted`, or where the contract allows it the same with private directories, which standard error is told."""
    if contract.unusable_cache != "private":
        return wanted
    try:
        for name in contract.cache_folders:
            caches.usable(Path(wanted[name]), contract.minimum_free_bytes, name)
    except (caches.CacheError, caches.DiskFull) as error:
        private = caches.make_private(contract.cache_folders)
        why = error.strerror if isinstance(error, OSError) else error
        print(f"private cache: {private[caches.PRIVATE]}, since {why}", file=sys.stderr, flush=True)
        return {**wanted, **private}
    return wanted


def cache_report(contract: Contract, given: Mapping[str, str] = os.environ) -> dict[str, str | bool | None]:
    """Where the caches of this process stand, for its summary, and whether they are private to it."""
    places = {name: given.get(name) for name in contract.cache_folders}
    return {**places, "private": caches.own_private(given.get(caches.PRIVATE)) is not None}
