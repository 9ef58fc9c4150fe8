"""`bumpgate bisect --environments`: prepared environments as candidates, and mixtures of them for attribution."""

from __future__ import annotations

import shutil
import venv
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bumpgate.bisect.candidates import Prepared
from bumpgate.env.build import Environment
from bumpgate.env.installation import NotInstallable
from bumpgate.env.request import Request
from tests.support.builds import JUDGE, TORCH, Bisect, answer_of, bisecting

Make = Callable[..., None]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make the environment envs/NAME with these versions. torch_fault, triton_fault: whether the package is broken."""

    def make(name: str, *, torch_fault: bool, triton_fault: bool = False, **versions: str) -> None:
        place = tmp_path / "envs" / name
        venv.create(place, symlinks=True)
        (site,) = place.glob("lib/python*/site-packages")
        sources = {"torch": TORCH.format(fault=int(torch_fault)), "triton": f"FAULT = {int(triton_fault)}\n"}
        for package, version in versions.items():
            (site / f"{package}.py").write_text(sources.get(package, ""))
            info = site / f"{package}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")

    return make


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Bisect]:
    with bisecting(tmp_path) as call:
        yield partial(call, "--environments", "envs", "--command", JUDGE, "--out", "out")


def test_first_bad_environment_and_package_are_found(run: Bisect, make: Make, tmp_path: Path) -> None:
    """torch and its CUDA library always move together, so they are blamed together and triton is not."""
    for week, broken in ((1, False), (2, False), (3, True), (4, True)):
        versions = {"torch": f"2.{week}.0+cu130", "triton": f"3.{week}.0", "cudart": f"13.{week}"}
        make(f"week-{week}", torch_fault=broken, **versions)
    make("with-old-triton", torch_fault=True, torch="2.3.0+cu130", triton="3.2.0", cudart="13.3")
    make("with-new-triton", torch_fault=False, torch="2.2.0+cu130", triton="3.3.0", cudart="13.2")
    ran = run("--good", "2.1.0", "--bad", "2.4.0", "--false-bad", "0.001", "--false-good", "0.002")
    assert ran.code == 0, ran.err
    answer = answer_of(tmp_path / "out")
    assert answer["first"] == "2.3.0+cu130"
    assert answer["noise"] == {"false_bad": 0.001, "false_good": 0.002}
    assert [change["name"] for change in answer["at_fault"]] == ["cudart", "torch"]
    assert answer["attribution"]["separable"]
    assert "at fault    cudart 13.2 -> 13.3, torch 2.2.0+cu130 -> 2.3.0+cu130\n" in ran.out
    assert "envs/week-3/bin/python -c" in answer["repro"]


def test_mixtures_are_read_again_under_the_stated_noise(run: Bisect, make: Make, tmp_path: Path) -> None:
    make("old", torch_fault=False, torch="2.1.0", triton="3.1.0")
    make("new", torch_fault=True, torch="2.2.0", triton="3.2.0")
    make("with-old-triton", torch_fault=True, torch="2.2.0", triton="3.1.0")
    make("with-new-triton", torch_fault=False, torch="2.1.0", triton="3.2.0")
    ends = ("--good", "2.1.0", "--bad", "2.2.0")
    probes = {}
    for rate in ("0", "0.1"):
        ran = run(*ends, "--false-bad", rate, "--false-good", rate)
        assert ran.code == 0, ran.err
        answer = answer_of(tmp_path / "out")
        assert [change["name"] for change in answer["at_fault"]] == ["torch"]
        probes[rate] = (answer["attribution"]["probes"], answer["attribution"]["mixtures"])
        shutil.rmtree(tmp_path / "out")
    assert probes["0"] == (4, 4), "the two ends count"
    assert probes["0.1"][0] > probes["0.1"][1] == 4


def make_two(make: Make) -> None:
    for week, broken in ((1, False), (2, True)):
        make(f"e{week}", torch_fault=broken, torch=f"2.{week}.0", triton=f"3.{week}.0")


def test_missing_mixture_is_not_separable(run: Bisect, make: Make, tmp_path: Path) -> None:
    make_two(make)
    make("e2-old-triton", torch_fault=True, torch="2.2.0", triton="3.1.0")
    ran = run("--good", "2.1.0", "--bad", "2.2.0")
    assert ran.code == 0, ran.err
    assert not answer_of(tmp_path / "out")["attribution"]["separable"]
    assert "not separable, 1 mixtures could not be run" in ran.out


def test_mixture_has_the_packages_of_both_sides_and_no_others() -> None:
    old, new = {"torch": "2.1.0", "triton": "3.1.0"}, {"torch": "2.2.0", "triton": "3.2.0"}
    less, more = {"torch": "2.2.0"}, {"torch": "2.2.0", "triton": "3.1.0", "jax": "1.0"}
    prepared = Prepared(Path("envs"), "torch")
    named = (
        Environment(f"e{i}", Path("python"), f"e{i}", has) for i, has in enumerate((old, new, less, more))
    )
    vars(prepared)["environments"] = tuple(named)
    both = prepared.environments[:2]
    assert prepared.together(*both) == [{"torch", "triton"}], "no mixture separates them"
    mixture = Request(("torch===2.2.0", "triton===3.1.0"), dependencies=False)
    with pytest.raises(NotInstallable, match="no environment of envs has it"):
        prepared(mixture)
    assert prepared(replace(mixture, dependencies=True)).packages == more


def test_bisect_of_prepared_environments_resumes(run: Bisect, make: Make, tmp_path: Path) -> None:
    make_two(make)
    assert run("--good", "2.1.0", "--bad", "2.2.0").code == 0
    again = run("--good", "2.1.0", "--bad", "2.2.0", "--resume")
    assert again.code == 0
    assert "resuming after" in again.out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--find-links", "envs"), "--environments gives the complete environment: leave out --index"),
        (("--package", "jax"), "--environments envs: no NAME/bin/python in it has jax installed"),
        (("--good", "1.0.0"), "torch 1.0.0 is not among the 1 versions here"),
        (("--command", "python 'x"), 'bumpgate: --command "python \'x": '),
    ],
)
def test_wrong_option_with_environments_is_one_line(
    run: Bisect, make: Make, more: tuple[str, ...], words: str
) -> None:
    make("e1", torch_fault=False, torch="2.1.0", triton="3.1.0")
    ran = run("--good", "2.1.0", "--bad", "2.2.0", *more)
    assert ran.code == 4
    assert words in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def test_environment_that_does_not_run_is_named(run: Bisect, make: Make, tmp_path: Path) -> None:
    make("e1", torch_fault=False, torch="2.1.0", triton="3.1.0")
    python = tmp_path / "envs" / "e1" / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    python.chmod(0o755)
    ran = run("--good", "2.1.0", "--bad", "2.2.0")
    assert ran.code == 4
    assert "envs/e1/bin/python does not run: exit 3: broken" in ran.err
