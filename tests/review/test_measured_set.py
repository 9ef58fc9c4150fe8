"""The set that is adopted is the measured one: its packages, the build of torch, and nothing of the adopted side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bumpgate.core.baseline import Baseline
from bumpgate.core.errors import BumpgateError
from bumpgate.core.findings import Decision
from bumpgate.core.gate_file import GateFile, GateSide
from bumpgate.core.rows import Record
from bumpgate.env.inventory import version_of
from bumpgate.env.lane import LaneContext
from bumpgate.env.locks import Lock, Locked, Wheel
from bumpgate.gate.command import _adoption
from bumpgate.process.file_transaction import AdoptionError
from bumpgate.review.measured_set import Named, adopted_differences, differences, measured_set
from suites.support.planted import planted
from tests.support.gate_files import gate_of
from tests.support.local_index import fake_wheel

LOCK = """lock-version = "1.0"
[[packages]]
name = "torch"
version = "9.0"
wheels = [{{ url = "https://e.org/{wheel}", hashes = {{ sha256 = "{digest}" }} }}]
[[packages]]
name = "numpy"
version = "2.0"
wheels = [{{ url = "https://e.org/numpy-2.0-py3-none-any.whl", hashes = {{ sha256 = "{digest}" }} }}]
"""
TORCH = "torch-9.0-py3-none-any.whl"
BOTH = {"torch": "9.0", "numpy": "2.0"}


def measured(folder: Path, wheel: str, candidate: dict[str, str], adopted: dict[str, str]) -> Lock:
    """Return the set of a gate of a requirement with the packages of both sides; the resolution is in the folder."""
    (folder / "bumpgate.toml").write_text("[lanes.cpu]\n")
    (folder / "candidate.pylock.toml").write_text(LOCK.format(wheel=wheel, digest="0" * 64))
    gate: GateFile = gate_of()
    sides = {
        "adopted": replace(gate.adopted, packages=adopted),
        "candidate": replace(gate.candidate, packages=candidate, record=Record({"python": "3.12.1"}, ())),
    }
    gate = replace(gate, **sides, config={"candidate": "torch==9.0"})
    return measured_set(LaneContext(folder, "cpu"), folder / "gate.json", gate, Named()).lock


@planted("C39", "a package that the candidate lacked is taken from the adopted side")
@pytest.mark.parametrize(
    ("candidate", "adopted", "words"),
    [
        ({"torch": "9.0"}, BOTH, "numpy 2.0 -> (absent)"),
        ({"torch": "9.0"}, {}, "numpy 2.0 -> (absent)"),
        (BOTH | {"numpy": "2.1"}, BOTH, "numpy 2.0 -> 2.1"),
        (BOTH | {"torch": "9.0+cpu"}, BOTH, "torch 9.0 -> 9.0+cpu"),
        (BOTH, {"torch": "8.0"}, ""),
        (BOTH | {"pip": "1"}, {}, ""),
    ],
)
def test_lock_is_the_set_that_the_candidate_had(
    tmp_path: Path, candidate: dict[str, str], adopted: dict[str, str], words: str
) -> None:
    if not words:
        assert measured(tmp_path, TORCH, candidate, adopted).versions == BOTH
        return
    with pytest.raises(AdoptionError) as caught:
        measured(tmp_path, TORCH, candidate, adopted)
    assert f"is not the set that was measured ({words}): gate again" in str(caught.value)


@pytest.mark.parametrize("wheel", ["torch-9.0.tar.gz", "", "torch.whl", "%00", f"{TORCH}\\n"])
def test_place_that_is_no_wheel_is_one_line(tmp_path: Path, wheel: str) -> None:
    with pytest.raises(BumpgateError) as caught:
        measured(tmp_path, wheel, BOTH, BOTH)
    assert len(str(caught.value).splitlines()) == 1


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
    stated = {"__version__": "2.11.0+cu130", "cuda": "13.0"}
    for version, files, expected in (
        ("2.11.0", {"torch/version.py": text}, stated),
        ("2.12.0", {"torch/version.py": "x = ="}, {}),
        ("2.13.0", {}, {}),
    ):
        assert version_of(fake_wheel(tmp_path, "torch", version, files)) == expected
    assert version_of(tmp_path / "none.whl") == {}


def test_hint_of_a_gate_keeps_the_label() -> None:
    config: Any = SimpleNamespace(python_candidate="bad/python", without=("fast",))
    bad = SimpleNamespace(packages={"torch": "2.15.0+cpu"}, wheels={})
    found: Any = SimpleNamespace(candidate=bad, decision=Decision.ADOPT)
    expected = "bumpgate adopt g/gate.json --candidate torch==2.15.0+cpu --without fast"
    assert _adoption(config, found, Path("g/gate.json")) == expected
