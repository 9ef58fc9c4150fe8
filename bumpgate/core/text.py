"""Makes the text of others safe to print, write and store: no control characters, and no secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

# Control characters except newline and tab, characters that change the direction of text, and lone surrogates, which
# stand for a byte of a file name or a variable that is not UTF-8.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Variables whose values are secrets, unless they name a file.
SECRET_NAMES = re.compile(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|WEBHOOK|API_?KEY|ACCESS_KEY)S?(?:_(?!FILE|PATH|DIR)|$)|APPRISE_URLS"
)
SHORTEST_SECRET = 8
WORDS = r"password|passwd|pwd|token|secret|signature|api_?key|credential"
IN_TEXT = (
    (re.compile(r"""(?<=//)[^/\s"'\\<>]*@"""), ""),  # user name and password of a URL
    (re.compile(rf"""([?&;][^=&\s"']*(?:{WORDS})[^=&\s"']*=)[^&\s"'\\#]+""", re.I), r"\1***"),
    (re.compile(r"""(\b(?:PG)?passw(?:or)?d=)[^&\s"'\\;,]+""", re.I), r"\1***"),  # a data source name
)


def some(lines: Sequence[str], shown: int = 3) -> str:
    """Return the first few lines, separated by commas, and how many more there are."""
    more = f" and {len(lines) - shown} more" if len(lines) > shown else ""
    return f"{', '.join(lines[:shown])}{more}"


def printable(text: str) -> str:
    """Return the text with each character that a terminal would obey, or UTF-8 cannot encode, as its escape."""
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def redacted(text: str) -> str:
    """Return the text without the user names of URLs, with `***` for passwords and this process's secrets."""
    for secret in _secrets():
        text = text.replace(secret, "***")
    for pattern, replacement in IN_TEXT:
        text = pattern.sub(replacement, text)
    return text


def _secrets() -> list[str]:
    """Return the values of secret variables, their words, and the paths of URLs in them; the longest first."""
    values = [value for name, value in os.environ.items() if SECRET_NAMES.search(name)]
    parts = [part for value in values for part in (value, *value.split())]
    parts += [path for part in parts if (path := _path(part))]
    return sorted({part for part in parts if len(part) >= SHORTEST_SECRET}, key=len, reverse=True)


def _path(text: str) -> str:
    try:
        return urlsplit(text).path if "://" in text else ""
    except ValueError:
        return ""


def clock(seconds: float) -> str:
    """Format seconds as minutes and seconds: 3:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
