"""`bumpgate image LANE`: a Containerfile that installs the lock of a lane on a base image named by its digest."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from bumpgate.core.baseline import find_root
from bumpgate.core.errors import BumpgateError
from bumpgate.core.rows import write_output
from bumpgate.env import store
from bumpgate.env.lane import LaneContext
from bumpgate.env.locks import Lock, read_lock
from bumpgate.env.store import sha256_of

BASE = re.compile(r"[\w][\w.:/-]*@sha256:[0-9a-f]{64}")


def command(
    lane: Annotated[str, typer.Argument(help="A declared lane.")],
    base: Annotated[
        str, typer.Option(help="Base image by digest: NAME@sha256:64 digits. It has the lane's Python.")
    ],
    lock: Annotated[Path | None, typer.Option(help="Another lock than the lane's.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file; by default Containerfile.LANE.")] = None,
) -> None:
    """Write a Containerfile with the locked packages of a lane, and print the command that builds the image.

    The wheels come from the wheel store and are installed by their hashes, without an index. Packages of the base
    image are not used.

    Exit codes: 0 done, 4 bad input.
    """
    root = find_root(Path.cwd())
    context = LaneContext(root, lane)
    if not BASE.fullmatch(base):
        raise BumpgateError(
            f"invalid base image {base!r} (expected NAME@sha256: and 64 digits); print the digest of an image with:"
            f" docker buildx imagetools inspect {shlex.quote(base.partition('@')[0] or 'NAME')}"
        )
    path = lock or context.lock_path
    found = read_lock(path)
    script = context.script
    place = out or Path(f"Containerfile.{lane}")
    text = containerfile(lane, base, path, found, script.relative_to(root) if script else None)
    write_output(place, text, "# Written by `bumpgate image")
    wheels = [wheel for package in found.packages for wheel in package.wheels]
    absent = sum(store.find(wheel) is None for wheel in wheels)
    build = ["docker", "build", "-f", str(place), "--build-context", f"store={store.store_root()}"]
    typer.echo(f"wrote {place}: {len(wheels)} wheels of {path.name}; build the image with:")
    typer.echo(f"  {shlex.join([*build, '-t', f'bumpgate-{lane}', str(root)])}")
    if absent:
        typer.echo(f"{absent} of them are not in the wheel store: bumpgate freeze --lane {lane}")


def containerfile(lane: str, base: str, path: Path, lock: Lock, script: Path | None) -> str:
    """Return the text of the Containerfile. path: of the lock. script: completes the environment, or None."""
    wheels = sorted(((p.name, w) for p in lock.packages for w in p.wheels), key=lambda pair: pair[0])
    python = f"python{lock.python or 3}"
    lines = [
        f"# Written by `bumpgate image {lane}` from {path.name}; write it again rather than edit it.",
        "FROM scratch AS wheels",
        *(f"COPY --from=store {wheel.path} /{wheel.path}" for _, wheel in wheels),
        "COPY <<END /requirements.txt",
        *(f"/wheels/{wheel.path} --hash=sha256:{wheel.sha256}" for _, wheel in wheels),
        "END",
        "",
        f"FROM {base}",
        f'LABEL bumpgate.lane="{lane}" bumpgate.lock="sha256:{sha256_of(path)}"',
        f"RUN {python} -m venv /opt/bumpgate",
        "ENV PATH=/opt/bumpgate/bin:$PATH",
        "RUN --mount=type=bind,from=wheels,target=/wheels \\",
        "    python -m pip install --no-cache-dir --no-index --no-deps --require-hashes -r /wheels/requirements.txt",
    ]
    if script is not None:
        lines += [
            f"RUN --mount=type=bind,source={script.as_posix()},target=/tmp/{script.name} \\",
            f"    python -I /tmp/{script.name}",
        ]
    return "\n".join(lines) + "\n"
