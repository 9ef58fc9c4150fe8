"""Fixtures of the ops' suites: assertion rewriting for shared checks, one thread, and poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("suites.support.comparison", "suites.support.custom_ops")


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: these sizes gain nothing from more, and are ten times slower with more on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill uninitialized memory with NaN (for integers the largest value), so that a missing write is detected.

    Timed tests do not fill it, because that would be timed.
    """
    import torch

    if "exclusive_machine" in request.fixturenames:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills only while this is enabled
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
