"""The table of a lane's seconds by suite and by test."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bumpgate.core.errors import BumpgateError
from tools.lane_seconds import LONGEST, main, read, table


def test_table_orders_by_the_last_run_and_keeps_the_sum() -> None:
    cold = {f"suites/a/test_a.py::test[{i}]": 1.0 for i in range(LONGEST + 5)}
    warm = {**dict.fromkeys(cold, 0.5), "suites/b/test_b.py::test": 20.0}
    text = table([cold, warm], ["cold", "warm"])
    assert "| suite | cold | warm |\n|---|---|---|\n| `suites/b` | 0 | 20 |\n| `suites/a` | 30 | 15 |" in text
    assert "| `suites/b/test_b.py::test` | 0 | 20 |\n" in text
    assert "| 6 others | 6 | 3 |\n| sum | 30 | 35 |" in text


def test_command_writes_a_column_for_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, page = tmp_path / "h200.json", tmp_path / "page.md"
    file.write_text(json.dumps({"suites/a/test_a.py::test": 2.4}))
    monkeypatch.setattr(sys, "argv", ["lane_seconds", str(file), "--out", str(page)])
    main()
    assert page.read_text().startswith("| suite | h200 |\n|---|---|\n| `suites/a` | 2 |\n")


def test_command_refuses_a_bad_file_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lane_seconds", str(tmp_path / "absent")])
    with pytest.raises(SystemExit, match="4"):
        main()
    assert capsys.readouterr().err == f"{tmp_path / 'absent'}: cannot be read (No such file or directory)\n"


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": "x"}'])
def test_other_file_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "h200.json"
    file.write_text(text)
    with pytest.raises(BumpgateError, match="not a file of seconds by test"):
        read(file)
    with pytest.raises(BumpgateError, match="cannot be read"):
        read(tmp_path / "absent")
