"""Text of others: what is printed and written has no secret and no control character."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bumpgate.cli import main
from bumpgate.core.accepted import load as load_accepted
from bumpgate.core.errors import BumpgateError, loads, one_line
from bumpgate.core.rows import (
    Judgement,
    Problem,
    ProblemKind,
    Record,
    Row,
    Verdict,
    read_record,
    write_record,
)
from bumpgate.core.text import printable, redacted
from bumpgate.env import uv
from bumpgate.table import verdict_table

SECRET = "SECRETPW-1234"


@pytest.mark.parametrize(
    "text",
    [
        f"--index http://user:{SECRET}@host/index",
        f"torch @ http://user:{SECRET}@host/x.whl",
        f"https://{SECRET}@host/index: 404",
        f"https://u:with@{SECRET}@host/index: 404",
        f"postgresql+psycopg://h/x?password={SECRET}",
        f"https://h/x?a=1&X-Amz-Signature={SECRET}&b=2",
        f"https://h/x?access_token={SECRET}",
        f"postgres//u:{SECRET}@h/x",
        f"://u:{SECRET}@h",
        f"host=h user=u password={SECRET} dbname=x",
        f"AssertionError: {SECRET} was refused",
        "AssertionError: word-two-of-it",
    ],
)
def test_no_secret_is_left_in_a_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", f"{SECRET} word-two-of-it")
    if "refused" not in text and "word" not in text:
        monkeypatch.delenv("GITHUB_TOKEN")
    assert redacted(text) != text
    assert SECRET not in redacted(text)
    assert "word-two" not in redacted(text)
    assert SECRET not in one_line(text)


@pytest.mark.parametrize(
    "text",
    [
        "git@github.com: denied",
        "https://host/index/torch-2.0-cp311-cp311-linux_x86_64.whl#sha256=0123",
        "tests/test_a.py::test_b[cpu:0@2]",
        "seed=3; tokens=64; a mail to a@b.c",
        "true",
    ],
)
def test_other_text_is_kept(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "tests/test_a.py")
    monkeypatch.setenv("SOME_TOKEN", "true")  # too short for a secret
    monkeypatch.setenv("SECRET_FILE", "https://host/index/")
    assert redacted(text) == text


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[2Jb\r\x07\x9b\u202e\ud800\n\tc") == "a\\x1b[2Jb\\r\\x07\\x9b\\u202e\\ud800\n\tc"
    assert printable("Größe 3 µs → ✓") == "Größe 3 µs → ✓"
    assert one_line("a\x1b[8m\nb") == "a\\x1b[8m b"
    raw = {"\x1b": ["\x9b", {"a": "\x00", "n": 1}], "plain": "a\\u001b"}
    for text in (json.dumps(raw), json.dumps(raw, ensure_ascii=False).encode()):
        assert loads(text) == {"\\x1b": ["\\x9b", {"a": "\\x00", "n": 1}], "plain": "a\\u001b"}


def test_a_record_has_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    problem = Problem("test_a", ProblemKind.FAILED, f"{SECRET}\x1b[2J")
    path = tmp_path / "record.json"
    record = write_record(path, {"lane": "cpu"}, [], problems=[problem])
    for text in (path.read_text(), verdict_table(record, "record.json"), str(read_record(path).problems)):
        assert "***" in text
        assert SECRET not in text
        assert "\x1b" not in text


def test_a_log_of_uv_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(uv, "find_uv", lambda: "/bin/echo")
    _, output = uv.run_uv(["--index", f"http://u:{SECRET}@h"], log)
    assert output.strip() == "--index http://h"
    assert SECRET not in log.read_text()


def test_an_owner_with_an_escape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "accepted.toml"
    path.write_text('[[accepted]]\nlane = "cpu"\nrow = "a/b/c"\nowner = "\\u001b[2J"\nreason = "x"\n')
    with pytest.raises(BumpgateError) as refused:
        load_accepted(path)
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["history", "ROW", "--store", f"postgres//u:{SECRET}@h/x"],
        ["history", "ROW", "--store", f"://u:{SECRET}@h"],
        ["versions", "torch", "--index", f"http://u:{SECRET}@127.0.0.1:9/x\x1b[2J"],
        ["gate", "--lane", f"\x1b[2J//u:{SECRET}@h"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_message_has_neither(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bumpgate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 4
    assert len((out + err).splitlines()) == 1
    assert SECRET not in out + err
    assert "\x1b" not in out + err


def test_rows_not_judged_for_one_reason_are_one_entry() -> None:
    unlike = "this host's launch/launch_microseconds: 9 us, reviewed 6 us"
    why = {"a/b/x": unlike, "a/b/y": unlike, "a/b/z": "another"}
    judged = [
        Judgement(Row(id, 2.0, "s", 1, "C37"), Verdict.INCONCLUSIVE, reason, explains=True, reviewed=1.0)
        for id, reason in why.items()
    ]
    shown = verdict_table(Record({}, tuple(judged)), "record.json").splitlines()
    assert shown[0] == "INCONCLUSIVE (not judged) a/b/z: another"
    at = shown.index(f"INCONCLUSIVE (not judged) 2 rows: {unlike}")
    assert [line.strip() for line in shown[at + 1 : at + 3]] == [
        "a/b/x: 2 s, reviewed 1",
        "a/b/y: 2 s, reviewed 1",
    ]
