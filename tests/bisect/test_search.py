"""The search core: finds every place with the minimum number of probes, also with noise and broken builds."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import pytest

from bumpgate.bisect import search
from bumpgate.bisect.posterior import noises
from bumpgate.bisect.search import BAD, GOOD, SKIP, ProbeOutcome, Search, SearchError, SearchResult
from tests.support.bisects import RUNS, SIGNIFICANCE, drive, labels, noisy, tail

# Probes beyond log2(n), for 97 of 100 runs at 10 % false BAD: two endpoints, the loss of the noisy channel, and repeats
# until the answer is distinct from both neighbours at confidence 0.98. Measured: 12 suffices for 981 of 1000 runs at 60
# candidates, too close to 97 % to be shown with so few runs; 14 can be shown with 1000 runs.
MARGIN = 14


def over(n: int, *noise: float | None, **options: Any) -> Search:
    return Search(labels(n), labels(n)[0], labels(n)[-1], *noise, **options)


def estimating(n: int = 60) -> Search:
    """Return a search as the command creates it: misread rates estimated, the answer confirmed."""
    return over(n, None, None, confirm=2)


def from_(first_bad: int, skipped: Container[int] = (), state: str = "SKIP") -> Callable[[int], str]:
    """Return a test that is BAD from a candidate on, and has no verdict on some."""
    return lambda i: state if i in skipped else "BAD" if i >= first_bad else "GOOD"


def record(searched: Search, *readings: tuple[int, str]) -> SearchResult:
    """Record readings and return the result, which may be None."""
    for index, outcome in readings:
        searched.record(index, ProbeOutcome[outcome])
    return searched.result()  # type: ignore[return-value]


def test_misread_rates_considered_are_a_distribution() -> None:
    """Without a stated rate the search weighs pairs of rates: no misread first, and none worse than a coin."""
    pairs = noises(None, None)
    assert pairs[0] == ((0.0, 0.0), 0.6)
    assert math.fsum(weight for _, weight in pairs) == pytest.approx(1)
    rates = sorted({rate for pair, _ in pairs for rate in pair})
    assert (rates[0], rates[-1], len(pairs)) == (0.0, 0.5, len(rates) ** 2)
    assert noises(0.1, 0.2) == [((0.1, 0.2), 1.0)]
    assert {pair[0] for pair, _ in noises(0.1, None)} == {0.1}


def test_search_without_noise_uses_the_fewest_probes() -> None:
    """ceil(log2(places)) probes and the two endpoints: the minimum for any search."""
    for n in range(2, 65):
        bound = math.ceil(math.log2(n - 1)) + 2
        for first_bad in range(1, n):
            result = drive(over(n), from_(first_bad), limit=2 * bound)
            assert (result.suspects, result.last_old) == ((first_bad,), first_bad - 1), (n, first_bad, result)
            assert result.posterior == pytest.approx(1.0, abs=1e-12)
            assert result.probes <= bound, f"{n} candidates, first bad {first_bad}: {result.probes} > {bound}"


def simulate(
    n: int, false_bad: float, false_good: float, seed: int, count: int = RUNS, **options: Any
) -> list[tuple[int, SearchResult]]:
    """Return seeded runs, each with its own fault position: (first bad, result)."""
    dice = random.Random(seed)
    places = (dice.randrange(1, n) for _ in range(count))
    return [
        (k, drive(over(n, false_bad, false_good, **options), noisy(k, false_bad, false_good, dice)))
        for k in places
    ]


@pytest.mark.parametrize("n", [8, 60])
def test_search_with_10_percent_false_bad_finds_the_change(n: int) -> None:
    """10 % false BAD: right and within log2(n) + MARGIN in 97 % of all runs, by an exact binomial test."""
    runs = simulate(n, 0.1, 0.0, seed=n)
    within = sum(r.suspects == (k,) and r.probes <= math.log2(n) + MARGIN for k, r in runs)
    assert tail(within, RUNS, 0.97) < SIGNIFICANCE, f"{within} right within log2(n) + {MARGIN}"


def test_search_with_misreads_both_ways_within_a_budget() -> None:
    """10 % of all readings false, the answer forced after 20 probes and 2 endpoints: right in 95 % of all runs."""
    runs = simulate(60, 0.1, 0.1, seed=5, budget=22)
    right = sum(r.suspects == (k,) for k, r in runs)
    assert max(r.probes for _, r in runs) <= 22
    assert right >= 0.95 * RUNS
    # Uncertain answers are marked: posteriors are probabilities, checked against the rate of right answers.
    stated = math.fsum(r.posterior for _, r in runs)
    assert abs(stated - right) < 4 * math.sqrt(RUNS * 0.05), (stated, right)


def test_search_without_a_budget_reaches_its_confidence() -> None:
    right = sum(r.suspects == (k,) for k, r in simulate(60, 0.1, 0.1, seed=6, count=300))
    assert right >= 300 * 0.98 - 3 * math.sqrt(300 * 0.98 * 0.02)


@pytest.mark.parametrize("noise", [(0.0, 0.0), (0.1, 0.0), (0.1, 0.1)])
def test_steps_left_estimates_the_number_of_probes(noise: tuple[float, float]) -> None:
    probes = sum(result.probes for _, result in simulate(60, *noise, seed=11, count=150))
    assert 0.8 < 150 * over(60, *noise).steps_left() / probes < 1.25, probes / 150


def test_steps_left_is_exact_without_noise() -> None:
    searched, progress = over(33), []
    while searched.result() is None:
        progress.append(searched.progress())
        (index, *_) = searched.next()
        searched.record(index, GOOD if index < 9 else BAD)
    assert progress == [f"about {k} steps left" for k in (7, 6, 5, 4, 3, 2)] + ["about 1 step left"]
    assert searched.steps_left() == 0


def test_find_fix_finds_the_first_good_candidate() -> None:
    ends = {"good": labels(20)[-1], "bad": labels(20)[0], "find_fix": True}
    flip = {"GOOD": "BAD", "BAD": "GOOD"}
    for first_good in range(1, 20):
        result = drive(Search(labels(20), **ends), lambda i: flip[from_(first_good)(i)])  # noqa: B023
        assert result.suspects == (first_good,)
    # 10 % false BAD now affects the fixed side: the rates must have been swapped, too.
    dice, right = random.Random(8), 0
    for _ in range(200):
        first_good = dice.randrange(1, 20)
        read = noisy(first_good, 0.0, 0.1, dice)
        result = drive(Search(labels(20), **ends, false_bad=0.1), lambda i: flip[read(i)])  # noqa: B023
        right += result.suspects == (first_good,)
    assert right >= 190, right


EARLY, LATE = "the good endpoint 2.14.0.dev0002", "the bad endpoint 2.14.0.dev0007"


@pytest.mark.parametrize(
    ("read", "failure"),
    [
        (lambda i: "BAD", f"{EARLY} is BAD: name an earlier one"),
        (lambda i: "GOOD", f"{LATE} is GOOD: name a later one, or an earlier one if it has changed back"),
        (lambda i: "SKIP", f"{EARLY} was skipped: name another"),
        (lambda i: "UNKNOWN", f"{EARLY} gives no verdict: name another"),
        (lambda i: "SKIP" if i == 7 else "GOOD", f"{LATE} was skipped: name another"),
    ],
)
def test_endpoint_with_an_unexpected_outcome_ends_the_search(
    read: Callable[[int], str], failure: str
) -> None:
    searched = Search(labels(10), labels(10)[2], labels(10)[7])
    result = drive(searched, read)
    assert (result.failure, result.found, result.suspects, result.last_old) == (failure, False, (), None)
    assert searched.next() == []


def test_noisy_endpoint_is_repeated_and_a_wrong_one_refused() -> None:
    """False BADs at a good endpoint are repeated; at a truly bad one they end the search."""
    dice, right, wrong = random.Random(4), 0, 0
    for _ in range(200):
        right += drive(over(60, 0.1, 0.1), noisy(30, 0.1, 0.1, dice)).found
        wrong += drive(over(60, 0.1, 0.1), noisy(0, 0.1, 0.1, dice)).failure.startswith("the good endpoint")
    assert right >= 194, right
    assert wrong >= 190, wrong


MISREAD = [(0, "GOOD"), (8, "BAD"), *((i, "BAD" if i == 4 else "GOOD") for i in range(1, 7))]


@pytest.mark.parametrize(
    ("searched", "readings", "words"),
    [
        (over(9), [(8, "GOOD"), (0, "BAD")], "the endpoints look swapped"),
        (
            over(9),
            [(0, "GOOD"), (8, "BAD"), (3, "BAD"), (5, "GOOD")],
            "dev0003 reads BAD but 2.14.0.dev0005 reads GOOD: the probe is noisy (say how often: --false-bad",
        ),
        (over(9, 0.1, 0.1), [(0, "BAD"), (8, "BAD"), (0, "SKIP")], "dev0000 was skipped: name another"),
        (
            over(9, 0.01, 0.01, budget=13),
            [*MISREAD, (4, "BAD"), (6, "GOOD"), (4, "BAD"), (6, "GOOD"), (4, "GOOD"), (6, "GOOD")],
            "the probe is noisier than stated",
        ),
    ],
    ids=["swapped", "contradiction", "endpoint that stops installing", "more misreads than stated"],
)
def test_readings_that_allow_no_answer_end_the_search(
    searched: Search, readings: list[tuple[int, str]], words: str
) -> None:
    assert words in record(searched, *readings).failure


def test_confirm_reads_both_neighbours_twice() -> None:
    for first_bad in range(1, 60):
        searched = estimating()
        result = drive(searched, from_(first_bad))
        read = Counter(i for i, _ in searched.history)
        assert (result.suspects, result.confirmed, result.sure(0.98)) == ((first_bad,), True, True)
        assert min(read[first_bad - 1], read[first_bad]) >= 2
        assert result.probes <= 12


@pytest.mark.parametrize("first_bad", [2, 17, 30, 58])
@pytest.mark.parametrize("before", [0, 1])
def test_confirm_corrects_a_misread_neighbour(first_bad: int, before: int) -> None:
    """The first reading of one version near the change is false: its repeat shows it."""
    seen = Counter[int]()

    def read(index: int) -> str:
        seen[index] += 1
        return "BAD" if (index >= first_bad) != (index == first_bad - before and seen[index] == 1) else "GOOD"

    assert drive(estimating(), read).suspects == (first_bad,)


def test_misread_rates_are_estimated_from_repeats() -> None:
    searched = estimating(4)
    record(searched, (0, "GOOD"), (3, "BAD"))
    before = searched.noise()
    record(searched, *[(0, "GOOD")] * 6)
    assert searched.noise()[0] < before[0], "repeats that agree lower the rate"
    record(searched, *[(0, "BAD")] * 3)
    assert searched.noise()[0] > 0.2, "repeats that contradict each other raise it"


@pytest.mark.parametrize("find_fix", [False, True])
def test_stated_misread_rates_are_shown_as_stated(find_fix: bool) -> None:
    """False BAD first, also where the bad candidates come first."""
    good, bad = labels(4)[:: -3 if find_fix else 3]
    stated = Search(labels(4), good, bad, 0.1, 0.0, find_fix=find_fix)
    stated.record(0, BAD)
    assert stated.noise() == pytest.approx((0.1, 0.0))


def test_random_outcomes_end_unsure_within_patience() -> None:
    dice = random.Random(5)
    for _ in range(5):
        result = drive(estimating(), lambda i: dice.choice(["GOOD", "BAD"]))
        assert not result.sure(0.98)
        assert result.probes <= search.PATIENCE


def test_intermittent_fault_reports_its_last_change() -> None:
    """BAD from 10 to 33, GOOD to 41, BAD again; one version of each stretch has been read."""
    searched = estimating()
    record(searched, (0, "GOOD"), (59, "BAD"), (20, "BAD"), (40, "GOOD"))
    result = drive(searched, lambda i: "BAD" if 10 <= i < 34 or i >= 42 else "GOOD")
    assert (result.suspects, result.sure(0.98), result.misreads) == ((42,), True, 0)
    assert 20 in result.earlier
    assert all(10 <= i < 34 for i in result.earlier)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda i: "BAD", "the good endpoint 2.14.0.dev0000 is BAD"),
        (lambda i: "GOOD", "the bad endpoint 2.14.0.dev0059 is GOOD"),
        (lambda i: "GOOD" if i else "BAD", "the endpoints look swapped"),
    ],
)
def test_wrong_endpoint_is_refused_after_few_repeats(read: Callable[[int], str], words: str) -> None:
    result = drive(estimating(), read)
    assert words in result.failure
    assert result.probes == 4


def test_candidates_outside_the_endpoints_are_never_probed() -> None:
    searched = Search(labels(30), labels(30)[10], labels(30)[20])
    drive(searched, from_(13))
    assert all(10 <= i <= 20 for i, _ in searched.history)
    with pytest.raises(SearchError, match="does not lie between the ends"):
        searched.record(9, GOOD)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((["a", "b", "a"], "a", "b"), {}, "'a' is listed 2 times"),
        ((["a", "b"], "x", "b"), {}, "the good endpoint 'x' is not one of the 2"),
        ((["a", "b"], "a", "x"), {}, "the bad endpoint 'x' is not one of the 2"),
        ((["a", "b"], "a", "a"), {}, "named as good and as bad"),
        ((["a", "b"], "b", "a"), {}, "swap them"),
        ((["a", "b"], "a", "b"), {"find_fix": True}, "swap them"),
        ((["a", "b"], "a", "b", 0.5), {}, "false_bad must lie"),
        ((["a", "b"], "a", "b", 0.0, -0.1), {}, "false_good must lie"),
        ((["a", "b"], "a", "b", math.nan), {}, "false_bad must lie"),
        ((["a", "b"], "a", "b", 0.0, 0.0, 1.0), {}, "confidence must lie"),
        ((["a", "b"], "a", "b"), {"budget": 1}, "does not reach both endpoints"),
    ],
    ids=str,
)
def test_invalid_search_is_refused_in_one_line(
    arguments: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(SearchError, match=words) as caught:
        Search(*arguments, **options)
    assert "\n" not in str(caught.value)


# Builds that cannot be probed: the search jumps over them, and reports a range next to the change.


def test_broken_builds_next_to_the_change_give_a_range() -> None:
    """Every run of up to four broken builds, with every fault position: the answer is as exact as possible."""
    n = 18
    runs = [range(a, min(b, n - 1)) for a in range(1, n - 1) for b in range(a + 1, min(a + 5, n))]
    for first_bad in range(1, n):
        for broken in runs:
            result = drive(over(n), from_(first_bad, broken), limit=40)
            low, high = first_bad, first_bad
            while low - 1 in broken:
                low -= 1
            while high in broken:
                high += 1
            assert result.suspects == tuple(range(low, high + 1)), (first_bad, broken, result)
            assert result.last_old == low - 1


def test_search_jumps_over_a_long_run_of_broken_builds() -> None:
    """20 nights in the middle of 60 are broken, and the fault is elsewhere: few failed installs, on average."""
    taken = []
    for first_bad in (*range(1, 20), *range(41, 60)):
        searched = over(60)
        assert drive(searched, from_(first_bad, range(20, 40))).suspects == (first_bad,)
        taken.append(sum(outcome is SKIP for _, outcome in searched.history))
    assert sum(taken) / len(taken) <= 4


def test_candidate_without_a_verdict_is_set_aside() -> None:
    """UNKNOWN is read again; OTHER counts neither as BAD nor as GOOD. The answer is a range."""
    searched = over(4)
    assert drive(searched, from_(2, (1,), "UNKNOWN")).suspects == (1, 2)
    assert [i for i, _ in searched.history].count(1) == search.UNKNOWN_LIMIT
    result = drive(estimating(10), from_(6, (4, 5), "OTHER"))
    assert (result.suspects, result.last_old) == ((4, 5, 6), 3)


def test_skips_use_up_no_budget() -> None:
    skips = ((i, "SKIP") for i in (2, 3, 5, 6))
    assert record(over(9, 0.1, 0.1, budget=6), (0, "GOOD"), (8, "BAD"), *skips) is None, "two readings of six"


def test_verdict_before_a_skip_still_counts() -> None:
    readings = ((0, "GOOD"), (4, "BAD"), (2, "GOOD"), (2, "SKIP"), (3, "SKIP"))
    assert record(over(5), *readings).suspects == (3, 4)
