"""The adopted set of a lane: its kernel wheels, its versions, and its comparison with the installed packages (C39)."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from bumpgate.core.errors import BumpgateError
from bumpgate.core.lanes import require
from bumpgate.env import packages
from bumpgate.env.inventory import Distribution, Inventory, take
from bumpgate.env.lane import LaneContext, smoke_tests
from bumpgate.env.locks import Lock, Locked, LockError, Wheel
from bumpgate.env.packages import (
    NO_LOCK,
    VARIABLE,
    KernelWheel,
    Label,
    PackageSet,
    label,
    mismatches,
    reference,
)
from bumpgate.process.child import Interpreter
from suites.ops import timed_cases
from suites.support.child import ROOT
from suites.support.lanes import LANES, Lane, lanes
from suites.support.planted import planted

NIGHTLY = "2.12.0.dev20260304+cu130"


@lanes("cpu", "h200")
def test_installed_packages_match_the_adopted_set(lane: Lane, row) -> None:
    """Compares with the adopted row in a lane run, with the own lock in a gate, with torch's metadata without one."""
    found = take(Interpreter(Path(sys.executable), ROOT, os.environ))
    chosen = reference(LaneContext(ROOT, lane.name).packages, found, os.environ)
    differences = [
        f"{m.package}: {m.found or 'absent'}, {chosen.source} has {m.expected or 'it'}"
        for m in mismatches(chosen.row, found)
    ]
    row.count(
        "wheels/manifest/mismatches", len(differences), unit="packages", expected=0, rule="C39",
        seen=chosen.facts, evidence=[f"compared with {chosen.source}", *differences],
    )  # fmt: skip


@planted("C39", "flash-attn of torch 2.10, installed by force over torch 2.12")
@lanes("cpu")
def test_no_adopted_set_contradicts_itself(lane: Lane) -> None:
    forced = KernelWheel("flash-attn", "2.8.3+cu130torch2.10", "2.10.0")
    row = PackageSet("nightly", torch=SpecifierSet(f"=={NIGHTLY}"), wheels=(forced,))
    line = f"flash-attn: built against torch 2.10.0, the row has {NIGHTLY}"
    assert list(packages.contradictions(row)) == [line]
    for context in (LaneContext(ROOT, name) for name in LANES):
        assert context.adopted.torch
        assert list(packages.contradictions(context.packages)) == []


@lanes("cpu")
def test_every_wheel_smoke_case_is_a_shape_of_the_model(lane: Lane) -> None:
    """A wheel that the lane gave up keeps its cases: a later build of it may fit."""
    known = smoke_tests(ROOT)
    assert set(known) == set(LaneContext(ROOT, "h200").known_kernel_wheels)
    for smoke in known.values():
        assert smoke.command == ("-m", "suites.wheels.smoke")
        for case in smoke.cases:
            name, batch = case.split("/")
            assert name in timed_cases()
            assert int(batch) > 0


@lanes("cpu")
def test_development_build_belongs_to_the_coming_release(lane: Lane) -> None:
    assert packages.release(NIGHTLY) == packages.release("2.12.0a0+git21fec65") == Version("2.12.0")
    assert packages.same_minor(NIGHTLY, "2.12")
    assert not packages.same_minor(NIGHTLY, "2.1.2")
    exact = SpecifierSet(f"=={NIGHTLY}")
    assert packages.satisfies(NIGHTLY, exact)
    for other in ("2.12.0.dev20260305+cu130", "2.12.0.dev20260304+cu128", "2.12.0.dev20260304", "nonsense"):
        assert not packages.satisfies(other, exact)
    assert packages.satisfies("2.13.0+cpu", SpecifierSet("==2.13.0"))


LABELS = {
    "2.8.3+cu130torch2.10": Label(Version("2.10"), "13.0"),
    "flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl": Label(
        Version("2.8"), "12", True
    ),
    "x-1%2Bcu126torch2.9.1cxx11abiFALSE-py3-none-any.whl": Label(Version("2.9.1"), "12.6", False),
    "2.9.0+gitc04e61c": Label(),
    "1.7.0": Label(),
}


