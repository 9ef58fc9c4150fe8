"""Hooks that a conftest of a repository may implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def pytest_bumpgate_canaries() -> Mapping[str, Callable[[], None]]:  # type: ignore[empty-body]
    """Return further canaries by name, for the tests below this conftest.

    A canary is a function that raises if its instrument does not read a known count.
    """
