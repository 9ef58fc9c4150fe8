"""`bumpgate findings`: findings of gates, with their first gate, owner and known issue."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import typer

from bumpgate.core.text import redacted
from bumpgate.history import known_findings
from bumpgate.history.archive import Archive, default_store
from bumpgate.history.known_findings import FindingError

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

Store = Annotated[str, typer.Option(help="SQLAlchemy URL; by default a SQLite file of this user.")]
Key = Annotated[str, typer.Argument(help="Key of the finding from `findings list`, or the start of it.")]


@app.command("list")
def list_command(
    lane: Annotated[str, typer.Option(help="Only this lane's.")] = "",
    gone: Annotated[bool, typer.Option("--gone", help="Also findings that are gone.")] = False,
    store: Store = "",
) -> None:
    """List the findings of the history that are open: state in the latest gate, first seen, issue and owner.

    Exit codes: 0 done, 4 bad input, or an invalid store.
    """
    found = Archive(store or default_store()).findings(lane)
    shown = [one for one in found if gone or not one.gone]
    for one in shown:
        typer.echo(known_findings.line(one))
    typer.echo(f"{sum(not one.gone for one in found)} open, {sum(bool(one.gone) for one in found)} gone")


@app.command("link")
def link_command(
    key: Key,
    issue: Annotated[str, typer.Argument(help="URL of the known issue; '' removes it.")],
    store: Store = "",
) -> None:
    """Link a finding to its known issue.

    Exit codes: 0 done, 4 bad input.
    """
    try:
        parts = urlsplit(issue)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
    except ValueError:
        valid = False
    if issue and not (valid and issue.isprintable() and " " not in issue):
        example = "https://github.com/pytorch/pytorch/issues/1"
        raise FindingError(f"{redacted(issue)!r} is not the URL of an issue such as {example}")
    _mark(key, store, issue=issue or None)


@app.command("owner")
def owner_command(
    key: Key,
    owner: Annotated[str, typer.Argument(help="Its owner; '' removes it.")],
    store: Store = "",
) -> None:
    """Name the owner of a finding.

    Exit codes: 0 done, 4 bad input.
    """
    if owner and (not owner.strip() or not owner.isprintable()):
        raise FindingError(f"{owner!r} is not a name: use printable characters on one line")
    _mark(key, store, owner=owner.strip() or None)


def _mark(key: str, store: str, **values: str | None) -> None:
    typer.echo(known_findings.line(Archive(store or default_store()).mark(key, **values)))
