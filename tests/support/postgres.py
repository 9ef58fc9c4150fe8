"""A private PostgreSQL server in a folder of its own, for tests of a shared history."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("/usr/lib/postgresql", "/usr/pgsql", "/opt/homebrew/opt/postgresql")
# The server refuses to run as root: then it runs as this user.
USER = "postgres"


def program(name: str) -> str:
    """Return the path of a program of the server; Debian has them in a folder per version."""
    found = [str(path) for root in PROGRAMS for path in sorted(Path("/").glob(f"{root[1:]}*/**/bin/{name}"))]
    found = [*filter(None, [shutil.which(name)]), *found]
    if not found:
        pytest.skip(f"PostgreSQL's {name} is not installed: apt-get install postgresql")
    return found[0]


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Yield the SQLAlchemy URL of an empty database; connections are by a socket in `folder`."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'bumpgate[fleet]'")
    data = folder / "data"
    root = os.getuid() == 0
    if root:
        user = pwd.getpwnam(USER)
        os.chown(folder, user.pw_uid, user.pw_gid)
    prefix = ["runuser", "-u", USER, "--"] if root else []

    def call(name: str, *arguments: str) -> None:
        done = subprocess.run(
            [*prefix, program(name), *arguments], cwd=folder, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr

    call("initdb", "-D", str(data), "-U", "bumpgate", "--auth=trust", "--no-sync")
    options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
    call("pg_ctl", "-D", str(data), "-l", str(folder / "log"), "-w", "-o", options, "start")
    try:
        yield f"postgresql+psycopg://bumpgate@/postgres?host={folder}"
    finally:
        call("pg_ctl", "-D", str(data), "-m", "immediate", "stop")
