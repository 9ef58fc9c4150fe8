"""Laws of the search core for any readings: independence of order, Bayes' rule, and termination."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bumpgate.bisect import search
from bumpgate.bisect.search import ProbeOutcome, Search
from tests.support.bisects import drive, labels, noisy

FIXED = settings(derandomize=True, max_examples=60, deadline=None)


@given(st.data())
@FIXED
def test_posterior_is_independent_of_the_outcome_order(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 12))
    readings = data.draw(
        st.lists(st.tuples(st.integers(0, n - 1), st.sampled_from(list(ProbeOutcome))), max_size=12)
    )
    shuffled = data.draw(st.permutations(readings))
    one, two = (Search(labels(n), labels(n)[0], labels(n)[-1], 0.1, 0.2) for _ in range(2))
    for (i, a), (j, b) in zip(readings, shuffled):
        one.record(i, a)
        two.record(j, b)
    assert one.posterior() == two.posterior()
    assert math.isclose(math.fsum(one.posterior()), 1.0)
    assert one.next() == two.next()


@given(st.integers(3, 40), st.data())
@FIXED
def test_posterior_matches_bayes_rule(n: int, data: st.DataObject) -> None:
    """Readings count unless the state has changed back: three times BAD alone, and later three times GOOD alone."""
    false_bad, false_good = data.draw(st.sampled_from([(0.1, 0.0), (0.1, 0.2), (0.0, 0.3)]))
    readings = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.booleans()), max_size=10))
    searched = Search(labels(n), labels(n)[0], labels(n)[-1], false_bad, false_good)
    for index, bad in readings:
        searched.record(index, ProbeOutcome.BAD if bad else ProbeOutcome.GOOD)
    overruled = searched._overruled()
    weights = []
    for first_bad in range(n + 1):
        doubt = search.END_DOUBT
        weight = doubt if first_bad in (0, n) else (1 - 2 * doubt) / (n - 1)
        for index, bad in (reading for reading in readings if reading[0] not in overruled):
            misread = false_good if index >= first_bad else false_bad
            weight *= 1 - misread if bad == (index >= first_bad) else misread
        weights.append(weight)
    total = math.fsum(weights)
    expected = [w / total if total else 0.0 for w in weights]
    assert searched.posterior() == pytest.approx(expected, abs=1e-12)


@given(st.data())
@FIXED
def test_every_search_ends_with_a_valid_answer(data: st.DataObject) -> None:
    """Noise, broken builds and missing verdicts together, for any stated noise."""
    n = data.draw(st.integers(2, 30))
    first_bad, dice = data.draw(st.integers(1, n - 1)), random.Random(data.draw(st.integers(0, 10**6)))
    stated = data.draw(st.sampled_from([(0.0, 0.0), (0.1, 0.0), (0.0, 0.2), (0.1, 0.1)]))
    broken = data.draw(st.frozensets(st.integers(0, n - 1), max_size=n // 2))
    read = noisy(first_bad, 0.1, 0.1, dice)
    searched = Search(labels(n), labels(n)[0], labels(n)[-1], *stated)
    states = {i: data.draw(st.sampled_from(["SKIP", "UNKNOWN"])) for i in sorted(broken)}
    result = drive(searched, lambda i: states.get(i) or read(i))
    assert result.found == bool(result.suspects)
    assert "\n" not in result.failure
    if result.found:
        assert result.posterior >= searched.confidence
        assert {*result.suspects[:-1]} <= broken
        assert 0 < result.suspects[0] <= result.suspects[-1] < n
