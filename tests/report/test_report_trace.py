"""`bumpgate report --trace`: data of each compilation in torch's structured trace, and invalid files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core import gate_file
from bumpgate.report import command as report
from bumpgate.report import page, tlparse, trace
from bumpgate.report.trace import Trace
from tests.support.reports import EVIL, ParsedPage, bumpgate, held

HEAD = "V1121 13:07:50.129000 334 torch/_dynamo/convert_frame.py:304] "
BREAK = """Graph break in user code at /w/model/hybrid.py:{line}
Graph Break Reason: Skip calling `torch.compiler.disable()`d function
  Developer debug context: <function mblock at {address}>

User code traceback:
  File "/w/launch/train.py", line 140, in _one
"""
MISSED = "0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3"
HIT = {"key": "fhit", "cache_state": "hit", "components": ["[x] a line"]}
BYPASS = {"key": None, "cache_state": "bypass", "cache_bypass_reason": "no key of a HOP"}


@pytest.fixture(autouse=True)
def no_tlparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide tlparse, so that the tests do not depend on the machine."""
    monkeypatch.setattr(tlparse, "program", lambda: None)


def entry(fields: dict[str, Any], payload: str | None = None) -> str:
    """Return one record in the format of torch's formatter."""
    if payload is None:
        return f"{HEAD}{json.dumps(fields)}\n"
    fields = fields | {"has_payload": hashlib.md5(payload.encode()).hexdigest()}
    return HEAD + json.dumps(fields) + "".join(f"\n\t{line}" for line in payload.split("\n")) + "\n"


def compiling(number: int, **fields: Any) -> dict[str, Any]:
    """Return an envelope of the number-th compilation of frame 0."""
    return {"frame_id": 0, "frame_compile_id": number, "attempt": 0, **fields}


def artifact(number: int, name: str, payload: str, **more: Any) -> str:
    fields = {"name": name, "encoding": "string"}
    return entry(compiling(number, artifact=fields, **more), payload)


def started(number: int, line: int = 66, name: str = "forward") -> str:
    stack = [{"line": 9, "name": "main", "filename": 1}, {"line": line, "name": name, "filename": 0}]
    return entry(compiling(number, dynamo_start={"stack": stack}))


def whole() -> str:
    """A frame with two breaks at one line, and a recompilation; caches with each kind of result."""
    first = {
        "compile_id": "0/0",
        "co_name": "forward",
        "co_filename": "/w/model/hybrid.py",
        "co_firstlineno": 66,
        "guard_count": 41,
        "dynamo_cumulative_compile_time_us": 3_000_000,
        "aot_autograd_cumulative_compile_time_us": 2_500_000,
        "inductor_cumulative_compile_time_us": 2_000_000,
        "inductor_code_gen_cumulative_compile_time_us": 500_000,
        "triton_compile_time_us": None,
        "entire_frame_compile_time_s": 3.0,
        "duration_us": 3_100_000,
        "fail_type": None,
    }
    backward = {
        "inductor_cumulative_compile_time_us": 800_000,
        "backward_cumulative_compile_time_us": 1_000_000,
        "duration_us": 1_000_000,
    }
    version = {"name": "torch_version", "encoding": "json"}
    return "".join(
        [
            entry({"str": ["/w/model/hybrid.py", 0]}),
            entry({"artifact": version}, json.dumps({"pytorch_version": "2.13.0+cpu"}, indent=0)),
            entry({"str": ["/w/launch/train.py", 1]}),
            started(0),
            entry({"chromium_event": {}}, '{"name": "dynamo",\n\n"ts": 1}'),
            artifact(0, "dynamo_graph_break_reason", BREAK.format(line=71, address="0x7f01")),
            artifact(0, "dynamo_graph_break_reason", BREAK.format(line=71, address="0x7f02")),
            artifact(0, "aotautograd_cache_bypass", json.dumps(BYPASS)),
            artifact(0, "fx_graph_cache_miss", json.dumps({"key": "fmiss", "cache_state": "miss"})),
            artifact(0, "aotautograd_cache_pickle_failure", "{}"),
            entry(compiling(0, compilation_metrics=first)),
            entry(compiling(0, bwd_compilation_metrics=backward)),
            started(1),
            artifact(1, "recompile_reasons", MISSED),
            artifact(1, "fx_graph_cache_hit", json.dumps(HIT), hint="an unknown field"),
            entry(compiling(1, compilation_metrics={"entire_frame_compile_time_s": 1.5})),
        ]
    )


