"""Sources of a change between two environments, by their packages' metadata."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from bumpgate.bisect import wheel_metadata
from bumpgate.bisect.attribution import Mixture, attribute, changes
from bumpgate.bisect.search import BAD, GOOD, SKIP, ProbeOutcome
from bumpgate.env.build import Environment


def environment(
    folder: Path, name: str, version: str, requires: Iterable[str] = (), **more: str
) -> Environment:
    site = folder / "lib/python3.11/site-packages"
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    lines += [f"Home-page: {more['home']}"] if "home" in more else []
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    if "commit" in more:
        (site / name).mkdir()
        (site / name / "version.py").write_text(f"__version__ = 'x'\ngit_version: str = '{more['commit']}'\n")
    return Environment(name, folder / "bin/python", "key", {name: version})


def test_torch_is_grouped_with_its_pinned_cuda_libraries(tmp_path: Path) -> None:
    cublas = "nvidia-cublas==13.1.0.3; platform_system == 'Linux'"
    old = environment(
        tmp_path / "a", "torch", "2.13.0", [cublas, "nvidia-nccl-cu13>=2", "triton==3.7.1", "sympy"]
    )
    new = environment(tmp_path / "b", "torch", "2.14.0", ["cuda-bindings==13.0"])
    assert wheel_metadata.together(old, new) == [{"torch", "nvidia-cublas", "cuda-bindings"}], (
        "triton is a separate group"
    )


CUDA_12 = [f"nvidia-{name}-cu12" for name in ("cudart", "cublas", "cufft", "cufile", "nvjitlink")]
CUDA_13 = {"cublas": "==13.1.0.3.*", "cufft": "==12.0.*", "cufile": "==1.15.*", "nvjitlink": "<14,>=13.0"}


def cuda_step(folder: Path) -> list[Environment]:
    """The requirements of torch 2.10 (CUDA 12, each library pinned) and 2.11 (CUDA 13, through cuda-toolkit)."""
    linux, triton = "; platform_system == 'Linux'", "triton==3.6.0"
    pins = [f"{name}==12.8{linux}" for name in CUDA_12]
    old = environment(folder / "a", "torch", "2.10.0", [*pins, triton])
    toolkit = f"cuda-toolkit[cublas,cufft,cufile]==13.0.2{linux}"
    new = environment(folder / "b", "torch", "2.11.0", [toolkit, "nvidia-nccl-cu13==2.28.9", triton])
    requires = [f"nvidia-{name}{pin}; extra == '{name}'" for name, pin in CUDA_13.items()]
    environment(folder / "b", "cuda-toolkit", "13.0.2", [*requires, "nvidia-npp==13.0.*; extra == 'npp'"])
    environment(folder / "b", "nvidia-cufft", "12.0.1", ["nvidia-nvjitlink"])
    before = dict.fromkeys(CUDA_12, "12.8") | {"torch": "2.10.0", "triton": "3.6.0", "setuptools": "80.1"}
    after = {"torch": "2.11.0", "triton": "3.6.0", "setuptools": "80.9", "numpy": "2.4.0"}
    after |= {"cuda-toolkit": "13.0.2", "nvidia-nccl-cu13": "2.28.9", "cuda-bindings": "13.0.3"}
    after |= {f"nvidia-{name}": "13" for name in CUDA_13}
    return [replace(old, packages=before), replace(new, packages=after)]


@pytest.mark.parametrize(("culprit", "most"), [("torch", 2), ("numpy", 6)])
def test_cuda_12_to_13_step_takes_few_mixtures(tmp_path: Path, culprit: str, most: int) -> None:
    """torch needs the libraries of its own CUDA: a mixture does not import. The search has read both endpoints."""
    old, new = cuda_step(tmp_path)
    every = frozenset(change.name for change in changes(old.packages, new.packages))
    seen: list[Mixture] = []

    def probe(mixture: Mixture, packages: dict[str, str]) -> ProbeOutcome:
        seen.append(mixture)
        cuda_13 = not packages.keys().isdisjoint({"nvidia-cufile", "cuda-toolkit", "nvidia-nvjitlink"})
        if cuda_13 != (packages["torch"] == "2.11.0"):
            return SKIP
        return BAD if culprit in mixture else GOOD

    groups = wheel_metadata.together(old, new)
    known = [(frozenset[str](), GOOD), (every, BAD)]
    found = attribute(old.packages, new.packages, probe, groups, known=known, first="torch")
    assert culprit in {change.name for change in found.changes}
    assert (found.unresolved, found.needed, found.separable) == (0, True, True)
    assert len(seen) <= most, seen


def test_compare_link_uses_wheel_metadata(tmp_path: Path) -> None:
    home = "https://github.com/triton-lang/triton/"
    old = environment(tmp_path / "a", "triton", "3.7.0+gitabcdef12", home=home)
    new = environment(tmp_path / "b", "triton", "3.7.1", home=home, commit="9" * 40)
    link = wheel_metadata.compare_link(old, new, "triton")
    assert link == f"https://github.com/triton-lang/triton/compare/abcdef12...{'9' * 40}"
    silent = environment(tmp_path / "c", "triton", "3.7.2", home=home)
    elsewhere = environment(tmp_path / "d", "triton", "3.7.3", home="https://pytorch.org", commit="8" * 40)
    assert wheel_metadata.compare_link(old, silent, "triton") == ""
    assert wheel_metadata.compare_link(elsewhere, elsewhere, "triton") == ""
