"""Contents of a cache key: a change that matters misses, one that does not still hits.

Rule C18, and "cache key contents" of the sources. A key without the torch version would run the old compiler's code
after a bump; one with the working directory in it would never be warm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from suites.cache.layers import compiled
from suites.support.lanes import Lane, lanes
from suites.support.planted import planted

pytestmark = [pytest.mark.cold, pytest.mark.long(120)]

MATTERS = ("source", "shape", "dtype", "inductor_option")
# All at once: if they hit together, none of them is in the key.
HARMLESS = {
    "PYTHONHASHSEED": "7",
    "BUMPGATE_UNRELATED": "1",
    "HOSTNAME": "a",
    "USER": "a",
    "OMP_NUM_THREADS": "1",
}


def missed(report: dict[str, Any]) -> bool:
    """Return True on a miss of both layers, False on a hit of both. Raises AssertionError on anything between."""
    counts = report["counts"]
    hits, misses = (bool(counts[f"aot_{kind}"]) and bool(counts[f"fx_{kind}"]) for kind in ("hit", "miss"))
    assert hits != misses, f"neither a miss nor a hit: {counts}"
    return misses


@pytest.fixture(scope="module")
def outcomes(lane: Lane, tmp_path_factory) -> dict[str, bool]:
    """Change -> whether it missed, on one cache directory that holds the unchanged program."""
    directory: Path = tmp_path_factory.mktemp("inductor")
    first = compiled(lane, directory, "same", OMP_NUM_THREADS="1")
    assert missed(first["same"]), "the directory was empty"
    elsewhere = {"BUMPGATE_ELSEWHERE": str(tmp_path_factory.mktemp("elsewhere"))}
    results = compiled(lane, directory, "same", "options_reordered", *MATTERS, **HARMLESS, **elsewhere)
    results["process"] = results.pop("same")
    # The version enters a key once per process, and the tag is read at import: each needs a new process.
    results |= compiled(lane, directory, "torch_version", OMP_NUM_THREADS="1")
    tag = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_CACHE_KEY_TAG": "x"}
    results["key_tag"] = compiled(lane, directory, "same", **tag)["same"]
    return {change: missed(one) for change, one in results.items()}


@lanes("cpu", "h200")
@planted("C18", "another torch version, inductor option, dtype, shape or constant")
def test_cache_key_hits_and_misses(lane: Lane, outcomes, row, canaries) -> None:
    canaries("cache")
    matters = (*MATTERS, "torch_version", "key_tag")
    harmless = ("process", "options_reordered")
    assert set(outcomes) == {*matters, *harmless}
    stale = [change for change in matters if not outcomes[change]]
    lost = [change for change in harmless if outcomes[change]]
    case = f"cache/keys-{lane.name}"
    row.count(f"{case}/changes_that_hit_the_old_entry", stale, expected=0, rule="C18", seen=matters)
    row.count(f"{case}/harmless_changes_that_missed", lost, expected=0, rule="C18", seen=harmless)