def failed() -> str:
    """Rank 1: the frame of rank 0, but its compilation raised."""
    fields = {
        "entire_frame_compile_time_s": 0.4,
        "fail_type": "BackendCompilerFailed",
        "fail_reason": "no\nkernel",
    }
    return "".join(
        [
            entry({"str": ["/w/model/hybrid.py", 0], "rank": 1}),
            entry(
                compiling(0, dynamo_start={"stack": [{"line": 66, "name": "forward", "filename": 0}]}, rank=1)
            ),
            entry(compiling(0, compilation_metrics=fields, rank=1)),
        ]
    )


def written(folder: Path, **texts: str) -> Path:
    """Write a folder like TORCH_TRACE: one file per process, with the rank in its name if any."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"dedicated_log_torch_trace_{name}.log").write_text(text)
    return folder


def test_trace_reads_each_compilation_with_its_reasons(tmp_path: Path) -> None:
    one, other = trace.read(written(tmp_path / "t", rank_1_a=failed(), b=whole()))[::-1]
    assert (one.rank, other.rank) == (None, 1)
    first, second = one.compiled
    assert (first.id, first.frame, first.guards) == ("0/0", "/w/model/hybrid.py:66 forward", 41)
    assert first.total == pytest.approx(4.1)
    assert first.seconds == {
        "Dynamo": 3.0,
        "AOTAutograd": 2.5,
        "Inductor": 2.0,
        "code generation": 0.5,
        "backward Inductor": 0.8,
        "backward": 1.0,
    }
    ((reason, times),) = first.breaks.items()
    assert times == 2, "one reason at two addresses is one reason"
    assert reason.splitlines()[0] == "Graph break in user code at /w/model/hybrid.py:71"
    assert "0x_" in reason
    assert "train.py" not in reason, "the stack is not part of it"
    looks = [(c.cache, c.state, c.key, c.why) for c in first.caches]
    assert looks == [("AOTAutograd", "bypass", "", "no key of a HOP"), ("FX graph", "miss", "fmiss", "")]
    assert (second.frame, second.total, dict(second.recompiles)) == (first.frame, 1.5, {MISSED: 1})
    assert other.compiled[0].failure == "BackendCompilerFailed: no kernel"
    assert one.summary == (
        "torch 2.13.0+cpu, 2 compilations, 1 frame, 5.6 s, 2 graph break reasons, 1 recompilation, "
        "1 cache hit, 1 cache miss, 1 cache bypass, 0 failures"
    )
    assert Trace((one, other)).summary.startswith("2 files: 3 compilations, 1 frame, 6 s, ")


def test_trace_reads_reason_lists_and_compiled_autograd(tmp_path: Path) -> None:
    both = json.dumps(["0/1: a", "0/0: b"], indent=0)
    alone = {"compiled_autograd_id": 4, "frame_id": 2, "frame_compile_id": 1}
    text = artifact(2, "recompile_reasons", both, attempt=1)
    text += entry({"dynamo_start": {"stack": [{"line": 1, "name": "f", "filename": 7}]}} | alone)
    (file,) = trace.read(written(tmp_path / "t", a=text))
    assert [(c.id, c.attempts) for c in file.compiled] == [("0/2", 2), ("!4/2/1", 1)]
    assert dict(file.compiled[0].recompiles) == {"0/1: a": 1, "0/0: b": 1}
    assert file.compiled[1].frame == "?:1 f"
    assert trace.read(file.path) == (file,), "a single file of the folder"


def test_page_has_a_trace_section_for_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = held(tmp_path)
    folder = written(
        tmp_path / "t", rank_0_a=whole().replace('"frame_id"', '"rank": 0, "frame_id"'), b=failed()
    )
    assert bumpgate(monkeypatch, "report", str(path), "--trace", str(folder)) == 0
    assert capsys.readouterr().out.count("wrote ") == 3
    text = ParsedPage((tmp_path / "gate.html").read_text()).text
    for words in (
        "2 files: 3 compilations, 1 frame, 6 s",
        "rank 0: dedicated_log_torch_trace_rank_0_a.log",
        "rank 1: dedicated_log_torch_trace_b.log",
        "/w/model/hybrid.py:66 forward",
        "4.1: Dynamo 3, AOTAutograd 2.5, Inductor 2, code generation 0.5, backward Inductor 0.8, backward 1",
        "graph break x2",
        "Graph break in user code at /w/model/hybrid.py:71",
        MISSED,
        "no key of a HOP",
        "fmiss",
        "failed BackendCompilerFailed: no kernel",
        "pip install tlparse",
    ):
        assert words in text, words
    assert not (tmp_path / "gate.tlparse").exists()
    html = report.html_page(page.of(gate_file.read(path)))
    assert "What was compiled" not in html, "no such section without a trace"


def test_page_escapes_markup_in_a_trace(tmp_path: Path) -> None:
    text = entry({"str": [EVIL, 0]}) + started(0, name=EVIL) + artifact(0, "dynamo_graph_break_reason", EVIL)
    text += artifact(1, "recompile_reasons", EVIL) + artifact(
        1, "fx_graph_cache_hit", json.dumps({"key": EVIL})
    )
    files = trace.read(written(tmp_path / "t", a=text))
    made = report.html_page(page.of(gate_file.read(held(tmp_path))), Trace(files, {}, EVIL))
    found = ParsedPage(made)
    assert found.tags.count("script") == 1
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    section = found.text.partition("What was compiled")[2].partition(" Rows ")[0]
    assert section.count("<script>alert('x')</script>") >= 6, "shown as text"


def cut(text: str, at: str) -> str:
    """Truncate the file inside `at`, as of a process killed while writing."""
    assert text.count(at) == 1, at
    return text[: text.index(at) + len(at) // 2]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: "", "empty, its process ended before it compiled anything"),
        (lambda text: cut(text, '"entire_frame_compile_time_s": 1.5'), "is cut off, or not a line of a trace"),
        (lambda text: cut(text, "expected 2, actual 3"), "its payload is cut off or changed"),
        (lambda text: text.replace("actual 3", "actual 4"), "its payload is cut off or changed"),
        (lambda text: text.replace("\n\tUser code traceback:", "", 1), "its payload is cut off or changed"),
        (lambda text: re.sub(', "has_payload": "[0-9a-f]+"', "", text, count=1), "its payload is cut off or changed"),
        (lambda text: text.replace('{"str"', '{str"', 1), "has a damaged envelope"),
        (lambda text: "Traceback (most recent call last):\n" + text, "line 1 is cut off, or not a line of a trace"),
        (lambda text: "\tbelow nothing\n" + text, "line 1 is cut off, or not a line of a trace"),
        (lambda text: text + entry({"str": 3}), "an entry that torch did not write"),
        (lambda text: text + entry(compiling(0, compilation_metrics=[1])), "an entry that torch did not write"),
        (lambda text: text + artifact(0, "fx_graph_cache_hit", "gone"), "an entry that torch did not write"),
    ],
    ids=[
        "empty", "cut_envelope", "cut_payload", "changed", "line_lost", "no_digest", "no_json", "foreign", "tab_first",
        "odd_string", "odd_metrics", "odd_cache",
    ],
)  # fmt: skip
def test_damaged_trace_prints_one_line_and_exits_4(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[str], str],
    words: str,
) -> None:
    path = held(tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    folder = written(tmp_path / "t", a=whole(), b=damage(whole()))
    assert bumpgate(monkeypatch, "report", str(path), "--trace", str(folder)) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bumpgate: dedicated_log_torch_trace_b.log: ")
    assert words in line
    assert "TORCH_TRACE=DIR" in line
    assert sorted(p.name for p in tmp_path.iterdir()) == [*before, "t"], "no other file is written"


def test_missing_trace_or_page_prints_one_line_and_exits_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = held(tmp_path)
    for folder in (written(tmp_path / "t"), tmp_path / "absent"):
        assert bumpgate(monkeypatch, "report", str(path), "--trace", str(folder)) == 4
        (line,) = capsys.readouterr().err.splitlines()
        assert "no dedicated_log_torch_trace_*.log in it" in line
    junit = str(tmp_path / "j.xml")
    assert bumpgate(monkeypatch, "report", str(path), "--junit", junit, "--trace", str(folder)) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "bumpgate: a trace is shown by the HTML page: name it with --html"


def a_tool(folder: Path, script: str) -> Path:
    """Create a fake tlparse: $1 the log, $3 the folder for its page."""
    folder.mkdir(exist_ok=True)
    tool = folder / "tlparse"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return tool


PAGE = 'mkdir "$3" && cp "$1" "$3/index.html"'


def test_tlparse_writes_a_page_for_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = held(tmp_path), written(tmp_path / "t", a=whole(), b=whole())
    tool = a_tool(tmp_path / "bin", PAGE)
    monkeypatch.setattr(tlparse, "program", lambda: str(tool))
    stale = tmp_path / "gate.tlparse" / "stale"
    stale.mkdir(parents=True)
    for _ in range(2):
        assert bumpgate(monkeypatch, "report", str(path), "--trace", str(folder)) == 0
    assert not stale.exists(), "the folder is replaced whole"
    links = [v for name, v in ParsedPage((tmp_path / "gate.html").read_text()).attributes if name == "href"]
    pages = [link for link in links if "tlparse" in link]
    assert pages == [f"gate.tlparse/dedicated_log_torch_trace_{name}/index.html" for name in "ab"]
    assert all((tmp_path / link).read_text() == whole() for link in pages)
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'Error: no logs found' >&2; exit 1", "exit 1: Error: no logs found"),
        ("exit 0", "no index.html"),
        (f'case "$1" in *_b.log) exit 3;; esac; {PAGE}', "_b.log: exit 3: no output"),
    ],
    ids=["fails", "writes_nothing", "fails_for_one"],
)
def test_failing_tlparse_loses_only_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    path, folder = held(tmp_path), written(tmp_path / "t", a=whole(), b=whole())
    tool = a_tool(tmp_path / "bin", script)
    monkeypatch.setattr(tlparse, "program", lambda: str(tool))
    assert bumpgate(monkeypatch, "report", str(path), "--trace", str(folder)) == 0
    text = ParsedPage((tmp_path / "gate.html").read_text()).text
    assert "tlparse made no page of dedicated_log_torch_trace_" in text
    assert words in text
    assert text.count("tlparse's page") == (tmp_path / "gate.tlparse").exists() == (PAGE in script)
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_tlparse_of_this_environment_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    own, other = tmp_path / "venv", tmp_path / "elsewhere"
    own.mkdir()
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", str(other))
    assert tlparse.program() is None
    for folder in (other, own):
        assert tlparse.program() != (tool := str(a_tool(folder, "exit 0")))
        assert tlparse.program() == tool


PROGRAM = """
import torch

