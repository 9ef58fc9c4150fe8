"""`bumpgate gate --command`: a generated test that reports the metrics of a command as rows, for projects without
pytest tests. bumpgate/plugin/metrics.py runs the command and reads what it prints.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from bumpgate.core.rows import write_atomic
from bumpgate.process.child import require_syntax
from bumpgate.process.tree_digest import GENERATED

TEST = '''"""Written by `bumpgate gate --command`."""

import pytest

from bumpgate.plugin.metrics import report


@pytest.mark.{lane}
def test_command(row, exclusive_machine):
    report(row, {command!r})
'''


def test_path(lane: str, command: str) -> str:
    """Return the path of the generated test below the root, where its node id holds in both environments.

    It is another one for each command, so that gates of several commands can run at the same time.
    """
    return f"{GENERATED}{lane}_{hashlib.sha256(command.encode()).hexdigest()[:12]}.py"


def write_test(root: Path, lane: str, command: str) -> None:
    """Write the generated test of a command. Raises BumpgateError (one line) if the shell cannot parse it."""
    require_syntax(command)
    path = root / test_path(lane, command)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, TEST.format(lane=lane, command=command))
