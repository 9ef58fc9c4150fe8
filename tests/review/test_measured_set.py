"""The set that a gate measured: its lock must be what the candidate had, and nothing of the adopted side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core.findings import Decision
from bumpgate.core.gate_file import GateFile, GateSide
from bumpgate.core.rows import Record
from bumpgate.process.file_transaction import AdoptionError
from bumpgate.review.measured_set import Named, measured_set

PACKAGE = """
[[packages]]
name = "{name}"
version = "1.0"
wheels = [{{url = "https://h/{name}-1.0-py3-none-any.whl", hashes = {{sha256 = "{sha256}"}}}}]
"""
BOTH = {"torch": "1.0", "triton": "1.0"}


def gate(
    folder: Path, adopted: Mapping[str, str], candidate: Mapping[str, str]
) -> tuple[Any, Path, GateFile, Named]:
    packages = (PACKAGE.format(name=name, sha256=f"{i}" * 64) for i, name in enumerate(BOTH))
    (folder / "candidate.pylock.toml").write_text(
        'lock-version = "1.0"\ncreated-by = "uv"\n' + "".join(packages)
    )
    record = Record({"python": "3.11.7"}, ())
    sides = [GateSide("torch 1.0", record, packages=packages) for packages in (adopted, candidate)]
    read = GateFile(
        "cpu", Decision.ADOPT, "", 0.0, "", *sides, (), {}, {}, (), config={"candidate": "torch==1.0"}
    )
    return None, folder / "gate.json", read, Named()


def test_lock_is_the_set_of_the_candidate(tmp_path: Path) -> None:
    found = measured_set(*gate(tmp_path, {}, BOTH))
    assert (found.candidate, dict(found.lock.versions)) == ("torch==1.0", BOTH)


@pytest.mark.parametrize("candidate", [{"torch": "1.0"}, BOTH | {"triton": "2.0"}])
def test_package_that_only_the_adopted_side_has_is_refused(
    tmp_path: Path, candidate: Mapping[str, str]
) -> None:
    with pytest.raises(AdoptionError, match=r"is not the set that was measured \(triton 1.0 -> "):
        measured_set(*gate(tmp_path, BOTH, candidate))
