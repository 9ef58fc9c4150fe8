"""Text that UTF-8 can encode. A byte of a file name or variable that is not UTF-8 is a lone surrogate in a string."""

from __future__ import annotations

import json
import re
from typing import Any

LONE = re.compile("[\ud800-\udfff]")
ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


def encodable(text: str) -> str:
    """Return the text with each lone surrogate as its escape, so that it can be printed, written and stored."""
    return LONE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def loads(text: str | bytes) -> Any:
    """Parse JSON, and make all of its texts encodable."""
    raw = json.loads(text)
    if not ESCAPED.search(text if isinstance(text, str) else text.decode("latin-1")):
        return raw
    plain = json.dumps(raw, ensure_ascii=False)  # a surrogate is outside of ASCII, so only texts have one
    return json.loads(LONE.sub(lambda found: f"\\\\u{ord(found[0]):04x}", plain))


def is_line(text: object) -> bool:
    """Return whether a value is one line of text that UTF-8 can encode."""
    if not isinstance(text, str) or LONE.search(text):
        return False
    return bool(text.strip()) and len(text.splitlines()) == 1