def forward(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos() * 2

compiled = torch.compile(forward)
for rows in (2, 3):
    compiled(torch.ones(rows, requires_grad=True)).sum().backward()
"""


def test_trace_of_the_installed_torch_is_read(tmp_path: Path) -> None:
    """A trace written by the installed torch, cold and warm: a break, a second length, misses and then hits."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    seen = {}
    for run in ("cold", "warm"):
        env_vars = {
            "TORCH_TRACE": str(tmp_path / run),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, str(program)],
            env={**os.environ, **env_vars},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        (file,) = trace.read(tmp_path / run)
        assert file.torch
        frames = {c.frame for c in file.compiled if c.id}
        assert f"{program}:4 forward" in frames
        assert any("torch_dynamo_resume_in_forward" in frame for frame in frames), frames
        sites = Counter(site for c in file.compiled for site in c.breaks)
        assert sites, "the break has a reason"
        assert all(site.startswith(f"Graph break in user code at {program}:6") for site in sites), sites
        missed = [reason for c in file.compiled for reason in c.recompiles]
        assert any("size mismatch at index 0" in reason for reason in missed), missed
        assert all(0 < c.total < 300 for c in file.compiled if c.seconds)
        assert any("Dynamo" in c.seconds for c in file.compiled)
        assert not [c.failure for c in file.compiled if c.failure]
        seen[run] = Counter(look.state for c in file.compiled for look in c.caches)
        assert all(look.key for c in file.compiled for look in c.caches if look.state != "bypass")
    assert seen["cold"]["miss"] > 0
    assert seen["warm"]["hit"] > seen["cold"]["hit"]
