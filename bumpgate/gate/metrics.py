"""`bumpgate gate --command`: a generated test that reports the metrics of a command as rows, for projects without
pytest tests. bumpgate/plugin/metrics.py runs the command and reads what it prints.
"""

from __future__ import annotations

from pathlib import Path

from bumpgate.core.rows import write_atomic

TEST = '''"""Written by `bumpgate gate --command`."""

import pytest

from bumpgate.plugin.metrics import report


@pytest.mark.{lane}
def test_command(row, exclusive_machine):
    report(row, {command!r})
'''


def test_path(lane: str) -> str:
    """Return the path of the generated test below the root, where its node id holds in both environments."""
    return f"build/gate/test_command_{lane}.py"


def write_test(root: Path, lane: str, command: str) -> None:
    """Write the generated test of a command."""
    path = root / test_path(lane)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, TEST.format(lane=lane, command=command))
