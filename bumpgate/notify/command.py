"""`bumpgate notify`: brings the channels up to date with the findings of the history.

The state of a channel is stored when it has confirmed a message, so a failed message is sent by the next call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock

from bumpgate.core.errors import BumpgateError, loads, one_line
from bumpgate.history.archive import Archive, default_store
from bumpgate.notify import channels
from bumpgate.notify.channels import Channel, GitHubIssues, Hook, Posted, Slack
from bumpgate.notify.topics import Message, answer, answered, assign, messages
from bumpgate.process.home import home
from bumpgate.process.web import WebError

FAILED = 125


def command(
    lane: Annotated[str, typer.Option(help="Only this lane's findings.")] = "",
    github: Annotated[
        str, typer.Option(help="OWNER/REPOSITORY for issues; the token is in BUMPGATE_GITHUB_TOKEN.")
    ] = "",
    slack: Annotated[bool, typer.Option("--slack", help="The webhook in BUMPGATE_SLACK_WEBHOOK.")] = False,
    hook: Annotated[str, typer.Option(help="A command that reads one message as JSON.")] = "",
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
    if not (github or slack or hook):
        raise BumpgateError("name a channel: --github OWNER/REPOSITORY, --slack or --hook CMD")
    if dry_run:
        _preview(
            archive,
            lane,
            bisect,
            [f"github:{github}"] * bool(github) + ["slack"] * slack + ["hook"] * bool(hook),
        )
        return
    targets: list[Channel] = []
    targets += [GitHubIssues(github)] if github else []
    targets += [Slack()] if slack else []
    targets += [Hook(hook)] if hook else []
    with _alone():
        found = _prepare(archive, lane, bisect)
        failed = [not _deliver(archive, channel, found) for channel in targets]
    if any(failed):
        raise typer.Exit(FAILED)


def due(message: Message, before: Posted | None, updates: bool) -> str:
    """Return the event that a channel lacks: opened, reopened, updated or closed; "" if it lacks none."""
    if before is None:
        return "opened" if message.state == "open" else ""
    if before.state != message.state:
        return "closed" if message.state == "closed" else "reopened"
    return "updated" if updates and message.state == "open" and before.digest != message.digest else ""


def _prepare(archive: Archive, lane: str, bisect: Path | None, keep: bool = True) -> list[Message]:
    """Assign topics and a bisect's answer, store both if `keep`, and return all messages."""
    raw = _bisect(bisect) if bisect else None
    known = archive.findings()
    new = assign(known)
    for one in known:
        one.topic = one.topic or new.get(one.key)
    tables, sql = archive.tables, archive.sql
    with archive.transaction() as connection:
        stored = {row.topic: row.answer for row in connection.execute(sql.select(tables["topics"]))}
        # The answer to what is gone does not explain what comes later; only the last message has it.
        live = {one.topic for one in known if one.topic and not one.gone}
        answers = {topic: text for topic, text in stored.items() if topic in live}
        ended = {topic: text for topic, text in stored.items() if topic not in live}
        if raw is not None:
            shown = [one for one in known if not lane or one.lane == lane]
            answers |= dict.fromkeys(sorted(answered(raw, shown)), answer(raw))
        if keep:
            table = tables["findings"]
            for key, topic in new.items():
                connection.execute(sql.update(table).where(table.c.key == key).values(topic=topic))
            table = tables["topics"]
            for topic in ended:
                connection.execute(sql.delete(table).where(table.c.topic == topic))
            for topic, text in answers.items():
                if stored.get(topic) != text:
                    connection.execute(sql.delete(table).where(table.c.topic == topic))
                    connection.execute(sql.insert(table).values(topic=topic, answer=text))
    mine = [one for one in known if not lane or one.lane == lane]
    return messages(mine, ended | answers, channels.secrets())


def _bisect(path: Path) -> dict[str, Any]:
    try:
        raw = loads(path.read_text(encoding="utf-8"))
        answer(raw)
        answered(raw, ())
    except OSError as error:
        raise BumpgateError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BumpgateError(f"{path}: not a bisect.json ({one_line(error, 80)})") from None
    return dict(raw)


def _posts(archive: Archive, channel: str) -> dict[str, Posted]:
    table = archive.tables["posts"]
    with archive.transaction() as connection:
        rows = connection.execute(archive.sql.select(table).where(table.c.channel == channel))
        return {row.topic: Posted(row.state, row.digest, row.number, row.url) for row in rows}


def _keep(archive: Archive, channel: str, topic: str, posted: Posted) -> None:
    sql, table = archive.sql, archive.tables["posts"]
    with archive.transaction() as connection:
        connection.execute(sql.delete(table).where(table.c.topic == topic, table.c.channel == channel))
        connection.execute(sql.insert(table).values(topic=topic, channel=channel, **vars(posted)))


def _deliver(archive: Archive, channel: Channel, found: Sequence[Message]) -> bool:
    """Send what a channel lacks; return False, with one line, at its first failure."""
    posts = _posts(archive, channel.name)
    waiting = [(m, event) for m in found if (event := due(m, posts.get(m.topic), channel.updates))]
    for sent, (message, event) in enumerate(waiting):
        try:
            posted = channel.send(event, message, posts.get(message.topic))
        except WebError as error:
            left = len(waiting) - sent
            typer.echo(
                f"bumpgate: {error}; {left} message{'s' * (left != 1)} not sent: the next bumpgate notify sends them",
                err=True,
            )
            return False
        _keep(archive, channel.name, message.topic, posted)
        number = f" #{posted.number}" if posted.number else ""
        typer.echo(f"{channel.name}{number}: {event}: {message.title}")
    if not waiting:
        typer.echo(f"{channel.name}: nothing new")
    return True


def _preview(archive: Archive, lane: str, bisect: Path | None, names: Sequence[str]) -> None:
    found = _prepare(archive, lane, bisect, keep=False)
    for name in names:
        posts = _posts(archive, name)
        waiting = [
            (m, event) for m in found if (event := due(m, posts.get(m.topic), name.startswith("github")))
        ]
        for message, event in waiting:
            typer.echo(f"{name}: would be {event}: {message.title}\n{message.text}\n")
        if not waiting:
            typer.echo(f"{name}: nothing new")


@contextmanager
def _alone() -> Iterator[None]:
    """Wait for another `bumpgate notify` of this user: both would send the same messages."""
    folder = home()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "notify.lock"):
        yield
