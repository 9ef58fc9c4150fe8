"""GitHub's issues API and a webhook of apprise (json://) on loopback, as far as `bumpgate notify` uses them.

with FakeServices() as services:
    services.url        # GITHUB_API_URL; f"{services.url}/hook/SECRET" is the webhook
    services.issues     # by number, as GitHub returns them
    services.texts      # of webhook messages, in order
    services.answers    # statuses of the next requests that change something; then requests succeed again
    services.lost = 1   # so many requests are carried out and answered with 502
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.loopback import Loopback


@dataclass
class FakeServices(Loopback):
    issues: dict[int, dict[str, Any]] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    lost: int = 0
    requests: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def changes(self) -> list[str]:
        return [request for request in self.requests if not request.startswith("GET")]

    def __enter__(self) -> FakeServices:
        services = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                content = json.loads(self.rfile.read(length) or b"null")
                services.headers.append(dict(self.headers))
                status, body = services._answer(self.command, self.path, content)
                payload = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                if status in (301, 307):
                    self.send_header(
                        "Location", f"http://localhost:{self.server.server_address[1]}/elsewhere"
                    )
                self.end_headers()
                self.wfile.write(payload)

            def do_GET(self) -> None:
                self.answer()

            def do_POST(self) -> None:
                self.answer()

            def do_PATCH(self) -> None:
                self.answer()

            def log_message(self, *args: object) -> None:
                """Suppress logging."""

        self.serve(Handler)
        return self

    def _answer(self, method: str, path: str, content: Any) -> tuple[int, Any]:
        self.requests.append(f"{method} {path}")
        parts = urlsplit(path)
        names = parts.path.strip("/").split("/")
        if method != "GET" and self.answers:
            return self.answers.pop(0), {"message": f"planted, for {path}"}
        if names[0] == "hook":
            self.texts.append(f"{content['title']}\n{content['message']}")
            return 200, b"ok"
        if names[:1] != ["repos"] or names[3:4] != ["issues"]:
            return 404, {"message": "Not Found"}
        if method == "GET" and names[4:]:
            number = int(names[4])
            return (200, self.issues[number]) if number in self.issues else (410, {"message": "deleted"})
        if method == "GET":
            page = int(parse_qs(parts.query).get("page", ["1"])[0])
            return 200, list(self.issues.values())[100 * (page - 1) : 100 * page]
        if method == "POST":
            number = len(self.issues) + 1
            url = f"{self.url}/repos/{names[1]}/{names[2]}/issues/{number}"
            self.issues[number] = {"number": number, "url": url, "html_url": url, "state": "open", **content}
        else:
            number = int(names[4])
            if number not in self.issues:
                return 410, {"message": "This issue was deleted"}
            self.issues[number].update(content)
        if self.lost:
            self.lost -= 1
            return 502, {"message": "Bad gateway"}
        return 201 if method == "POST" else 200, self.issues[number]
