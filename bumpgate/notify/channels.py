"""Channels of messages: issues on GitHub through PyGithub, and every service that apprise knows.

Tokens and URLs come from the environment and never enter a message or an exception.
"""

from __future__ import annotations

import hashlib
import http
import logging
import os
import re
import time
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from bumpgate.core.errors import BumpgateError, need, one_line
from bumpgate.notify.topics import Message

LABEL = "bumpgate"
REPOSITORY = re.compile(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+")
URLS = "BUMPGATE_APPRISE_URLS"
# Variables that hold a GitHub token, in this order.
TOKENS = ("BUMPGATE_GITHUB_TOKEN", "GITHUB_TOKEN")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
SECONDS = 20  # for one answer
WAITS = (1.0, 2.0)  # seconds before another attempt
TRANSIENT = (429, 500, 502, 503, 504)
MAX_CHAT = 3000  # characters


class ChannelError(BumpgateError):
    """A message that was not delivered. again: whether another attempt may succeed at once."""

    def __init__(self, text: str, again: bool = True) -> None:
        super().__init__(text)
        self.again = again


@dataclass(frozen=True)
class Posted:
    """State of a topic in a channel, and its issue."""

    state: str
    digest: str
    number: int | None = None
    url: str | None = None


class Channel(Protocol):
    """name: identifies the channel in the history. updates: whether a message of an open topic is kept current."""

    name: str
    updates: bool

    def send(self, event: str, message: Message, before: Posted | None) -> Posted:
        """Deliver a message once. event: opened, updated, reopened or closed. Raises ChannelError."""


def send(channel: Channel, event: str, message: Message, before: Posted | None) -> Posted:
    """Deliver a message, in at most three attempts. Raises ChannelError."""
    for wait in WAITS:
        try:
            return channel.send(event, message, before)
        except ChannelError as error:
            if not error.again:
                raise
        time.sleep(wait)
    return channel.send(event, message, before)


class GitHubIssues:
    """Issues of a repository. One issue per topic: created, kept current, closed, and opened again."""

    updates = True

    def __init__(self, repository: str, *, connect: bool = True) -> None:
        if not REPOSITORY.fullmatch(repository):
            raise BumpgateError(f"--github {repository!r}: expected OWNER/REPOSITORY")
        self.name = f"github:{repository}"
        if not connect:
            return
        base = os.environ.get("GITHUB_API_URL") or "https://api.github.com"
        parts = urlsplit(base)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
            raise BumpgateError("GITHUB_API_URL is not an https URL")
        token = next((os.environ[name] for name in TOKENS if os.environ.get(name)), "").strip()
        if not token or not re.fullmatch(r"[!-~]+", token):
            raise BumpgateError(f"--github: put a token into the environment variable {TOKENS[0]}")
        self._github: Any = need("github", command="--github", extra="notify")
        _silence("github")
        # A request that is repeated on its own could create an issue twice.
        options = {"base_url": base.rstrip("/"), "timeout": SECONDS, "retry": None, "lazy": True}
        client = self._github.Github(auth=self._github.Auth.Token(token), **options)
        self._repository = client.get_repo(repository)

    def send(self, event: str, message: Message, before: Posted | None) -> Posted:
        try:
            made = self._write(event, message, before.number if before else None)
        except self._github.GithubException as error:
            phrase = http.HTTPStatus(error.status).phrase if error.status in [*http.HTTPStatus] else ""
            raise ChannelError(f"{error.status} {phrase}".strip(), again=error.status in TRANSIENT) from None
        except (OSError, RuntimeError) as error:  # of requests; of PyGithub, for a redirect to another host
            raise ChannelError(_reason(error), again=isinstance(error, OSError)) from None
        number, url = (made.number, made.html_url) if made else (None, None)
        return Posted(message.state, message.digest, number, url)

    def _write(self, event: str, message: Message, number: int | None) -> Any:
        """Return the issue; None if a user deleted the issue that is to be closed."""
        content: dict[str, Any] = {"title": message.title[:250]}
        content["body"] = f"{fenced(message.text)}\n\n{message.marker}"
        state = {"state": message.state} if event in ("reopened", "closed") else {}
        if number:
            try:
                issue = self._repository.get_issue(number)
                issue.edit(**content, **state)
                return issue
            except self._github.GithubException as error:
                if error.status not in (404, 410):
                    raise
            if event == "closed":
                return None
        issue = self._find(message.marker)
        if issue is None:
            made = self._repository.create_issue(**content, labels=[LABEL])
            if made.number is None:  # PyGithub takes a redirect for an answer
                raise ChannelError("the answer is not an issue", again=False)
            return made
        issue.edit(**content, **state)
        return issue

    def _find(self, marker: str) -> Any:
        """Return the issue that an attempt without an answer has created; None if there is none."""
        issues = self._repository.get_issues(state="all", labels=[LABEL])
        return next((issue for issue in issues if marker in (issue.body or "")), None)


class Chat:
    """One URL of apprise. Reports when a topic opens, comes back and closes."""

    updates = False

    def __init__(self, url: str, place: str) -> None:
        apprise = need("apprise", command="--apprise", extra="notify")
        _silence("apprise")
        self._client = apprise.Apprise()
        if not self._client.add(url):
            raise BumpgateError(f"{place} is not a URL of apprise: see https://github.com/caronc/apprise")
        service = str(self._client[0].url(privacy=True)).partition(":")[0]
        self.name = f"{service}:{hashlib.sha256(url.encode()).hexdigest()[:8]}"

    def send(self, event: str, message: Message, before: Posted | None) -> Posted:
        text = message.text if message.state == "open" else message.text.splitlines()[0]
        if not self._client.notify(title=f"{event}: {message.title}", body=fenced(text[:MAX_CHAT])):
            raise ChannelError("not delivered")
        return Posted(message.state, message.digest)


def chats() -> list[Chat]:
    """Return a channel for each URL of the environment. Raises BumpgateError, without the URL."""
    urls = os.environ.get(URLS, "").split()
    if not urls:
        raise BumpgateError(f"--apprise: put the channels' URLs into the environment variable {URLS}")
    return [Chat(url, f"URL {n} of {URLS}") for n, url in enumerate(urls, 1)]


def fenced(text: str) -> str:
    """Format text as a code block, in which markup and mentions have no effect."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _reason(error: Exception) -> str:
    """Return the cause of a request's failure. The text of the exception may have a URL."""
    import requests

    if isinstance(error, requests.Timeout):
        return f"no answer within {SECONDS} s"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    return "redirected to another host" if "redirected" in str(error) else one_line(type(error).__name__)


def _silence(name: str) -> None:
    """Keep a library from printing: its messages may have URLs, and failures are one line of ours."""
    logging.getLogger(name).addHandler(logging.NullHandler())
    logging.getLogger(name).propagate = False
