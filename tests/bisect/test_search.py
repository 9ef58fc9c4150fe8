"""The search core: finds every place with the minimum number of probes, also with noise and broken builds."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from bumpgate.bisect import search
from bumpgate.bisect.journal import BisectPlan
from bumpgate.bisect.posterior import noises
from bumpgate.bisect.search import ProbeOutcome, Search, SearchError, SearchResult, batch
from tests.support.searching import RUNS, SIGNIFICANCE, drive, labels, noisy, tail

# Probes beyond log2(n), for 97 of 100 runs at 10 % false BAD: two endpoints, the loss of the noisy channel, and repeats
# until the answer is distinct from both neighbours at confidence 0.98. Measured: 12 suffices for 981 of 1000 runs at 60
# candidates, too close to 97 % to be shown with so few runs; 14 can be shown with 1000 runs.
MARGIN = 14


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
            searched = Search(labels(n), labels(n)[0], labels(n)[-1])
            result = drive(searched, lambda i: "BAD" if i >= first_bad else "GOOD", limit=2 * bound)  # noqa: B023
            assert (result.suspects, result.last_old) == ((first_bad,), first_bad - 1), (n, first_bad, result)
            assert result.posterior == pytest.approx(1.0, abs=1e-12)
            assert result.probes <= bound, f"{n} candidates, first bad {first_bad}: {result.probes} > {bound}"


def simulate(
    n: int, false_bad: float, false_good: float, seed: int, count: int = RUNS, **options: Any
) -> list[tuple[int, SearchResult]]:
    """Return seeded runs, each with its own fault position: (first bad, result)."""
    dice = random.Random(seed)
    runs = []
    for _ in range(count):
        first_bad = dice.randrange(1, n)
        searched = Search(labels(n), labels(n)[0], labels(n)[-1], false_bad, false_good, **options)
        runs.append((first_bad, drive(searched, noisy(first_bad, false_bad, false_good, dice))))
    return runs


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
    count = 300
    runs = simulate(60, 0.1, 0.1, seed=6, count=count)
    right = sum(r.suspects == (k,) for k, r in runs)
    assert right >= count * 0.98 - 3 * math.sqrt(count * 0.98 * 0.02)


def test_steps_left_estimates_the_number_of_probes() -> None:
    for false_bad, false_good in ((0.0, 0.0), (0.1, 0.0), (0.1, 0.1)):
        dice = random.Random(11)
        estimates, probes = [], []
        for _ in range(150):
            first_bad = dice.randrange(1, 60)
            searched = Search(labels(60), labels(60)[0], labels(60)[-1], false_bad, false_good)
            estimates.append(searched.steps_left())
            probes.append(drive(searched, noisy(first_bad, false_bad, false_good, dice)).probes)
        assert 0.8 < sum(estimates) / sum(probes) < 1.25, (
            false_bad,
            false_good,
            sum(estimates) / 150,
            sum(probes) / 150,
        )


def test_steps_left_is_exact_without_noise() -> None:
    searched = Search(labels(33), labels(33)[0], labels(33)[-1])
    progress = []
    while searched.result() is None:
        progress.append(searched.progress())
        searched.record(searched.next()[0], ProbeOutcome.GOOD if searched.next()[0] < 9 else ProbeOutcome.BAD)
    assert progress == [f"about {k} steps left" for k in (7, 6, 5, 4, 3, 2)] + ["about 1 step left"]
    assert searched.steps_left() == 0


def test_find_fix_finds_the_first_good_candidate() -> None:
    for first_good in range(1, 20):
        searched = Search(labels(20), good=labels(20)[-1], bad=labels(20)[0], find_fix=True)
        result = drive(searched, lambda i: "GOOD" if i >= first_good else "BAD")  # noqa: B023
        assert result.suspects == (first_good,)
    # 10 % false BAD now affects the fixed side: the rates must have been swapped, too.
    dice = random.Random(8)
    right = 0
    for _ in range(200):
        first_good = dice.randrange(1, 20)
        searched = Search(labels(20), labels(20)[-1], labels(20)[0], false_bad=0.1, find_fix=True)
        flipped = noisy(first_good, 0.0, 0.1, dice)
        result = drive(searched, lambda i: "GOOD" if flipped(i) == "BAD" else "BAD")  # noqa: B023
        right += result.suspects == (first_good,)
    assert right >= 190, right


@pytest.mark.parametrize(
    ("read", "failure"),
    [
        (lambda i: "BAD", "the good endpoint 2.14.0.dev0002 is BAD: name an earlier one"),
        (
            lambda i: "GOOD",
            "the bad endpoint 2.14.0.dev0007 is GOOD: name a later one, or an earlier one if it has changed back",
        ),
        (lambda i: "SKIP", "the good endpoint 2.14.0.dev0002 was skipped: name another"),
        (lambda i: "UNKNOWN", "the good endpoint 2.14.0.dev0002 gives no verdict: name another"),
        (
            lambda i: "SKIP" if i == 7 else "GOOD",
            "the bad endpoint 2.14.0.dev0007 was skipped: name another",
        ),
    ],
)
def test_endpoint_with_an_unexpected_outcome_ends_the_search(
    read: Callable[[int], str], failure: str
) -> None:
    searched = Search(labels(10), labels(10)[2], labels(10)[7])
    result = drive(searched, read)
    assert (result.failure, result.found, result.suspects, result.last_old) == (failure, False, (), None)
    assert searched.next() == []


def test_endpoint_that_stops_installing_ends_the_search() -> None:
    searched = Search(labels(9), labels(9)[0], labels(9)[8], 0.1, 0.1)
    for index, outcome in ((0, "BAD"), (8, "BAD"), (0, "SKIP")):
        searched.record(index, ProbeOutcome[outcome])
    result = searched.result()
    assert result is not None
    assert result.failure == "the good endpoint 2.14.0.dev0000 was skipped: name another"


def test_noisy_endpoint_is_repeated_and_a_wrong_one_refused() -> None:
    """False BADs at a good endpoint are repeated; at a truly bad one they end the search."""
    ended = {"right": 0, "wrong": 0}
    dice = random.Random(4)
    for _ in range(200):
        right = drive(Search(labels(60), labels(60)[0], labels(60)[-1], 0.1, 0.1), noisy(30, 0.1, 0.1, dice))
        wrong = drive(Search(labels(60), labels(60)[0], labels(60)[-1], 0.1, 0.1), noisy(0, 0.1, 0.1, dice))
        ended["right"] += right.found
        ended["wrong"] += wrong.failure.startswith("the good endpoint")
    assert ended["right"] >= 194, ended
    assert ended["wrong"] >= 190, ended


def test_contradictory_outcomes_end_the_search() -> None:
    swapped = Search(labels(9), labels(9)[0], labels(9)[8])
    swapped.record(8, ProbeOutcome.GOOD)
    swapped.record(0, ProbeOutcome.BAD)
    assert swapped.result().failure.endswith("the endpoints look swapped")  # type: ignore[union-attr]
    torn = Search(labels(9), labels(9)[0], labels(9)[8])
    for index, outcome in ((0, "GOOD"), (8, "BAD"), (3, "BAD"), (5, "GOOD")):
        torn.record(index, ProbeOutcome[outcome])
    failure = torn.result().failure  # type: ignore[union-attr]
    assert "2.14.0.dev0003 reads BAD but 2.14.0.dev0005 reads GOOD" in failure
    assert "--false-bad" in failure


def test_more_misreads_than_stated_end_the_search() -> None:
    searched = Search(labels(9), labels(9)[0], labels(9)[8], false_bad=0.01, false_good=0.01, budget=13)
    for index, outcome in ((0, "GOOD"), (8, "BAD")):
        searched.record(index, ProbeOutcome[outcome])
    for index in range(1, 7):
        searched.record(index, ProbeOutcome.GOOD if index != 4 else ProbeOutcome.BAD)
    for outcome in (ProbeOutcome.BAD, ProbeOutcome.BAD, ProbeOutcome.GOOD):
        searched.record(4, outcome)
        searched.record(6, ProbeOutcome.GOOD)
    result = searched.result()
    assert result is not None
    assert "the probe is noisier than stated" in result.failure


def estimating(n: int = 60) -> Search:
    """Return a search as created by the command: misread rates estimated, the answer confirmed."""
    return Search(labels(n), labels(n)[0], labels(n)[-1], None, None, confirm=2)


def test_confirm_reads_both_neighbours_twice() -> None:
    for first_bad in range(1, 60):
        searched = estimating()
        result = drive(searched, lambda i: "BAD" if i >= first_bad else "GOOD")  # noqa: B023
        read = Counter(i for i, _ in searched.history)
        assert (result.suspects, result.confirmed, result.sure(0.98)) == ((first_bad,), True, True)
        assert min(read[first_bad - 1], read[first_bad]) >= 2
        assert result.probes <= 12


def test_confirm_corrects_a_misread_neighbour() -> None:
    """The first reading of one version near the change is false: its repeat shows it."""
    for first_bad in (2, 17, 30, 58):
        for false in (first_bad - 1, first_bad):
            searched, seen = estimating(), Counter[int]()

            def read(index: int) -> str:
                seen[index] += 1  # noqa: B023
                bad = index >= first_bad  # noqa: B023
                return "BAD" if bad != (index == false and seen[index] == 1) else "GOOD"  # noqa: B023

            result = drive(searched, read)
            assert result.suspects == (first_bad,), (first_bad, false, result)


def test_misread_rates_are_estimated_from_repeats() -> None:
    searched = estimating(4)
    for index, outcome in ((0, ProbeOutcome.GOOD), (3, ProbeOutcome.BAD)):
        searched.record(index, outcome)
    before = searched.noise()
    for _ in range(6):
        searched.record(0, ProbeOutcome.GOOD)
    assert searched.noise()[0] < before[0], "repeats that agree lower the rate"
    for _ in range(3):
        searched.record(0, ProbeOutcome.BAD)
    assert searched.noise()[0] > 0.2, "repeats that contradict each other raise it"
    stated = Search(labels(4), labels(4)[0], labels(4)[3], 0.1, 0.0)
    stated.record(0, ProbeOutcome.BAD)
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
    for index, outcome in ((0, "GOOD"), (59, "BAD"), (20, "BAD"), (40, "GOOD")):
        searched.record(index, ProbeOutcome[outcome])
    result = drive(searched, lambda i: "BAD" if 10 <= i < 34 or i >= 42 else "GOOD")
    assert (result.suspects, result.sure(0.98), result.misreads) == ((42,), True, 0)
    assert 20 in result.earlier
    assert all(10 <= i < 34 for i in result.earlier)


@pytest.mark.parametrize(
    ("read", "words", "probes"),
    [
        (lambda i: "BAD", "the good endpoint 2.14.0.dev0000 is BAD", 4),
        (lambda i: "GOOD", "the bad endpoint 2.14.0.dev0059 is GOOD", 4),
        (lambda i: "GOOD" if i else "BAD", "the endpoints look swapped", 4),
    ],
)
def test_wrong_endpoint_is_refused_after_few_repeats(
    read: Callable[[int], str], words: str, probes: int
) -> None:
    result = drive(estimating(), read)
    assert words in result.failure
    assert result.probes == probes


def test_candidate_with_another_fault_is_set_aside() -> None:
    """OTHER counts neither as BAD nor as GOOD, so the answer is a range."""
    searched = estimating(10)
    result = drive(searched, lambda i: "OTHER" if i in (4, 5) else "BAD" if i >= 6 else "GOOD")
    assert (result.suspects, result.last_old) == ((4, 5, 6), 3)


def test_candidates_outside_the_endpoints_are_never_probed() -> None:
    searched = Search(labels(30), labels(30)[10], labels(30)[20])
    drive(searched, lambda i: "BAD" if i >= 13 else "GOOD")
    assert all(10 <= i <= 20 for i, _ in searched.history)
    with pytest.raises(SearchError, match="does not lie between the ends"):
        searched.record(9, ProbeOutcome.GOOD)


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
    for first_bad in range(1, n):
        for start in range(1, n - 1):
            for stop in range(start + 1, min(start + 5, n)):
                broken = range(start, min(stop, n - 1))
                searched = Search(labels(n), labels(n)[0], labels(n)[-1])
                result = drive(
                    searched,
                    lambda i: "SKIP" if i in broken else "BAD" if i >= first_bad else "GOOD",  # noqa: B023
                    limit=40,
                )
                low, high = first_bad, first_bad
                while low - 1 in broken:
                    low -= 1
                while high in broken:
                    high += 1
                assert result.suspects == tuple(range(low, high + 1)), (first_bad, broken, result)
                assert result.last_old == low - 1


def test_search_jumps_over_a_long_run_of_broken_builds() -> None:
    """20 nights in the middle of 60 are broken, and the fault is elsewhere: few failed installs, on average."""
    broken, taken = range(20, 40), []
    for first_bad in (*range(1, 20), *range(41, 60)):
        searched = Search(labels(60), labels(60)[0], labels(60)[-1])
        result = drive(searched, lambda i: "SKIP" if i in broken else "BAD" if i >= first_bad else "GOOD")  # noqa: B023
        assert result.suspects == (first_bad,)
        taken.append(sum(outcome.value == "SKIP" for _, outcome in searched.history))
    assert sum(taken) / len(taken) <= 4


def test_unknown_outcome_is_retried_then_set_aside() -> None:
    searched = Search(labels(4), labels(4)[0], labels(4)[-1])
    result = drive(searched, lambda i: "UNKNOWN" if i == 1 else "BAD" if i >= 2 else "GOOD")
    assert result.suspects == (1, 2)
    assert [i for i, _ in searched.history].count(1) == search.UNKNOWN_LIMIT


def test_verdict_before_a_skip_still_counts() -> None:
    searched = Search(labels(5), labels(5)[0], labels(5)[-1])
    for index, outcome in ((0, "GOOD"), (4, "BAD"), (2, "GOOD"), (2, "SKIP"), (3, "SKIP")):
        searched.record(index, ProbeOutcome[outcome])
    result = searched.result()
    assert result is not None
    assert result.suspects == (3, 4)


# Batches of probes for several hosts.


def planned(nights: int = 60, misreads: float | None = 0.0) -> Search:
    names = tuple(labels(nights))
    return BisectPlan(names, names[0], names[-1], (), misreads, misreads).search()


def rounds(searched: Search, first_bad: int, workers: int) -> tuple[int, SearchResult]:
    """Run to the end without misreads; return the number of rounds and the answer."""
    count = 0
    while due := batch(searched, workers):
        assert len(due) <= workers
        count += 1
        for index in due:
            searched.record(index, ProbeOutcome.BAD if index >= first_bad else ProbeOutcome.GOOD)
        assert count < 99
    result = searched.result()
    assert result is not None
    return count, result


def test_four_workers_need_at_most_three_rounds_after_ends() -> None:
    """60 nights, every place of the fault: at most three rounds after the round of the ends."""
    for first_bad in range(1, 60):
        count, result = rounds(planned(), first_bad, 4)
        assert (result.suspects, result.confirmed) == ((first_bad,), True)
        assert count <= 1 + 3


def test_batch_for_one_worker_equals_sequential_search() -> None:
    searched = planned(20, None)
    read = noisy(7, 0.1, 0.1, random.Random(3))
    while due := searched.next():
        assert batch(searched, 1) == due[:1]
        searched.record(due[0], ProbeOutcome[read(due[0])])


def test_batch_excludes_skipped_candidate() -> None:
    searched = planned(9)
    for index, outcome in ((0, ProbeOutcome.GOOD), (8, ProbeOutcome.BAD), (4, ProbeOutcome.SKIP)):
        searched.record(index, outcome)
    assert 4 not in batch(searched, 8)
    assert len(set(batch(searched, 3))) == 3


def test_chance_matches_the_posterior() -> None:
    searched = planned(60, 0.1)
    searched.record(0, ProbeOutcome.GOOD)
    searched.record(59, ProbeOutcome.BAD)
    chances = [searched.chance(i) for i in range(60)]
    assert chances == sorted(chances)
    assert math.isclose(chances[29] + chances[30], 1, abs_tol=0.01)
    assert chances[0] < 0.2 < 0.8 < chances[59]