@lanes("cpu")
def test_version_label_is_parsed(lane: Lane) -> None:
    assert {text: label(text) for text in LABELS} == LABELS


ROW = PackageSet(
    "h200", SpecifierSet("==3.12.*"), SpecifierSet("==2.11.0+cu130"),
    packages={"triton": SpecifierSet("==3.6.0")},
    wheels=(KernelWheel("flash-attn", "2.8.3", "2.11.0", sha256="a" * 64),),
)  # fmt: skip


def inventory(python="3.12.3", torch="2.11.0+cu130", **packages: str | Distribution) -> Inventory:
    found = {"triton": "3.6.0", "flash-attn": "2.8.3"} | packages
    made = {n: v if isinstance(v, Distribution) else Distribution(n, v) for n, v in found.items() if v}
    version = {"__version__": torch}
    return Inventory(
        python, "CPython", None, None, Path("/torch"), version, {n: (d,) for n, d in made.items()}
    )


MISMATCHES = [
    ({}, []),
    ({"python": "3.11.7"}, ["python"]),
    *(({"torch": torch}, ["torch"]) for torch in ("2.11.0+cu128", "2.12.0.dev20260304+cu130", "")),
    *(({"triton": triton}, ["triton"]) for triton in ("3.7.1", "")),
    *(({"flash-attn": fa}, ["flash-attn"]) for fa in ("2.8.3+cu130torch2.10", "")),
    ({"flash-attn": Distribution("flash-attn", "2.8.3", sha256="b" * 64)}, ["flash-attn"]),
]


@pytest.mark.parametrize(("found", "expected"), MISMATCHES)
@planted(
    "C39", "another python, torch, triton or kernel wheel than adopted, and another file of the same version"
)
@lanes("cpu")
def test_mismatch_is_reported(lane: Lane, found: dict[str, Any], expected: list[str]) -> None:
    assert [m.package for m in mismatches(ROW, inventory(**found))] == expected


LOCK = """lock-version = "1.0"
requires-python = "==3.12.*"
[[packages]]
name = "torch"
version = "2.14.1"
wheels = [{ name = "torch-2.14.1-py3-none-any.whl", path = "t", hashes = { sha256 = "AAAA" } }]
[[packages]]
name = "triton"
version = "3.8.0"
wheels = [{ name = "triton-3.8.0-py3-none-any.whl", path = "t", hashes = { sha256 = "BBBB" } }]
""".replace("AAAA", "a" * 64).replace("BBBB", "b" * 64)


@planted("C39", "a candidate that is not what its own lock names")
@lanes("cpu")
def test_candidate_is_compared_with_its_own_lock(lane: Lane, tmp_path: Path) -> None:
    path = tmp_path / "pylock.toml"
    path.write_text(LOCK)
    candidate = inventory(torch="2.14.1+cu130", triton="3.8.0")

    def differing(found: Inventory, lock: str) -> list[str]:
        return [m.package for m in mismatches(reference(ROW, found, {VARIABLE: lock}).row, found)]

    assert differing(candidate, "") == ["torch", "triton"], "a lane run judges against the adopted row"
    assert differing(candidate, str(path)) == []
    assert differing(inventory(torch="2.14.1+cu130", triton="3.7.1"), str(path)) == ["triton"]
    assert differing(inventory(torch="2.15.0", triton="3.8.0"), str(path)) == ["torch"]
    assert differing(inventory(python="3.11.2", torch="2.14.1", triton="3.8.0"), str(path)) == ["python"]
    assert reference(ROW, candidate, {VARIABLE: str(path)}).facts == 3


