"""Every semantic mutant still applies, and the tests nearest to it kill it (tox -e mutants)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants.runner import Copy, SemanticMutant, load_mutants
from tests.support.tree import ROOT

MUTANTS = load_mutants()


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("mutants") / "tree")


def defined(test: str) -> bool:
    """Whether a file, and the function that a node id names in it, exist."""
    path, _, function = test.partition("::")
    return (ROOT / path).is_file() and f"def {function.partition('[')[0]}" in (ROOT / path).read_text()


def test_every_mutant_applies_and_compiles() -> None:
    twice = [name for name, count in Counter(m.name for m in MUTANTS).items() if count > 1]
    assert not twice
    for mutant in MUTANTS:
        text = mutant.mutated((ROOT / mutant.file).read_text(encoding="utf-8"))
        if mutant.file.endswith(".py"):
            compile(text, mutant.file, "exec")
        absent = [test for test in mutant.tests if not defined(test)]
        assert not absent, f"{mutant.part}/{mutant.name}: no such test: {', '.join(absent)}"


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.part}-{m.name}")
def test_mutant_is_killed(mutant: SemanticMutant, copy: Copy, record_property) -> None:
    survived, run = copy.survived(mutant)
    record_property("killed_by", run.failure)
    assert not survived, f"{mutant.file}: {survived}"
