"""The lanes of this repository in a folder that has none of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from bumpgate.core.toml import tomllib
from bumpgate.env.locks import Lock, lock_text

ROOT = Path(__file__).resolve().parents[2]
# What describes the packages of this repository's lanes, and no machine.
OF_PACKAGES = ("wheels", "without")
# A lane with one kernel wheel, of the package fast.
FAST = """[wheels.fast]
version = "1.0"
torch = "{torch}"
"""


def declare_lanes(root: Path) -> None:
    """Declare the lanes without their kernel wheels, in a folder for each."""
    for path in (ROOT / "lanes").glob("*/lane.toml"):
        write_lane(root, path.parent.name)


def write_lane(root: Path, name: str, text: str = "", **fields: Any) -> Path:
    """Declare a lane of this repository without its kernel wheels; text and fields are added to it."""
    table = tomllib.loads((ROOT / "lanes" / name / "lane.toml").read_text())
    table = {key: value for key, value in table.items() if key not in OF_PACKAGES}
    path = root / "lanes" / name / "lane.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{tomli_w.dumps(table | fields)}\n{text}")
    return path


def save_lock(path: Path, lock: Lock) -> None:
    """Write a lock in the committed form; the folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lock_text(lock))
