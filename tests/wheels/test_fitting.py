"""A bisect on a lane with kernel wheels installs those that fit each version, as a gate does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.core.errors import BumpgateError
from bumpgate.env.build import Environment, NotInstallable, build
from bumpgate.env.inventory import Distribution
from bumpgate.env.lane import LaneContext, lane_request
from bumpgate.wheels import fitting
from bumpgate.wheels.fitting import VARIABLE, Fitted, Fitter, missing
from suites.support.planted import planted
from tests.support import builds
from tests.support.builds import JUDGE, bisecting, make_builds
from tests.support.lane_files import FAST, declare_lanes, write_lane
from tests.support.local_index import LocalIndex, fake_wheel, isolated

# Weeks whose torch has a wheel of the package fast.
FITTING = (0, 2, 3, 11)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalIndex]:
    with LocalIndex() as served:
        make_builds(tmp_path_factory.mktemp("wheels"), served, torch_fault=3)
        yield served


@pytest.fixture
def tree(index: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolated(monkeypatch, tmp_path, index.url)
    declare_lanes(tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "bumpgate"\n[project.optional-dependencies]\nh200 = []\n'
    )
    (tmp_path / "baselines").mkdir()
    write_lane(tmp_path, "h200", FAST.format(torch="2.0.0"))
    for week in FITTING:
        label = f"1.0+torch{'.'.join(builds.torch(week).split('.')[:2])}"
        fake_wheel(tmp_path / "links", "fast", label, requires=["torch"])
    return tmp_path


def test_bisect_installs_the_wheels_that_fit_each_version(tree: Path) -> None:
    arguments = ("--lane", "h200", "--good", "2.0.0", "--bad", "2.11.0", "--find-links", str(tree / "links"))
    with bisecting(tree) as run:
        ran = run(*arguments, "--command", JUDGE, "--out", "out")
    answer = json.loads((tree / "out" / "bisect.json").read_text())
    assert (ran.code, ran.err, answer["suspects"]) == (0, "", ["2.3.0"])
    assert [change["name"] for change in answer["at_fault"]] == ["torch"], "fast follows torch"
    readings = [json.loads(path.read_text()) for path in (tree / "out").glob("probes/*/reading.json")]
    found = {reading["packages"]["torch"]: reading["packages"].get("fast") for reading in readings}
    fitting_labels = {builds.torch(week): f"1.0+torch2.{week}" for week in FITTING}
    assert len(found) >= 4
    assert found == {torch: fitting_labels.get(torch) for torch in found}


def test_suites_are_given_the_reason_for_an_absent_wheel(tree: Path) -> None:
    fitter = Fitter(LaneContext(tree, "h200"), (str(tree / "links"),))
    with_wheel, without = (fitter(lane_request(tree, "h200", f"torch==2.{week}.0")) for week in (2, 5))
    assert fitter.variables(with_wheel) == {}
    reason = json.loads(fitter.variables(without)[VARIABLE])["fast"]
    assert "is built for torch 2.0, not 2.5.0" in reason
    assert fitter(lane_request(tree, "h200", "torch==2.2.0")) == with_wheel


def test_wheel_that_was_given_up_is_added_where_it_fits(tree: Path) -> None:
    """Where none fits, its absence needs no reason: the suites read it from the lane."""
    write_lane(tree, "h200", FAST.format(torch="2.0.0"), without=["fast"])
    fitter = Fitter(LaneContext(tree, "h200"), (str(tree / "links"),))
    fits, none = (fitter(lane_request(tree, "h200", f"torch==2.{week}.0")) for week in (2, 5))
    assert (fits.packages.get("fast"), none.packages.get("fast")) == ("1.0+torch2.2", None)
    assert fitter.variables(fits) == fitter.variables(none) == {}
    assert fitter.names == {"fast"}, "it follows torch in a bisect"
    assert missing(LaneContext(tree, "h200"), none.python) == {}, "the adopted set does not need it"


@pytest.mark.parametrize("key", ["a", "b", "c"])
def test_environment_without_its_wheels_is_released(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the wheels that fit it are none."""
    bare, made = (Environment("torch", Path("python"), k) for k in ("b", key))
    released: list[str] = []
    monkeypatch.setattr(fitting, "build", lambda request: bare)
    monkeypatch.setattr(fitting, "fit", lambda *_: Fitted(made, None, {}))  # type: ignore[arg-type]
    monkeypatch.setattr(fitting, "release", lambda environment: released.append(environment.key))
    assert Fitter(None, ())(None) is made  # type: ignore[arg-type]
    assert released == ([] if key == "b" else ["b"])


@planted("C39", "a package outside the manifest that was built for another torch")
def test_environment_with_a_package_of_another_torch_is_refused(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = lane_request(tree, "h200", "torch==2.4.0")
    made = build(request)
    take, built_on_torch = fitting.take, fitting.abi.built_on_torch
    vision = Distribution("vision", "1.0+torch2.3")
    monkeypatch.setattr(
        fitting,
        "take",
        lambda child: replace(take(child), distributions={**take(child).distributions, "vision": (vision,)}),
    )
    monkeypatch.setattr(
        fitting.abi, "built_on_torch", lambda found: [*built_on_torch(found), *found.distributions["vision"]]
    )
    with pytest.raises(BumpgateError, match="vision was not built for this torch; uninstall it") as caught:
        missing(LaneContext(tree, "h200"), made.python)
    assert "vision 1.0+torch2.3 is built for torch 2.3, not 2.4.0" in str(caught.value)
    with pytest.raises(NotInstallable, match="vision was not built for this torch"):
        Fitter(LaneContext(tree, "h200"), ())(request)
