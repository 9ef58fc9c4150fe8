"""HTTP requests to GitHub and to webhooks: repeated where that may help, one line without secrets if they fail."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bumpgate.core.errors import BumpgateError, one_line

if TYPE_CHECKING:
    import requests

ATTEMPTS = 3
SECONDS = 20.0  # for one answer
MAX_WAIT = 30.0  # seconds before another attempt, whatever the server requests
AGAIN = (429, 500, 502, 503, 504)
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Variables that hold a GitHub token, in this order.
GITHUB = ("BUMPGATE_GITHUB_TOKEN", "GITHUB_TOKEN")


class WebError(BumpgateError):
    """A request or a message that failed. again: whether another attempt may succeed at once."""

    def __init__(self, text: str, again: bool = False, wait: float = 0.0, status: int = 0) -> None:
        super().__init__(text)
        self.again, self.wait, self.status = again, wait, status


def secure(url: str, name: str) -> str:
    """Return an https URL, or any URL of this machine. Raises BumpgateError, without the URL."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
        valid = valid and bool(parts.hostname) and bool(re.fullmatch(r"[!-~]+", url)) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise BumpgateError(f"{name} is not an https URL")
    return url


def attempts(call: Callable[[], Any]) -> Any:
    """Call until it succeeds, at most ATTEMPTS times. Raises the last WebError."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except WebError as error:
            if not error.again or attempt == ATTEMPTS:
                raise
            time.sleep(min(max(error.wait, 2.0 ** (attempt - 1)), MAX_WAIT))
    raise AssertionError("not reached")


def http(
    name: str,
    method: str,
    url: str,
    content: Any,
    sign: Callable[[requests.PreparedRequest], requests.PreparedRequest],
) -> requests.Response:
    """Send one request. Raises WebError, which names only the host and the reason: the URL may be a secret."""
    import requests

    where = f"{name} ({urlsplit(url).hostname})"
    try:
        # `auth` also keeps requests from adding a password of ~/.netrc.
        with requests.Session() as session:
            headers = {"Accept": "application/vnd.github+json"} if name.startswith("github") else {}
            answer = session.request(
                method, url, json=content, headers=headers, auth=sign, timeout=SECONDS, allow_redirects=False
            )
    except requests.ConnectTimeout:
        raise WebError(f"{where}: no connection within {SECONDS:g} s", again=True) from None
    except requests.Timeout:
        raise WebError(f"{where}: no answer within {SECONDS:g} s") from None
    except requests.ConnectionError:
        raise WebError(f"{where}: no connection", again=True) from None
    except (requests.RequestException, ValueError) as error:
        raise WebError(f"{where}: {type(error).__name__}") from None
    if answer.ok and not answer.is_redirect:
        return answer
    limited = answer.status_code == 403 and (
        "Retry-After" in answer.headers or answer.headers.get("X-RateLimit-Remaining") == "0"
    )
    wait = answer.headers.get("Retry-After", "")
    raise WebError(
        f"{where}: {answer.status_code} {one_line(answer.reason, 60)}",
        again=answer.status_code in AGAIN or limited,
        wait=float(wait) if wait.isdecimal() else 0.0,
        status=answer.status_code,
    )
