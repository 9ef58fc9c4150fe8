"""The environment of a lane: its adopted set, and a candidate in the place of one package."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.core.errors import BumpgateError
from bumpgate.env.build import BuildError, build
from bumpgate.env.freeze import freeze
from bumpgate.env.lane import LaneContext, lane_lock, lane_request
from tests.support.lane_files import FAST, write_lane
from tests.support.local_index import LocalIndex, fake_wheel


def test_candidate_replaces_only_its_own_pin(index: LocalIndex, tree: Path) -> None:
    assert build(lane_request(tree, "cpu")).packages == {"helper": "2.0", "torch": "1.0", "triton": "3.0"}
    digest = "0" * 64
    lane_lock(tree, "cpu").write_text(
        'lock-version = "1.0"\ncreated-by = "t"\n[[packages]]\nname = "helper"\nversion = "1.0"\n'
        f'wheels = [{{ name = "helper-1.0-py3-none-any.whl", path = "x", hashes = {{ sha256 = "{digest}" }} }}]\n'
    )
    request = lane_request(tree, "cpu", "torch==1.1")
    assert request.requirements == ("torch==1.1", "helper>=1")
    assert not request.refresh
    assert build(request).packages == {"helper": "1.0", "torch": "1.1", "triton": "3.1"}
    assert lane_request(tree, "cpu", "torch>=1.0").refresh
    assert lane_request(tree, "h200", "triton==3.0").requirements == ("triton==3.0", "helper>=1")


@pytest.fixture
def device_tree(index: LocalIndex, tree: Path, tmp_path: Path) -> Path:
    """A lane with its own pins: triton, a pair that pins itself, an extra, and a kernel wheel outside the index."""
    write_lane(tree, "h200", FAST.format(torch="1.0+cu130"))
    pins = '"torch==1.0", "triton==3.0", "jax==1.0", "jaxlib==1.0", "ray[tune]==2.0"'
    project = (tree / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(project.replace("h200 = [", f"h200 = [{pins}, "))
    for version in ("1.0", "2.0", "3.0"):
        folder = tmp_path / "wheels"
        index.add(fake_wheel(folder, "jax", version, requires=[f"jaxlib=={version}"]))
        index.add(fake_wheel(folder, "jaxlib", version))
    index.add(fake_wheel(folder, "ray", "2.0", requires=["tuner; extra == 'tune'"]))
    index.add(fake_wheel(folder, "tuner", "1.0"))
    for version in ("1.0", "1.1"):
        fake_wheel(tmp_path / "kernels", "fast", version, requires=["torch"])
    lock = freeze(LaneContext(tree, "h200"), find_links=(str(tmp_path / "kernels"),))
    ones = dict.fromkeys(("fast", "jax", "jaxlib", "torch", "tuner"), "1.0")
    assert lock.versions == ones | {"helper": "2.0", "ray": "2.0", "triton": "3.0"}
    return tree


def test_adopted_set_takes_local_wheels_by_hash(
    device_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUMPGATE_STORE", str(tmp_path / "empty"))
    links = (str(tmp_path / "kernels"),)
    assert build(lane_request(device_tree, "h200", find_links=links)).packages["fast"] == "1.0"
    changed = fake_wheel(tmp_path / "other", "fast", "1.0", "changed = True\n", requires=["torch"])
    with pytest.raises(BuildError, match=r"[Hh]ash"):
        build(lane_request(device_tree, "h200", find_links=(str(changed.parent),)), root=tmp_path / "again")


@pytest.mark.parametrize(
    ("candidate", "moved"),
    [
        ("torch==1.1", {"torch": "1.1", "triton": "3.1", "fast": None}),
        ("triton==3.1", {"triton": "3.1"}),
        ("jax==2.0", {"jax": "2.0", "jaxlib": "2.0"}),
        ("ray==2.0", {}),
    ],
)
def test_candidate_moves_only_conflicting_packages(
    candidate: str, moved: dict[str, str | None], device_tree: Path
) -> None:
    """What an extra brings would be missing on the candidate's side only, and torch would be blamed."""
    adopted = build(lane_request(device_tree, "h200")).packages
    found = build(lane_request(device_tree, "h200", candidate)).packages
    assert {n: found.get(n) for n in {*adopted, *found} if found.get(n) != adopted.get(n)} == moved


def test_paired_packages_move_to_one_minor_release(tree: Path) -> None:
    text = (tree / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(f'{text}v6e = ["torch==2.9.1", "torch_xla==2.9.0"]\n')
    assert lane_request(tree, "v6e", "torch_xla==2.8.1").requirements == ("torch_xla==2.8.1", "torch==2.8.*")
    assert lane_request(tree, "v6e", "torch==2.10.2").requirements == ("torch==2.10.2", "torch-xla==2.10.*")


def test_wheel_file_that_was_built_again_is_installed(index: LocalIndex, tree: Path, tmp_path: Path) -> None:
    found = []
    for body in ("first = 1\n", "second = 1\n"):
        mine = fake_wheel(tmp_path / "my wheels", "torch", "7.0+local", body, requires=["triton"])
        made = build(lane_request(tree, "cpu", str(mine)))
        assert made.packages["torch"] == "7.0+local"
        found += [p.read_text().endswith(body) for p in made.python.parents[1].rglob("torch/__init__.py")]
    assert found == [True, True]


@pytest.mark.parametrize(
    ("lane", "candidate", "links", "words"),
    [
        ("tpu", None, (), "unknown lane 'tpu'; lanes: cpu, h100, h100x4"),
        ("cpu", "torch=1.1", (), "invalid candidate"),
        ("cpu", "/none/torch-1.0-py3-none-any.whl", (), "no such wheel file"),
        ("cpu", "torch==1.1", ("none",), "^--find-links none: no such folder of wheels: name a folder, or"),
    ],
)
def test_bad_request_is_one_line(
    lane: str, candidate: str | None, links: tuple[str, ...], words: str, tree: Path
) -> None:
    with pytest.raises(BumpgateError, match=words) as caught:
        lane_request(tree, lane, candidate, find_links=links)
    assert "\n" not in str(caught.value)