@planted("C39", "an interpreter without a lock whose triton is not the one that its torch requires")
@lanes("cpu")
def test_without_a_lock_packages_must_match_torch_metadata(lane: Lane) -> None:
    requires = ("triton==3.8.0; platform_system == 'Linux'", "filelock", "winonly; sys_platform == 'win32'")
    torch = Distribution("torch", "2.14.1", requires=(*requires, "optree>=0.13; extra == 'optree'"))
    bare = inventory(torch="2.14.1+cu130", triton="3.8.0", filelock="3.20")
    found = replace(bare, distributions={**bare.distributions, "torch": (torch,)})
    chosen = reference(ROW, found, {VARIABLE: NO_LOCK})
    assert (chosen.facts, "no lock" in chosen.source) == (2, True)
    assert list(mismatches(chosen.row, found)) == []
    for name in ("triton", "filelock"):
        lacking = {n: d for n, d in found.distributions.items() if n != name}
        assert [m.package for m in mismatches(chosen.row, replace(found, distributions=lacking))] == [name]
    other = {**found.distributions, "triton": (Distribution("triton", "3.7.1"),)}
    assert [m.package for m in mismatches(chosen.row, replace(found, distributions=other))] == ["triton"]
    assert reference(ROW, bare, {VARIABLE: NO_LOCK}).facts == 0, "an instrument that saw nothing, not a pass"


GOOD = """python = ">=3.10"
[wheels.fast]
version = "1.0+torch2.13"
torch = "2.13.0"
[wheels.fast.smoke]
command = ["-m", "fast"]
cases = ["1"]
device = "cpu"
"""
CPU_LOCK = Lock(
    (Locked("torch", "2.13.0+cpu", (Wheel("torch-2.13.0+cpu-py3-none-any.whl", "a" * 64),)),), "3.11"
)


# Replaced text of GOOD, its replacement, and words of the error.
BAD = [
    ('python = ">=3.10"\n[', 'python = ">=three"\n[', "python: invalid PEP 440 specifier '>=three'"),
    ('torch = "2.13.0"', 'torch = "new"', "wheels.fast.torch: invalid PEP 440 version 'new'"),
    ('torch = "2.13.0"\n', "", "wheels.fast: the field 'torch' is missing"),
    ('torch = "2.13.0"', 'torch = "2.13.0"\nsha256 = "12"', "wheels.fast: sha256 must be 64 hexadecimal digits"),
    ("[wheels.fast.smoke]", 'patch = "../a"\n[wheels.fast.smoke]',
     "wheels.fast: patch must be the name of a file next to lane.toml, got '../a'"),
    ('torch = "2.13.0"', 'torch = "2.12.0"', "fast: its label names torch 2.13, it was built against 2.12.0"),
    ("torch2.13", "torch2.12", "fast: its label names torch 2.12, it was built against 2.13.0"),
    ('device = "cpu"', 'device = "tpu"', "wheels.fast.smoke: device must be cpu or cuda, got 'tpu'"),
    ('cases = ["1"]', "cases = []", "wheels.fast.smoke: command and cases must be non-empty lists of strings"),
    ("python", "without = [1]\npython", "without must be a list of strings, got [1]"),
    ("python", 'without = "x"\npython', "without must be a list of strings, got 'x'"),
    ("[wheels.fast]", "[other]\nfast = 1\n[wheels.fast]", "unknown field 'other'"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "words"), BAD)
@planted("C39", "kernel wheels with a wrong field, version or label")
@lanes("cpu")
def test_bad_declaration_is_a_one_line_error(
    lane: Lane, tmp_path: Path, old: str, new: str, words: str
) -> None:
    path = tmp_path / "lanes/cpu/lane.toml"
    path.parent.mkdir(parents=True)

    def read(text: str) -> packages.PackageSet:
        path.write_text(text)
        return packages.adopted(require(tmp_path, "cpu"), CPU_LOCK)

    assert read(GOOD).wheels[0].name == "fast"
    assert read(GOOD).torch == SpecifierSet("==2.13.0")
    with pytest.raises(BumpgateError) as refused:
        read(GOOD.replace(old, new, 1))
    line = str(refused.value)
    assert line.startswith("lanes/cpu/lane.toml: ")
    assert words in line
    assert "\n" not in line


@lanes("cpu")
def test_lane_without_a_lock_has_no_adopted_set(lane: Lane, tmp_path: Path) -> None:
    (tmp_path / "bumpgate.toml").write_text("[lanes.cpu]\n")
    with pytest.raises(
        LockError, match=r"^lanes/cpu/pylock.toml: cannot be read .*; bumpgate freeze writes it$"
    ):
        _ = LaneContext(tmp_path, "cpu").adopted
