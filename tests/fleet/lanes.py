"""A repository with the lanes `mine` and `other`, and an interpreter for each side of a gate."""

from __future__ import annotations

from pathlib import Path

from tests.support.foreign import LANE, Foreign
from tests.support.project import package_of_side, wrapped_python

SIDES = ("--python-adopted", ".good/python", "--python-candidate", ".bad/python")
PYTHONS = (*SIDES, "--command", "python bench.py")
ROW = '{"name": "graphs", "value": 3, "unit": "graphs", "better": "exact"}'


def two_lanes(folder: Path, more: str = "") -> Foreign:
    """Write the repository. more: further lines of the program that both lanes measure."""
    made = Foreign(folder)
    made.write("bumpgate.toml", LANE + LANE.replace("mine", "other"))
    made.write("torch.py", "")
    for side, name in (("good", "adopted"), ("bad", "candidate")):
        site = package_of_side(folder / f".{side}/site", name)
        made.write(f".{side}/python", wrapped_python(site=site, SIDE=side))
        (folder / f".{side}/python").chmod(0o755)
    made.write("bench.py", f"import os\nprint('{ROW}')\n{more}")
    return made
