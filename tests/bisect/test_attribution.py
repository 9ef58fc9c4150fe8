"""Attribution: the package at fault is named with its versions, even if some mixtures do not install."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bumpgate.bisect.attribution import Attribution, AttributionError, Mixture, PackageChange, attribute
from bumpgate.bisect.search import ProbeOutcome
from tests.support.searching import RUNS, SIGNIFICANCE, tail

FIXED = settings(derandomize=True, max_examples=80, deadline=None)
NAMES = "abcdefghij"
GOOD_SET = dict.fromkeys(NAMES, "1")
BAD_SET = dict.fromkeys(NAMES, "2")

LOCK_GOOD = {
    "torch": "2.13.0",
    "triton": "3.7.1",
    "nvidia-cublas": "13.1.0",
    "nvidia-cudnn-cu13": "9.19",
    "mamba-ssm": "2.3.0",
    "flash-attn": "2.8.3",
    "numpy": "2.4.0",
    "filelock": "3.20",
}
LOCK_BAD = {
    "torch": "2.14.0",
    "triton": "3.8.0",
    "nvidia-cublas": "13.3.0",
    "nvidia-cudnn-cu13": "9.22",
    "mamba-ssm": "2.3.1",
    "flash-attn": "2.8.4",
    "numpy": "2.4.0",
    "nvidia-nvshmem": "3.5",
}
CUDA = ("torch", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nvshmem")


def red_with(*culprits: str) -> Callable[[Mixture, dict[str, str]], ProbeOutcome]:
    """Return a probe that is red if all culprits have their version of the bad set."""
    return lambda mixture, packages: ProbeOutcome.BAD if mixture >= set(culprits) else ProbeOutcome.GOOD


def names(found: Attribution) -> set[str]:
    assert not found.failure, found
    return {change.name for change in found.changes}


def test_every_culprit_is_found() -> None:
    """Every single package, pair and triple of ten is found exactly; a single one in few probes."""
    for size in (1, 2, 3):
        for culprits in combinations(NAMES, size):
            found = attribute(GOOD_SET, BAD_SET, red_with(*culprits))
            assert names(found) == set(culprits), (culprits, found)
            assert found.probes == found.mixtures, "without noise no mixture is read twice"
            assert found.unresolved == 0
            assert (found.needed, found.others, found.separable) == (True, (), True)
            # Two endpoints, at most two probes per halving of ten, and the bad set without the culprit.
            assert size > 1 or found.probes <= 2 + 2 * 4 + 1, (culprits, found)


def test_attribution_probe_counts_are_bounded() -> None:
    """Of ten changed packages; any search needs 5.3 probes for one culprit and 7.5 for two, on average."""
    single = [attribute(GOOD_SET, BAD_SET, red_with(c)).probes for c in NAMES]
    pairs = [attribute(GOOD_SET, BAD_SET, red_with(*c)).probes for c in combinations(NAMES, 2)]
    assert max(single) <= 11
    assert max(pairs) <= 32


def test_grouped_packages_are_never_separated() -> None:
    """No probe combines the CUDA libraries of one side with the torch of the other."""
    seen = []

    def probe(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        seen.append(packages)
        return ProbeOutcome.BAD if "nvidia-cublas" in mixture else ProbeOutcome.GOOD

    found = attribute(LOCK_GOOD, LOCK_BAD, probe, [CUDA])
    assert names(found) == set(CUDA)
    sides = [{name: packages.get(name) for name in CUDA} for packages in seen]
    whole = [{name: lock.get(name) for name in CUDA} for lock in (LOCK_GOOD, LOCK_BAD)]
    assert all(side in whole for side in sides)


def test_groups_sharing_a_changed_package_are_merged() -> None:
    found = attribute(LOCK_GOOD, LOCK_BAD, red_with("triton"), [("torch", "triton"), ("torch", "mamba-ssm")])
    assert names(found) == {"torch", "triton", "mamba-ssm"}


def test_added_or_removed_package_is_a_change() -> None:
    for name, change in (
        ("nvidia-nvshmem", PackageChange("nvidia-nvshmem", None, "3.5")),
        ("filelock", PackageChange("filelock", "3.20", None)),
    ):
        seen: dict[Mixture, dict[str, str]] = {}

        def probe(
            mixture: Mixture, packages: dict[str, str], name: str = name, seen: Any = seen
        ) -> ProbeOutcome:
            seen[mixture] = packages
            return ProbeOutcome.BAD if name in mixture else ProbeOutcome.GOOD

        assert attribute(LOCK_GOOD, LOCK_BAD, probe).changes == (change,)
        assert seen[frozenset()] == LOCK_GOOD
        assert seen[frozenset({name})] == {
            k: v for k, v in {**LOCK_GOOD, name: LOCK_BAD.get(name)}.items() if v is not None
        }


def test_uninstallable_mixtures_are_unresolved() -> None:
    """torch and triton only install together, but do not declare it: mixtures of both sides are unresolved."""
    for culprit, blamed in (("a", {"a", "b"}), ("b", {"a", "b"}), ("g", {"g"})):

        def probe(mixture: Mixture, packages: dict[str, str], culprit: str = culprit) -> ProbeOutcome:
            if ("a" in mixture) != ("b" in mixture):
                return ProbeOutcome.SKIP
            return ProbeOutcome.BAD if culprit in mixture else ProbeOutcome.GOOD

        found = attribute(GOOD_SET, BAD_SET, probe)
        assert names(found) == blamed, (culprit, found)
        assert culprit == "g" or found.unresolved >= 2, "a alone and b alone were tried"


def test_unresolved_mixtures_are_counted() -> None:
    def probe(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        if 0 < len(mixture) < len(NAMES):
            return ProbeOutcome.SKIP
        return ProbeOutcome.BAD if mixture else ProbeOutcome.GOOD

    found = attribute(GOOD_SET, BAD_SET, probe)
    assert names(found) == set(NAMES), "if no mixture installs, no subset may be blamed"
    assert not found.separable
    assert found.unresolved == found.mixtures - 2 > 0


def red_where(rule: Callable[[Mixture], bool]) -> Callable[[Mixture, dict[str, str]], ProbeOutcome]:
    return lambda mixture, packages: ProbeOutcome.BAD if rule(mixture) else ProbeOutcome.GOOD


def other_names(found: Attribution) -> list[set[str]]:
    return [{change.name for change in other} for other in found.others]


def test_bad_set_without_the_culprit_is_checked() -> None:
    """Two independently sufficient causes, and one that another package of the bad set masks."""
    either = attribute(GOOD_SET, BAD_SET, red_where(lambda m: "a" in m or "f" in m))
    assert (names(either), other_names(either), either.needed) == ({"a"}, [{"f"}], False)
    pair = attribute(GOOD_SET, BAD_SET, red_where(lambda m: m >= {"a", "b"} or "g" in m))
    assert (names(pair), other_names(pair), pair.needed) == ({"a", "b"}, [{"g"}], False)
    # a alone is red, but not together with the bad set's b: the bad set is red because of c.
    rule = red_where(lambda m: ("a" in m and "b" not in m) or "c" in m)
    prevented = attribute(GOOD_SET, BAD_SET, rule, first="a")
    assert (names(prevented), other_names(prevented), prevented.needed) == ({"c"}, [{"a"}], True)


def test_complement_that_cannot_run_is_not_separable() -> None:
    def probe(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        if mixture == frozenset(NAMES) - {"c"}:
            return ProbeOutcome.OTHER
        return ProbeOutcome.BAD if "c" in mixture else ProbeOutcome.GOOD

    found = attribute(GOOD_SET, BAD_SET, probe)
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

    def probe(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        if mixture in broken:
            return ProbeOutcome.SKIP
        return ProbeOutcome.BAD if any(mixture >= s for s in some) else ProbeOutcome.GOOD

    found = attribute(GOOD_SET, BAD_SET, probe)
    answer = frozenset(names(found))
    assert probe(answer, {}) is ProbeOutcome.BAD
    assert all(probe(answer - {name}, {}) is not ProbeOutcome.BAD for name in answer)
    assert attribute(GOOD_SET, BAD_SET, probe) == found


def flaky(culprits: Iterable[str], dice: random.Random) -> Callable[[Mixture, dict[str, str]], ProbeOutcome]:
    def probe(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        red = mixture >= set(culprits)
        return ProbeOutcome.BAD if red != (dice.random() < 0.1) else ProbeOutcome.GOOD

    return probe


def test_flaky_mixture_is_probed_again_until_settled() -> None:
    """10 % misreads both ways: 97 % of runs are right, by an exact test; a control that trusts each reading fails."""
    dice = random.Random(1)
    right, trusting, probes = 0, 0, 0
    for run in range(RUNS):
        culprit = NAMES[run % len(NAMES)]
        found = attribute(GOOD_SET, BAD_SET, flaky(culprit, dice), noise=(0.1, 0.1))
        right += found.changes == (PackageChange(culprit, "1", "2"),)
        probes += found.probes
        trusting += attribute(GOOD_SET, BAD_SET, flaky(culprit, dice)).changes == (
            PackageChange(culprit, "1", "2"),
        )
    text = f"{right} of {RUNS} right in {probes / RUNS:.1f} probes; trusting every reading {trusting}"
    print(text)
    assert tail(right, RUNS, 0.97) < SIGNIFICANCE, text
    assert trusting < 0.8 * RUNS, text


def test_known_readings_are_not_probed_again() -> None:
    """An attribution interrupted anywhere resumes to the same answer, and only probes what was not read."""
    log: list[tuple[Mixture, ProbeOutcome]] = []

    def logged(dice: random.Random) -> Callable[[Mixture, dict[str, str]], ProbeOutcome]:
        probe = flaky("d", dice)

        def read(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
            log.append((mixture, probe(mixture, packages)))
            return log[-1][1]

        return read

    whole = attribute(GOOD_SET, BAD_SET, logged(random.Random(7)), noise=(0.1, 0.1))
    for cut in range(len(log) + 1):
        rest = iter(log[cut:])

        def read(mixture: Mixture, packages: dict[str, str], rest: Any = rest) -> ProbeOutcome:
            requested, outcome = next(rest)
            assert requested == mixture
            return outcome

        again = attribute(GOOD_SET, BAD_SET, read, noise=(0.1, 0.1), known=log[:cut])
        assert again == whole
        assert next(rest, None) is None


@pytest.mark.parametrize(
    ("read", "failure"),
    [
        (lambda mixture: ProbeOutcome.BAD, "the good set reads BAD: nothing to attribute"),
        (lambda mixture: ProbeOutcome.GOOD, "the bad set reads GOOD: nothing to attribute"),
        (lambda mixture: ProbeOutcome.SKIP, "the good set reads SKIP: nothing to attribute"),
        (lambda mixture: ProbeOutcome.UNKNOWN, "the good set reads UNKNOWN: nothing to attribute"),
    ],
)
def test_endpoint_sets_without_claimed_result_fail(
    read: Callable[[Mixture], ProbeOutcome], failure: str
) -> None:
    found = attribute(GOOD_SET, BAD_SET, lambda mixture, packages: read(mixture))
    assert (found.changes, found.failure) == ((), failure)


def test_unknown_reading_is_probed_again() -> None:
    requested: list[Mixture] = []

    def probe(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        requested.append(mixture)
        return ProbeOutcome.UNKNOWN if requested.count(mixture) < 3 else red_with("c")(mixture, packages)

    assert names(attribute(GOOD_SET, BAD_SET, probe)) == {"c"}


def test_bad_attribution_input_is_refused() -> None:
    with pytest.raises(AttributionError, match="same packages"):
        attribute(GOOD_SET, GOOD_SET, red_with("a"))
    for options in ({"noise": (0.5, 0.0)}, {"noise": (0.0, -0.1)}, {"confidence": 1.0}):
        with pytest.raises(AttributionError, match="must lie"):
            attribute(GOOD_SET, BAD_SET, red_with("a"), **options)
