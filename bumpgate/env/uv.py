"""Runs `uv`: finds the binary, passes the host's pip settings to it, and keeps its output in a log."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.core.text import redacted
from bumpgate.process.child import LoggedChild, run_children
from bumpgate.process.home import home
from bumpgate.process.host import read_or_empty

# uv ignores PIP_* variables. Each is used only if uv's own variable is unset; pip separates lists by spaces, and uv
# its find-links by commas.
FROM_PIP = {
    "UV_DEFAULT_INDEX": "PIP_INDEX_URL",
    "UV_INDEX": "PIP_EXTRA_INDEX_URL",
    "UV_FIND_LINKS": "PIP_FIND_LINKS",
    "UV_NO_INDEX": "PIP_NO_INDEX",
    "UV_INSECURE_HOST": "PIP_TRUSTED_HOST",
    "UV_HTTP_TIMEOUT": "PIP_DEFAULT_TIMEOUT",
    "UV_CONSTRAINT": "PIP_CONSTRAINT",
    "SSL_CERT_FILE": "PIP_CERT",
}
OLDER_NAMES = {"UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_INDEX": "UV_EXTRA_INDEX_URL"}
# Files whose content determines which files uv picks, and all such settings: another value, another environment.
DECIDING_FILES = ("UV_CONSTRAINT", "UV_OVERRIDE", "UV_CONFIG_FILE")
DECIDING = (
    *("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX"),
    *("UV_INDEX_STRATEGY", "UV_EXCLUDE_NEWER", "UV_PRERELEASE", "UV_RESOLUTION", "UV_TORCH_BACKEND"),
    *(*DECIDING_FILES, "UV_NO_CONFIG"),
)


class UvError(BumpgateError):
    """uv is not installed or cannot be started."""


def find_uv() -> str:
    """Return the path of the binary: the `uv` package of this interpreter first, then PATH. Raises UvError."""
    try:
        import uv

        return os.fsdecode(uv.find_uv_bin())
    except (ImportError, FileNotFoundError):
        pass
    found = shutil.which("uv")
    if found is None:
        raise UvError("uv builds the environments and is not installed: pip install uv")
    return found


def host_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the env_vars of this process with pip's settings translated to uv's."""
    settings = dict(os.environ if environ is None else environ)
    for ours, theirs in FROM_PIP.items():
        own = settings.get(ours) or settings.get(OLDER_NAMES.get(ours, ""))
        if not own and settings.get(theirs):
            value = settings[theirs].strip()
            settings[ours] = ",".join(value.split()) if ours == "UV_FIND_LINKS" else value
    # Never install into the environment that the caller has activated.
    settings.pop("VIRTUAL_ENV", None)
    return settings


def http_options() -> dict[str, Any]:
    """Return options of requests by the host's settings: seconds without an answer, and the certificates.

    Raises BumpgateError if UV_HTTP_TIMEOUT is not a number.
    """
    settings = host_settings()
    timeout = settings.get("UV_HTTP_TIMEOUT") or "30"
    try:
        seconds = float(timeout)
    except ValueError:
        raise BumpgateError(
            f"UV_HTTP_TIMEOUT={timeout}: not a number of seconds; export UV_HTTP_TIMEOUT=30"
        ) from None
    return {
        "timeout": seconds,
        "verify": settings.get("REQUESTS_CA_BUNDLE") or settings.get("SSL_CERT_FILE") or True,
    }


def deciding_settings() -> dict[str, str]:
    """Return the host's settings that determine what is installed; they are part of an environment's key."""
    settings = host_settings()
    return {name: settings[name] for name in DECIDING if settings.get(name)}


def deciding_files() -> dict[str, str]:
    """Return path -> sha256 of the files that the deciding settings name; "" for one that cannot be read."""
    settings = deciding_settings()
    found = {}
    for name in filter(settings.get, DECIDING_FILES):
        text = settings[name]
        for path in map(local_path, [text] if name == "UV_CONFIG_FILE" else text.split()):
            if path is not None:
                known = path.is_file() and os.access(path, os.R_OK)
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if known else ""
    return found


def local_path(place: str) -> Path | None:
    """Return the path of a file or folder that is named by its path or by a file URL; None for any other URL."""
    if place.startswith("file://"):
        return Path(unquote(place.removeprefix("file://"))).expanduser()
    return None if "://" in place else Path(place).expanduser()


def blocks(place: str) -> Iterator[bytes]:
    """Yield the bytes of a file, from its path or over HTTP. Raises BumpgateError, OSError."""
    if path := local_path(place):
        with path.open("rb") as f:
            while block := f.read(1 << 20):
                yield block
        return
    import requests

    try:
        with requests.get(place, stream=True, **http_options()) as answer:
            answer.raise_for_status()
            yield from answer.iter_content(1 << 20)
    except requests.RequestException as error:
        raise BumpgateError(f"{redacted(place)} cannot be fetched: {one_line(error, 120)}") from None


def uv_cache() -> Path:
    """Return the folder of uv's cache: uv's own, unless an environment could not link its files from there."""
    done = subprocess.run([find_uv(), "cache", "dir"], env=host_settings(), capture_output=True, text=True)
    chosen = Path(done.stdout.strip())
    if os.environ.get("UV_CACHE_DIR") or (done.returncode == 0 and _device(chosen) == _device(home())):
        return chosen
    return home() / "uv"


def _device(path: Path) -> int:
    """Return the file system of a path, or of the first of its parents that exists."""
    return next(p for p in (path, *path.parents) if p.exists()).stat().st_dev


def run_uv(
    arguments: Sequence[str | Path],
    log: Path,
    keep_open: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run uv. Return its exit status and its output, which is appended to `log` with the command.

    uv ends with this call, and with this process, however that ends. keep_open: descriptors that it holds meanwhile.
    variables: of its environment, next to this process's.
    """
    command = [find_uv(), *map(str, arguments)]
    # Hard links, also on file systems that can clone: what environments share can be counted.
    defaults = {"UV_CACHE_DIR": str(uv_cache()), "UV_LINK_MODE": "hardlink"}
    settings = {**defaults, **host_settings(), "NO_COLOR": "1", "UV_NO_PROGRESS": "1", **(variables or {})}
    part = log.with_suffix(".part")
    try:
        child = LoggedChild(command, Path.cwd(), settings, part, tuple(map(os.dup, keep_open)))
        ((code, _),) = run_children([child], None)
        output = read_or_empty(part)
    finally:
        part.unlink(missing_ok=True)
    with log.open("a", encoding="utf-8") as f:
        f.write(redacted(f"$ uv {' '.join(command[1:])}\n{output}[exit {code}]\n"))
    return code, redacted(output)
