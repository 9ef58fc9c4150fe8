"""The lanes of a repository, and the lane of a run and of a test."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches

import pytest

from bumpgate.core.lanes import Lane, LaneError, how_to_declare, is_foreign, load

# On the configuration: set by the session of the lane once it has judged the run: whether it is green.
GREEN = pytest.StashKey[bool]()
LANES = pytest.StashKey[Mapping[str, Lane]]()


def lanes_of(config: pytest.Config) -> Mapping[str, Lane]:
    """Return the lanes that the repository declares, by name. Raises UsageError on an invalid declaration."""
    if LANES not in config.stash:
        try:
            config.stash[LANES] = load(config.rootpath)
        except LaneError as error:
            raise pytest.UsageError(str(error)) from None
    return config.stash[LANES]


def lane_of(item: pytest.Item) -> str | None:
    """Return the lane whose marker an item has, the one that -m names if it has several; None without one."""
    marked = [name for name in lanes_of(item.config) if item.get_closest_marker(name)]
    chosen = named_lanes(item.config)
    return next((name for name in marked if name in chosen), marked[0] if marked else None)


def chosen_lane(config: pytest.Config) -> str | None:
    """Return the lane that -m selects, or None.

    Raises UsageError on two lanes, and on a name that is not a marker. In another repository only under --gate: its
    tests may have markers that it does not declare.
    """
    expression = config.option.markexpr
    if (why := unknown_marker(config)) and (config.option.gate or not is_foreign(config.rootpath)):
        raise pytest.UsageError(f"-m {expression}: {why}")
    chosen = named_lanes(config)
    if len(chosen) > 1:
        raise pytest.UsageError(f"-m {expression}: one lane a run, pick one of {', '.join(chosen)}")
    return chosen[0] if chosen else None


def unknown_marker(config: pytest.Config) -> str:
    """Return why -m may select nothing: its first name that is no declared marker; "" without one."""
    unknown = sorted(_names(config.option.markexpr) - markers(config))
    if not unknown:
        return ""
    close = get_close_matches(unknown[0], lanes_of(config), 1)
    fix = f"did you mean -m {close[0]}?" if close else how_to_declare(unknown[0])
    return f"no marker {unknown[0]!r}; lanes: {', '.join(lanes_of(config))}; {fix}"


def markers(config: pytest.Config) -> set[str]:
    """Return the names of the declared markers."""
    return {re.split(r"[:(]", line)[0].strip() for line in config.getini("markers")}


def _names(expression: str) -> set[str]:
    """Return the markers that an expression of -m names."""
    expression = re.sub(r"\([^()]*=[^()]*\)", "", expression)
    return set(re.findall(r"[\w:+\-.\[\]\\/]+", expression)) - {"and", "or", "not"}


def named_lanes(config: pytest.Config, expression: str | None = None) -> list[str]:
    """Return the lanes that -m names, without those that it excludes. expression: by default the parsed one."""
    expression = config.option.markexpr if expression is None else expression
    required = _names(re.sub(r"\bnot\b\s*(\([^()]*\)|\w+)", "", expression))
    return [name for name in lanes_of(config) if name in required]
