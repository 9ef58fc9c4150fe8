"""libtpu is pinned, recorded in every run, and its flags are checked (rule X11). 12 s of CPU: one process per flag.

Nothing runs here: the compile-only client reads LIBTPU_INIT_ARGS as a TPU's does.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bumpgate.env.lane import LaneContext
from bumpgate.env.locks import read_lock
from bumpgate.env.packages import NO_LOCK, VARIABLE
from bumpgate.plugin.provenance import xla_versions
from launch.xla import libtpu
from suites.support.child import ROOT, ChildError, run_json
from suites.support.lanes import V6E_AOT, lanes
from suites.support.planted import planted
from suites.xla import aot

pytestmark = [lanes("v6e"), pytest.mark.usefixtures("lane")]


REMOVED = "xla_disable_hlo_passes"
RENAMED = "xla_jf_vmem_memory_space_assignment"


def pinned() -> str:
    """The version in this environment's own lock in a gate; without a lock the version that torch_xla requires.

    In a lane run, the version of the lane's extra.
    """
    lock = os.environ.get(VARIABLE, "")
    if lock not in ("", NO_LOCK):
        return read_lock(Path(lock)).versions["libtpu"]
    lines = LaneContext(ROOT, "v6e").requirements() if not lock else metadata.requires("torch_xla") or ()
    (specifier,) = next(r for r in map(Requirement, lines) if r.name == "libtpu").specifier
    assert specifier.operator == "==", f"libtpu{specifier} is not pinned"
    return specifier.version


def refusal(*flags: str) -> str:
    """Return libtpu's error for flags, "" if it accepts them and provides a chip."""
    environment = aot.ENVIRONMENT | {libtpu.VARIABLE: " ".join(flags)}
    try:
        found = run_json("suites.xla.mesh_programs", "topology", environment=environment, timeout=200)
    except ChildError as error:
        return str(error)
    assert found == {"chips": 1, "kind": "TPU v6 lite"}
    return ""


@pytest.mark.measured_on(V6E_AOT)
@planted("X11", "a removed flag in LIBTPU_INIT_ARGS")
def test_libtpu_accepts_exactly_the_flags_of_its_table(row) -> None:
    """A version that has no table yet, as a candidate of a gate may be, is compared with the adopted one."""
    names = sorted({flag for table in libtpu.FLAGS.values() for flag in table})
    refusals = {flag: refusal(f"--{flag}=false") for flag in names}
    assert all(
        not words or f"Unknown command line flag '{flag}'" in words for flag, words in refusals.items()
    )
    assert refusals[REMOVED], "a client that accepts everything"
    accepted = [flag for flag in names if not refusals[flag]]
    row.exact(
        "libtpu/flags/accepted", " ".join(accepted), "names", seen=accepted, rule="X11",
        evidence=[f"{flag}: {words}" for flag, words in refusals.items() if words],
    )  # fmt: skip
    table = libtpu.FLAGS.get(libtpu.installed())
    assert table is None or accepted == [flag for flag in names if table[flag]]


@pytest.mark.measured_on(V6E_AOT)
def test_pinned_libtpu_is_installed_and_recorded(row) -> None:
    version = libtpu.installed()
    libtpu.check_pinned(version, pinned())
    row.bound(
        "libtpu/pinned/installed", version, "version", expected=pinned(),
        seen=xla_versions().count(f"libtpu {version} "), rule="X11", evidence=[xla_versions()],
    )  # fmt: skip


@planted("X11", "two versions of libtpu are taken for equal")
@pytest.mark.parametrize(
    ("installed", "pinned_version"),
    [
        ("0.0.37", "0.0.36"),
        ("0.0.37.dev20260224", "0.0.37"),
        ("0.0.37.dev20260224+nightly", "0.0.37.dev20260224"),
    ],
)
def test_close_versions_are_not_equal(installed: str, pinned_version: str) -> None:
    libtpu.check_pinned(pinned_version, pinned_version)
    with pytest.raises(libtpu.LibtpuError, match=f"{pinned_version} is pinned"):
        libtpu.check_pinned(installed, pinned_version)


@planted("X11", "flags go by another version's table")
def test_flags_depend_on_the_full_version() -> None:
    environment = {libtpu.VARIABLE: f"--{RENAMED}=false"}
    libtpu.check_flags(environment, "0.0.37")
    with pytest.raises(libtpu.LibtpuError, match=r"0\.0\.51 does not take .*xla_vf_vmem"):
        libtpu.check_flags(environment, "0.0.51")
    with pytest.raises(libtpu.LibtpuError, match="has not been tried"):
        libtpu.check_flags(environment, "0.0.37.dev20260224")
    with pytest.raises(libtpu.LibtpuError, match=f"does not take --{REMOVED}"):
        libtpu.check_flags({libtpu.VARIABLE: f"--{REMOVED}=fusion --{RENAMED}=false"}, "0.0.36")
    libtpu.check_flags({}, "0.0.37.dev20260224")
