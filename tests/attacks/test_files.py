"""A damaged baseline is one line with its fix, or red."""

from __future__ import annotations

import json

import pytest

from tests.support.project import GOOD, Project, counted

GATE = ("-m", "cpu", "-n", "0", "--gate")
# Name -> content of baselines/cpu.json.
ROW = {
    "value": 14,
    "unit": "breaks",
    "better": "derived",
    "tolerance": 0.0,
    "note": "",
    "test": "",
    "per_build": False,
}
DAMAGED = {
    "empty": "",
    "cut off": '{"schema": 1, "lane": "cpu", "rows": {',
    "merge conflict": "<<<<<<< HEAD\n{}\n=======\n",
    "not UTF-8": "\udcff",
    "a list": "[]",
    "another schema": '{"schema": 99, "lane": "cpu", "made_with": {}, "rows": {}}',
    "another lane": '{"schema": 1, "lane": "h200", "made_with": {}, "rows": {}}',
    "no rows": '{"schema": 1, "lane": "cpu", "made_with": {}}',
    "a row twice": '{"schema": 1, "lane": "cpu", "made_with": {}, "rows": {"a/b/c": {}, "a/b/c": {}}}',
    "NaN": json.dumps(
        {"schema": 1, "lane": "cpu", "made_with": {}, "rows": {"a/b/c": ROW | {"value": float("nan")}}}
    ),
    "1e400": json.dumps({"schema": 1, "lane": "cpu", "made_with": {}, "rows": {"a/b/c": ROW}}).replace(
        "14", "1e400"
    ),
    "null": json.dumps(
        {"schema": 1, "lane": "cpu", "made_with": {}, "rows": {"a/b/c": ROW | {"value": None}}}
    ),
    "no id": json.dumps({"schema": 1, "lane": "cpu", "made_with": {}, "rows": {"a/../c": ROW}}),
    "deep": "[" * 100_000,
    "no row of the test": '{"schema": 1, "lane": "cpu", "made_with": {}, "rows": {}}',
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_baseline_is_one_line_or_red(project: Project, what: str) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    (project.root / "baselines/cpu.json").write_bytes(DAMAGED[what].encode(errors="surrogateescape"))
    result = project.pytest(*GATE)
    assert result.code in (1, 4), result.out
    assert "Traceback" not in result.out + result.err
    if result.code == 4:
        (line,) = [line for line in result.err.splitlines() if line.startswith("ERROR: ")]
        assert "git checkout baselines/cpu.json" in line
