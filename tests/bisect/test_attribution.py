"""Attribution: the package at fault is named with its versions, even if some mixtures do not install."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bumpgate.bisect.attribution import Attribution, AttributionError, Mixture, PackageChange, attribute
from bumpgate.bisect.search import BAD, GOOD, OTHER, SKIP, UNKNOWN, ProbeOutcome
from tests.support.bisects import RUNS, SIGNIFICANCE, tail

Probe = Callable[[Mixture, dict[str, str]], ProbeOutcome]
FIXED = settings(derandomize=True, max_examples=80, deadline=None)
NAMES = "abcdefghij"
GOOD_SET = dict.fromkeys(NAMES, "1")
BAD_SET = dict.fromkeys(NAMES, "2")

CUDA = ("torch", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nvshmem")
OTHERS = ("triton", "mamba-ssm", "flash-attn")
LOCK_GOOD = dict.fromkeys((*CUDA[:-1], *OTHERS), "1") | {"numpy": "2.4.0", "filelock": "3.20"}
LOCK_BAD = dict.fromkeys((*CUDA, *OTHERS), "2") | {"numpy": "2.4.0", "nvidia-nvshmem": "3.5"}


def probe(red: Callable[[Mixture], bool], skipped: Callable[[Mixture], bool] = lambda m: False) -> Probe:
    """Return a probe by rules over the names of a mixture."""
    return lambda mixture, packages: SKIP if skipped(mixture) else BAD if red(mixture) else GOOD


def red_with(*culprits: str) -> Probe:
    """Return a probe that is red if all culprits have their version of the bad set."""
    return probe(lambda mixture: mixture >= set(culprits))


def names(found: Attribution) -> set[str]:
    assert not found.failure, found
    return {change.name for change in found.changes}


def test_every_culprit_is_found() -> None:
    """Every single package, pair and triple of ten is found exactly.

    Any search needs 5.3 probes for one culprit and 7.5 for two, on average. A single one takes two endpoints, at most
    two probes per halving of ten, and the bad set without it.
    """
    for size, most in ((1, 2 + 2 * 4 + 1), (2, 32), (3, 99)):
        for culprits in combinations(NAMES, size):
            found = attribute(GOOD_SET, BAD_SET, red_with(*culprits))
            assert names(found) == set(culprits), (culprits, found)
            assert found.probes == found.mixtures <= most, "without noise no mixture is read twice"
            assert (found.needed, found.others, found.separable, found.unresolved) == (True, (), True, 0)


def test_grouped_packages_are_never_separated() -> None:
    """No probe combines the CUDA libraries of one side with the torch of the other."""
    seen = []

    def read(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        seen.append({name: packages.get(name) for name in CUDA})
        return BAD if "nvidia-cublas" in mixture else GOOD

    assert names(attribute(LOCK_GOOD, LOCK_BAD, read, [CUDA])) == set(CUDA)
    whole = [{name: lock.get(name) for name in CUDA} for lock in (LOCK_GOOD, LOCK_BAD)]
    assert all(side in whole for side in seen)
    merged = [("torch", "triton"), ("torch", "mamba-ssm")]
    found = attribute(LOCK_GOOD, LOCK_BAD, red_with("triton"), merged)
    assert names(found) == {"torch", "triton", "mamba-ssm"}, "groups that share a changed package"


@pytest.mark.parametrize(
    ("name", "old", "new"), [("nvidia-nvshmem", None, "3.5"), ("filelock", "3.20", None)]
)
def test_added_or_removed_package_is_a_change(name: str, old: str | None, new: str | None) -> None:
    seen: dict[Mixture, dict[str, str]] = {}

    def read(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        seen[mixture] = packages
        return BAD if name in mixture else GOOD

    assert attribute(LOCK_GOOD, LOCK_BAD, read).changes == (PackageChange(name, old, new),)
    assert seen[frozenset()] == LOCK_GOOD
    mixed = {k: v for k, v in {**LOCK_GOOD, name: new}.items() if v is not None}
    assert seen[frozenset({name})] == mixed


@pytest.mark.parametrize(("culprit", "blamed"), [("a", {"a", "b"}), ("b", {"a", "b"}), ("g", {"g"})])
def test_uninstallable_mixtures_are_unresolved(culprit: str, blamed: set[str]) -> None:
    """a and b only install together, but do not declare it: mixtures of both sides are unresolved."""
    found = attribute(GOOD_SET, BAD_SET, probe(lambda m: culprit in m, lambda m: ("a" in m) != ("b" in m)))
    assert names(found) == blamed
    assert culprit == "g" or found.unresolved >= 2, "a alone and b alone were tried"


def test_unresolved_mixtures_are_counted() -> None:
    found = attribute(GOOD_SET, BAD_SET, probe(bool, lambda m: 0 < len(m) < len(NAMES)))
    assert names(found) == set(NAMES), "if no mixture installs, no subset may be blamed"
    assert not found.separable
    assert found.unresolved == found.mixtures - 2 > 0


@pytest.mark.parametrize(
    ("red", "blamed", "others", "needed"),
    [
        (lambda m: "a" in m or "f" in m, {"a"}, [{"f"}], False),
        (lambda m: m >= {"a", "b"} or "g" in m, {"a", "b"}, [{"g"}], False),
        # a alone is red, but not together with the bad set's b: the bad set is red because of c.
        (lambda m: ("a" in m and "b" not in m) or "c" in m, {"c"}, [{"a"}], True),
    ],
    ids=["two causes", "a pair and another cause", "masked"],
)
def test_bad_set_without_the_culprit_is_checked(
    red: Callable[[Mixture], bool], blamed: set[str], others: list[set[str]], needed: bool
) -> None:
    found = attribute(GOOD_SET, BAD_SET, probe(red), first="a" if needed else "")
    assert (names(found), found.needed) == (blamed, needed)
    assert [{change.name for change in other} for other in found.others] == others


def test_complement_that_cannot_run_is_not_separable() -> None:
    def read(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        return OTHER if mixture == frozenset(NAMES) - {"c"} else red_with("c")(mixture, packages)

    found = attribute(GOOD_SET, BAD_SET, read)
    assert (names(found), found.separable, found.needed, found.unresolved) == ({"c"}, False, False, 1)


def test_likeliest_package_is_tried_first() -> None:
    """If the culprit is first: both endpoints, the culprit alone, and the bad set without it."""
    for culprit in NAMES:
        found = attribute(GOOD_SET, BAD_SET, red_with(culprit), first=culprit)
        assert (names(found), found.mixtures) == ({culprit}, 4)
        assert names(attribute(GOOD_SET, BAD_SET, red_with(culprit), first="a")) == {culprit}


@given(st.data())
@FIXED
def test_attribution_is_minimal(data: st.DataObject) -> None:
    """Any probe, monotone or not: the answer is red, and without any one part it is not; the result is repeatable."""
    some = data.draw(st.lists(st.frozensets(st.sampled_from(NAMES), min_size=1), min_size=1, max_size=4))
    broken = data.draw(st.lists(st.frozensets(st.sampled_from(NAMES), min_size=1, max_size=9), max_size=4))
    read = probe(lambda mixture: any(mixture >= s for s in some), broken.__contains__)
    found = attribute(GOOD_SET, BAD_SET, read)
    answer = frozenset(names(found))
    assert read(answer, {}) is BAD
    assert all(read(answer - {name}, {}) is not BAD for name in answer)
    assert attribute(GOOD_SET, BAD_SET, read) == found


def flaky(culprit: str, dice: random.Random) -> Probe:
    return probe(lambda mixture: (culprit in mixture) != (dice.random() < 0.1))


def test_flaky_mixture_is_probed_again_until_settled() -> None:
    """10 % misreads both ways: 97 % of runs are right, by an exact test; a control that trusts each reading fails."""
    dice = random.Random(1)
    right, trusting = 0, 0
    for run in range(RUNS):
        culprit = NAMES[run % len(NAMES)]
        found = attribute(GOOD_SET, BAD_SET, flaky(culprit, dice), noise=(0.1, 0.1))
        right += found.changes == (PackageChange(culprit, "1", "2"),)
        found = attribute(GOOD_SET, BAD_SET, flaky(culprit, dice))
        trusting += found.changes == (PackageChange(culprit, "1", "2"),)
    assert tail(right, RUNS, 0.97) < SIGNIFICANCE, right
    assert trusting < 0.8 * RUNS, trusting


def test_known_readings_are_not_probed_again() -> None:
    """An attribution interrupted anywhere resumes to the same answer, and only probes what was not read."""
    log: list[tuple[Mixture, ProbeOutcome]] = []
    noisy = flaky("d", random.Random(7))

    def logged(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        log.append((mixture, noisy(mixture, packages)))
        return log[-1][1]

    whole = attribute(GOOD_SET, BAD_SET, logged, noise=(0.1, 0.1))
    for cut in range(len(log) + 1):
        rest = iter(log[cut:])

        def read(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
            requested, outcome = next(rest)  # noqa: B023
            assert requested == mixture
            return outcome

        assert attribute(GOOD_SET, BAD_SET, read, noise=(0.1, 0.1), known=log[:cut]) == whole
        assert next(rest, None) is None


@pytest.mark.parametrize(
    ("outcome", "end"), [(BAD, "good"), (GOOD, "bad"), (SKIP, "good"), (UNKNOWN, "good")], ids=str
)
def test_endpoint_sets_without_claimed_result_fail(outcome: ProbeOutcome, end: str) -> None:
    found = attribute(GOOD_SET, BAD_SET, lambda mixture, packages: outcome)
    failure = f"the {end} set reads {outcome.value}: nothing to attribute"
    assert (found.changes, found.failure) == ((), failure)


def test_unknown_reading_is_probed_again() -> None:
    requested: list[Mixture] = []

    def read(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        requested.append(mixture)
        return UNKNOWN if requested.count(mixture) < 3 else red_with("c")(mixture, packages)

    assert names(attribute(GOOD_SET, BAD_SET, read)) == {"c"}


def test_bad_attribution_input_is_refused() -> None:
    with pytest.raises(AttributionError, match="same packages"):
        attribute(GOOD_SET, GOOD_SET, red_with("a"))
    for options in ({"noise": (0.5, 0.0)}, {"noise": (0.0, -0.1)}, {"confidence": 1.0}):
        with pytest.raises(AttributionError, match="must lie"):
            attribute(GOOD_SET, BAD_SET, red_with("a"), **options)
