"""Local version labels of a build, which an index may omit: the same build is known by its version and commit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bumpgate.core.baseline import Baseline
from bumpgate.core.findings import Decision
from bumpgate.core.gate_file import GateSide
from bumpgate.core.rows import Record
from bumpgate.env.inventory import version_of
from bumpgate.env.locks import Lock, Locked, Wheel
from bumpgate.gate.command import _adoption
from bumpgate.review.measured_set import adopted_differences, differences
from suites.support.planted import planted
from tests.support.local_index import fake_wheel


def locked(version: str) -> Lock:
    return Lock((Locked("torch", version, (Wheel("torch.whl", ""),)),))


@pytest.mark.parametrize(
    ("version", "installed", "same", "known"),
    [
        ("2.15.0", "2.15.0", True, True),
        ("2.15.0", "2.15.0+cu130", False, True),
        ("2.15.0+cu130", "2.15.0+cu130", True, True),
        ("2.15.0+cpu", "2.15.0+cu130", False, False),
        ("2.15.0+cu130", "2.15.0", False, False),
        ("2.15.0", "2.15.1", False, False),
        ("2.15.0", "2.15.0.post1+cu130", False, False),
        ("1.0", "1.0.0", True, True),
        ("1.0", "of a fork", False, False),
    ],
)
def test_label_that_an_index_omits_is_no_difference(
    version: str, installed: str, same: bool, known: bool
) -> None:
    """same, known: whether they are the same by their versions, and if the build is known to be the same."""
    for names, expected in (((), same), (("torch",), known)):
        found = differences(locked(version), {"Torch": installed}, names)
        assert found == ([] if expected else [f"torch {version} -> {installed}"])


@planted("C39", "an adopted side of another variant than the adopted set")
@pytest.mark.parametrize(
    ("provenance", "same"),
    [
        ({"torch": "2.11.0+cu130", "torch_git": "70d9"}, True),
        ({"torch": "2.11.0+cpu", "torch_git": "70d9"}, False),
        ({"torch": "2.11.0+cu130", "torch_git": "beef"}, False),
        ({"torch": "2.11.0+cu130", "torch_git": None}, False),
        ({}, False),
        (None, False),
    ],
)
def test_adopted_side_is_the_build_of_the_baseline(provenance: dict[str, Any] | None, same: bool) -> None:
    """As on the H200: PyPI lists 2.11.0+cu130 as 2.11.0, and PyTorch's own index with its label."""
    baseline = Baseline("h200", {"torch": "2.11.0+cu130", "torch_git": "70d9"}, {})
    record = None if provenance is None else Record(provenance, ())
    for version in ("2.11.0", "2.11.0+cu130"):
        side = GateSide("adopted", record, packages={"torch": version})
        found = adopted_differences(locked("2.11.0"), side, baseline)
        assert found == ([] if same or version == "2.11.0" else ["torch 2.11.0 -> 2.11.0+cu130"])


def test_version_file_of_a_wheel_is_read(tmp_path: Path) -> None:
    text = (
        "from typing import Optional\n__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nx = [1]\n"
    )
    torch = fake_wheel(tmp_path, "torch", "2.11.0", {"torch/version.py": text})
    assert version_of(torch) == {"__version__": "2.11.0+cu130", "cuda": "13.0"}
    assert version_of(fake_wheel(tmp_path, "torch", "2.12.0", {"torch/version.py": "x = ="})) == {}
    assert version_of(fake_wheel(tmp_path, "torch", "2.13.0")) == {}
    assert version_of(tmp_path / "none.whl") == {}


def test_hint_of_a_gate_keeps_the_label() -> None:
    config: Any = SimpleNamespace(python_candidate="bad/python", without=("fast",))
    bad = SimpleNamespace(packages={"torch": "2.15.0+cpu"}, wheels={})
    found: Any = SimpleNamespace(candidate=bad, decision=Decision.ADOPT)
    expected = "bumpgate adopt g/gate.json --candidate torch==2.15.0+cpu --without fast"
    assert _adoption(config, found, Path("g/gate.json")) == expected
