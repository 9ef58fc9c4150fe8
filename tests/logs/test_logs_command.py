"""The command `bumpgate logs`: exit codes, output and refused arguments. suites/launch/test_logs.py has its reader."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bumpgate import cli
from bumpgate.logs import ALERT, CLEAN, UNKNOWN
from suites.launch.test_logs import FILES, HERE


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """Run `bumpgate logs` in this process; return its exit code and output."""

    def call(*arguments: str, stdin: str = "") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["bumpgate", "logs", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), "".join(capsys.readouterr())

    return call


def test_logs_command(tmp_path: Path, run) -> None:
    path = tmp_path / "x.log"
    breaks = [line for line in FILES["breaks"] if "Tensor.item()" not in line]
    shown = r"ALERT +recompile_limit: 2 events on 2 ranks, first \S+:\d+ rank [01]"
    for lines, options, expected, words in (
        (["step 1 loss 2.5\n"], (), CLEAN, r"^1 lines, 0 unknown events\n$"),
        (FILES["ranks"], (), ALERT, shown),
        (FILES["ranks"], ("--markdown",), ALERT, "^### First cause: "),
        (FILES["builtin"], ("--bound", "recompile=0"), CLEAN, ""),
        (breaks, ("--bound", "graph_break=4"), UNKNOWN, ""),
        (breaks, ("--bound", "graph_break=3"), ALERT, ""),
    ):
        path.write_text("".join(lines))
        code, text = run(str(path), *options)
        assert (code, bool(re.search(words, text))) == (expected, True), (options, text)
    path.write_text(HERE + "new\n")
    code, text = run(str(path), "--json")
    assert (code, json.loads(text)["unknown"][0]["first"]["level"]) == (UNKNOWN, "W")
    assert run("-", stdin="step 1 loss: nan\n")[0] == ALERT
    bound = [str(path), "--bound"]
    for wrong in (["/absent/x.log"], [], [*bound, "disk_full=1"], [*bound, "graph_break"]):
        code, text = run(*wrong)
        assert (code, text.count("\n")) == (4, 1), wrong
