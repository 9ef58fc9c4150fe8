"""What proves that the function of a test ran and did not raise, whatever other plugins report."""

from __future__ import annotations

import functools
import inspect
import unittest
from collections.abc import Generator
from typing import Any

import pytest

# On a report whose phase raised an exception: the phase.
RAISED_PROPERTY = "bumpgate_raised"
NO_FAILURE = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Fail a test whose function was not called. An asynchronous one is called by a plugin of its own, which looks at
    the function.
    """
    function, called = pyfuncitem.obj, []
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return (yield)

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        called.append(True)
        return function(*args, **kwargs)

    pyfuncitem.obj = noted
    try:
        result = yield
    finally:
        pyfuncitem.obj = function
    if not called:
        pytest.fail("a plugin or conftest passed this test without calling its function", pytrace=False)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Mark the report of a phase that raised, before a wrapper of this hook can change its outcome."""
    item.user_properties[:] = [found for found in item.user_properties if found[0] != RAISED_PROPERTY]
    if call.excinfo and not isinstance(call.excinfo.value, NO_FAILURE):
        item.user_properties.append((RAISED_PROPERTY, call.when))
