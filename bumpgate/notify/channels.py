"""Channels of messages: issues on GitHub, a Slack-compatible webhook, a command.

Tokens and webhook URLs come from the environment and never enter a message or an exception.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from bumpgate.core.errors import BumpgateError, one_line
from bumpgate.notify.topics import Message
from bumpgate.process.web import GITHUB, WebError, attempts, http, secure

if TYPE_CHECKING:
    import requests

HOOK_SECONDS = 60.0
LABEL = "bumpgate"
PAGES = 50  # of 100 issues
REPOSITORY = re.compile(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+")
SLACK = "BUMPGATE_SLACK_WEBHOOK"
SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|WEBHOOK")


@dataclass(frozen=True)
class Posted:
    """State of a topic in a channel. number, url: of its issue."""

    state: str
    digest: str
    number: int | None = None
    url: str | None = None


class Channel(Protocol):
    """name: identifies the channel in the history. updates: whether a message of an open topic is kept current."""

    name: str
    updates: bool

    def send(self, event: str, message: Message, before: Posted | None) -> Posted:
        """Deliver a message. event: opened, updated, reopened or closed. Raises WebError."""


def secrets() -> list[str]:
    """Return the values of environment variables that must not be printed."""
    found = [v for name, v in os.environ.items() if SECRET_NAMES.search(name) and len(v) >= 8]
    return [*found, *(urlsplit(v).path for v in found if v.startswith("http") and len(urlsplit(v).path) > 8)]


class GitHubIssues:
    """Issues of a repository. One issue per topic: created, kept current, closed, and opened again."""

    updates = True

    def __init__(self, repository: str) -> None:
        if not REPOSITORY.fullmatch(repository):
            raise BumpgateError(f"--github {repository!r}: expected OWNER/REPOSITORY")
        self.name = f"github:{repository}"
        base = secure(os.environ.get("GITHUB_API_URL") or "https://api.github.com", "GITHUB_API_URL")
        self._issues = f"{base.rstrip('/')}/repos/{repository}/issues"
        token = next((os.environ[name] for name in GITHUB if os.environ.get(name)), "").strip()
        if not token or not re.fullmatch(r"[!-~]+", token):
            raise BumpgateError(f"--github: put a token into the environment variable {GITHUB[0]}")
        self._token = token

    def send(self, event: str, message: Message, before: Posted | None) -> Posted:
        body = f"{_fenced(message.text)}\n\n{message.marker}"
        content: dict[str, Any] = {"title": message.title[:250], "body": body}
        if event in ("reopened", "closed"):
            content["state"] = "closed" if message.state == "closed" else "open"
        if before and before.number:
            try:
                made = self._call("PATCH", f"/{before.number}", content)
            except WebError as error:
                if error.status not in (404, 410):
                    raise
                if event == "closed":  # deleted by a user: nothing to close
                    return Posted(message.state, message.digest)
                made = self._create(message, content)
        else:
            made = self._create(message, content)
        return Posted(message.state, message.digest, int(made["number"]), str(made.get("html_url") or ""))

    def _create(self, message: Message, content: dict[str, Any]) -> Any:
        """Create an issue, unless an earlier attempt that was cut off has created it."""

        def once() -> Any:
            found = self._find(message.marker)
            if found is not None:
                return self._request("PATCH", f"/{found}", content)
            new = {k: v for k, v in content.items() if k != "state"} | {"labels": [LABEL]}
            return self._request("POST", "", new)

        return attempts(once)

    def _find(self, marker: str) -> int | None:
        for page in range(1, PAGES + 1):
            query = f"?state=all&labels={LABEL}&per_page=100&page={page}"
            issues = self._request("GET", query, None)
            for issue in issues:
                if marker in (issue.get("body") or ""):
                    return int(issue["number"])
            if len(issues) < 100:
                break
        return None

    def _call(self, method: str, path: str, content: Any) -> Any:
        return attempts(lambda: self._request(method, path, content))

    def _request(self, method: str, path: str, content: Any) -> Any:
        def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
            request.headers["Authorization"] = f"Bearer {self._token}"
            return request

        response = http(self.name, method, self._issues + path, content, sign)
        try:
            return response.json()
        except ValueError:
            raise WebError(f"{self.name}: the answer is not JSON") from None


class Slack:
    """A webhook that takes {"text": ...}. Reports when a topic opens, comes back and closes."""

    name = "slack"
    updates = False

    def __init__(self) -> None:
        self._url = os.environ.get(SLACK, "").strip()
        if not self._url:
            raise BumpgateError(f"--slack: put the webhook's URL into the environment variable {SLACK}")
        secure(self._url, SLACK)

    def send(self, event: str, message: Message, before: Posted | None) -> Posted:
        shown = message.text if message.state == "open" else message.text.splitlines()[0]
        shown = shown[:3000].replace("```", "'''")
        text = f"*{event}* {message.title}\n```{shown}```"
        for plain, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            text = text.replace(plain, escaped)
        attempts(lambda: http(self.name, "POST", self._url, {"text": text}, lambda request: request))
        return Posted(message.state, message.digest)


class Hook:
    """A command that reads one JSON object: event, topic, title, text, findings."""

    name = "hook"
    updates = False

    def __init__(self, command: str) -> None:
        try:
            self._argv = shlex.split(command)
        except ValueError as error:
            raise BumpgateError(f"--hook: not a command line ({one_line(error)})") from None
        if not self._argv:
            raise BumpgateError("--hook: name a command")

    def send(self, event: str, message: Message, before: Posted | None) -> Posted:
        content = {"event": event, "topic": message.topic, "title": message.title}
        payload = json.dumps(content | {"text": message.text, "findings": message.keys}) + "\n"
        program = self._argv[0]
        try:
            done = subprocess.run(
                self._argv,
                input=payload.encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=HOOK_SECONDS,
                check=False,
            )
        except OSError as error:
            raise WebError(f"hook {program}: cannot be started ({error.strerror})") from None
        except subprocess.TimeoutExpired:
            raise WebError(f"hook {program}: did not end within {HOOK_SECONDS:g} s") from None
        if done.returncode:
            raise WebError(f"hook {program}: exit code {done.returncode}")
        return Posted(message.state, message.digest)


def _fenced(text: str) -> str:
    """Format text as a code block, in which markup and mentions have no effect."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
