"""The table of the commands is measured on a real lane, history and index."""

from __future__ import annotations

import pytest

from tools import scale_commands


@pytest.mark.long(25)
def test_commands_are_timed_in_a_project(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROWS": (3,), "GATES": 2, "READINGS": 40, "VERSIONS": 5, "REPEATS": 1}.items():
        monkeypatch.setattr(scale_commands, name, value)
    lines = scale_commands.command_table().splitlines()
    names = [line.split("`")[1].split()[0] for line in lines[2:]]
    assert names == [
        "--help",
        "rebaseline",
        "report",
        "report",
        "history",
        "history",
        "findings",
        "notify",
        "dashboard",
        "versions",
        "environments",
    ]
    said: list[str] = []
    assert scale_commands.lane_table(said.append).splitlines()[2:] == said
    assert said[0].startswith("| 3 | ")


def test_command_that_fails_ends_the_measurement() -> None:
    with scale_commands.project() as made, pytest.raises(SystemExit, match="unknown lane"):
        made.bumpgate("rebaseline", "--lane", "other")
