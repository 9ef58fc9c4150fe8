"""`bumpgate notify`: brings issues and chats up to date with the findings of the history.

The state of a channel is stored when it has confirmed a message, so a failed message is sent by the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bumpgate.core.errors import BumpgateError, loads, one_fault
from bumpgate.history.archive import Archive, default_store
from bumpgate.notify import channels
from bumpgate.notify.channels import Channel, ChannelError, Posted
from bumpgate.notify.topics import Message, answer, answered, assign, messages
from bumpgate.process.home import home
from bumpgate.process.locks import locked

FAILED = 125


def command(
    lane: Annotated[str, typer.Option(help="Only this lane's findings.")] = "",
    github: Annotated[
        str, typer.Option(help="OWNER/REPOSITORY for issues; the token is in BUMPGATE_GITHUB_TOKEN.")
    ] = "",
    apprise: Annotated[
        bool, typer.Option("--apprise", help="The channels whose apprise URLs are in BUMPGATE_APPRISE_URLS.")
    ] = False,
    bisect: Annotated[Path | None, typer.Option(help="bisect.json: add its answer to the messages.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the messages; send and store none.")
    ] = False,
    store: Annotated[str, typer.Option(help="SQLAlchemy URL; by default a SQLite file of this user.")] = "",
) -> None:
    """Send one message per new, changed or resolved cause in the gates of the history; none twice.

    Run it after `bumpgate history add`, and after the bisect if there is one.

    Exit codes: 0 done, 4 bad input, 125 a channel failed (the next `bumpgate notify` sends what is missing).
    """
    archive = Archive(store or default_store())
    if not (github or apprise):
        raise BumpgateError("name a channel: --github OWNER/REPOSITORY or --apprise")
    targets: list[Channel] = [channels.GitHubIssues(github, connect=not dry_run)] if github else []
    targets += channels.chats() if apprise else []
    home().mkdir(parents=True, exist_ok=True)
    with locked(home() / "notify", exclusive=True):  # another one of this user would send the same messages
        found = _prepare(archive, lane, bisect, keep=not dry_run)
        delivered = [_deliver(archive, channel, found, dry_run) for channel in targets]
    if not all(delivered):
        raise typer.Exit(FAILED)


def due(message: Message, before: Posted | None, updates: bool) -> str:
    """Return the event that a channel lacks: opened, reopened, updated or closed; "" if it lacks none."""
    if before is None:
        return "opened" if message.state == "open" else ""
    if before.state != message.state:
        return "closed" if message.state == "closed" else "reopened"
    return "updated" if updates and message.state == "open" and before.digest != message.digest else ""


def _prepare(archive: Archive, lane: str, bisect: Path | None, *, keep: bool) -> list[Message]:
    """Assign topics and a bisect's answer, store both if `keep`, and return all messages."""
    raw = _bisect(bisect) if bisect else None
    sql, tables = archive.sql, archive.tables
    known = archive.findings()
    new = assign(known)
    for one in known:
        one.topic = one.topic or new.get(one.key)
    with archive.transaction() as connection:
        stored = {row.topic: row.answer for row in connection.execute(sql.select(tables["topics"]))}
        # The answer to what is gone does not explain what comes later; only the last message has it.
        live = {one.topic for one in known if one.topic and not one.gone}
        answers = {topic: text for topic, text in stored.items() if topic in live}
        ended = {topic: text for topic, text in stored.items() if topic not in live}
        mine = [one for one in known if not lane or one.lane == lane]
        if raw is not None:
            answers |= dict.fromkeys(sorted(answered(raw, mine)), answer(raw))
        if keep:
            table = tables["findings"]
            for key, topic in new.items():
                connection.execute(sql.update(table).where(table.c.key == key).values(topic=topic))
            table = tables["topics"]
            connection.execute(sql.delete(table))
            if answers:
                rows = [{"topic": topic, "answer": text} for topic, text in answers.items()]
                connection.execute(sql.insert(table), rows)
    return messages(mine, ended | answers)


def _bisect(path: Path) -> dict[str, Any]:
    with one_fault(f"{path}: not a bisect.json that can be read"):
        raw = loads(path.read_text(encoding="utf-8"))
        answer(raw)
        answered(raw, ())
        return dict(raw)


def _waiting(
    archive: Archive, channel: Channel, found: Sequence[Message]
) -> list[tuple[Message, str, Posted | None]]:
    """Return what a channel lacks: message, event, and what it has of that topic."""
    table = archive.tables["posts"]
    with archive.transaction() as connection:
        rows = connection.execute(archive.sql.select(table).where(table.c.channel == channel.name))
        posts = {row.topic: Posted(row.state, row.digest, row.number, row.url) for row in rows}
    lacks = [(m, due(m, posts.get(m.topic), channel.updates), posts.get(m.topic)) for m in found]
    return [each for each in lacks if each[1]]


def _deliver(archive: Archive, channel: Channel, found: Sequence[Message], dry_run: bool) -> bool:
    """Send what a channel lacks, or print it; return False, with one line, at its first failure."""
    sql, table = archive.sql, archive.tables["posts"]
    waiting = _waiting(archive, channel, found)
    for sent, (message, event, before) in enumerate(waiting):
        if dry_run:
            typer.echo(f"{channel.name}: would be {event}: {message.title}\n{message.text}\n")
            continue
        try:
            posted = channels.send(channel, event, message, before)
        except ChannelError as error:
            left = len(waiting) - sent
            unsent = f"{left} message{'s' * (left != 1)} not sent: the next bumpgate notify sends them"
            typer.echo(f"bumpgate: {channel.name}: {error}; {unsent}", err=True)
            return False
        key = {"topic": message.topic, "channel": channel.name}
        with archive.transaction() as connection:
            connection.execute(sql.delete(table).filter_by(**key))
            connection.execute(sql.insert(table).values(**key, **vars(posted)))
        number = f" #{posted.number}" if posted.number else ""
        typer.echo(f"{channel.name}{number}: {event}: {message.title}")
    if not waiting:
        typer.echo(f"{channel.name}: nothing new")
    return True
