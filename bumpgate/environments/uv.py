"""Runs `uv`: finds the binary, passes the host's pip settings to it, and keeps its output in a log."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from bumpgate.rows import BumpgateError

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
# Settings that determine which files uv picks: another value gives another environment.
DECIDING = (
    *("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX"),
    *("UV_INDEX_STRATEGY", "UV_EXCLUDE_NEWER", "UV_PRERELEASE", "UV_RESOLUTION", "UV_TORCH_BACKEND"),
    *("UV_CONSTRAINT", "UV_OVERRIDE", "UV_CONFIG_FILE", "UV_NO_CONFIG"),
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


def deciding_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the host's settings that determine what is installed; they are part of an environment's key."""
    settings = host_settings(environ)
    return {name: settings[name] for name in DECIDING if settings.get(name)}


def public_url(url: str) -> str:
    """Return a URL without user name and password, for messages."""
    return re.sub(r"(?<=//)[^/@]*@", "", url)


def run_uv(
    arguments: Sequence[str | Path],
    log: Path,
    *,
    stdin: str = "",
    keep_open: Sequence[int] = (),
    binary: str | None = None,
) -> tuple[int, str]:
    """Run uv. Return its exit status and its output, which is appended to `log` with the command.

    keep_open: descriptors that the child holds too, so that a lock outlives a killed parent as long as uv writes.
    """
    command = [binary or find_uv(), *map(str, arguments)]
    try:
        done = subprocess.run(
            command,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=host_settings() | {"NO_COLOR": "1", "UV_NO_PROGRESS": "1"},
            pass_fds=tuple(keep_open),
            check=False,
        )
    except OSError as error:
        raise UvError(f"uv cannot be started ({error.strerror}): pip install --force-reinstall uv") from None
    with log.open("a", encoding="utf-8") as f:
        f.write(f"$ uv {' '.join(command[1:])}\n{done.stdout}[exit {done.returncode}]\n")
    return done.returncode, done.stdout
