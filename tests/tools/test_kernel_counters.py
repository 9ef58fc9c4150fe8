"""Counters and peers of kernels: what is read from Nsight Compute, and the sections of docs/kernels.md."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

import pytest

from tools import kernel_counters, kernel_peers
from tools.kernel_counters import COUNTERS

RANGE = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
WAITS = ("barrier", "long_scoreboard", "not_selected", "selected", "wait")
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
MADE = {"device": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "triton": "3.6.0"}


def kernel(name: str, range_name: str, nanoseconds: str = "1,000") -> dict[str, str]:
    where = f'7 "<default domain>:{range_name}:none:none:none:none:none:none" ' if range_name else ""
    waits = {STALLED.format(reason): str(i) for i, reason in enumerate(WAITS)}
    counters = dict.fromkeys(COUNTERS.values(), "12.345") | {COUNTERS["nanoseconds"]: nanoseconds}
    return {"ID": "0", "Kernel Name": name, RANGE: where, **counters, **waits}


def output(*kernels: dict[str, str]) -> str:
    """Return what ncu prints: messages, the table with a line of units, in quotes."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*kernels[0]], quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    writer.writerow(dict.fromkeys(kernels[0], "") | {COUNTERS["nanoseconds"]: "ns"})
    writer.writerows(kernels)
    return "==PROF== Connected to process 7\n" + text.getvalue()


THREE = (
    kernel("_forward(float*)", "scan-N64/forward"),
    kernel("_forward(float*)", "scan-N64/both", "40"),
    kernel("void sum<float, 4>(float*)", "", "1,960"),
)


def test_kernel_without_a_range_belongs_to_the_last_one() -> None:
    found = kernel_counters.parse(output(*THREE))
    assert {name: [k["kernel"] for k in kernels] for name, kernels in found.items()} == {
        "scan-N64/forward": ["_forward"],
        "scan-N64/both": ["_forward", "sum"],
    }
    last = found["scan-N64/both"][-1]
    assert (last["nanoseconds"], last["tensor"]) == (1960, 12.35)
    assert list(last["waits"]) == ["wait", "not_selected", "long_scoreboard"], "selected is no wait"


def test_text_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table in the output of ncu"):
        kernel_counters.parse("==ERROR== no kernels were profiled\n")


def test_kernels_below_the_least_share_are_left_out() -> None:
    short, long = {"nanoseconds": 1.0}, {"nanoseconds": 99.0}
    assert kernel_counters.longest([short, long]) == [long]
    assert kernel_counters.longest([short, {"nanoseconds": 49.0}]) == [short, {"nanoseconds": 49.0}]


def test_section_has_a_line_for_each_kernel_of_both_passes() -> None:
    parsed = kernel_counters.parse(output(*THREE))
    case = {"made_with": MADE, "both": parsed["scan-N64/both"]}
    newer = case | {"made_with": MADE | {"torch": "2.12.0"}}
    lines = kernel_counters.section({"scan-N64": case, "scan-N128": newer})
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert [row[:3] for row in table[2:4]] == [["`scan-N64`", "`_forward`", "0.000"], ["", "`sum`", "0.002"]]
    assert table[-1][-1] == "wait 4.0, not_selected 2.0, long_scoreboard 1.0"
    machines = [line for line in lines if line.startswith("NVIDIA")]
    assert machines == [
        f"NVIDIA H200, driver 580.1, torch {torch}, triton 3.6.0:" for torch in ("2.11.0", "2.12.0")
    ]


@pytest.mark.parametrize("printed", ["", output(*THREE)])
def test_command_writes_what_ncu_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], printed: str
) -> None:
    monkeypatch.setattr(kernel_counters, "gpu_models", lambda: ["NVIDIA H200"])
    (tmp_path / "printed").write_text(printed)
    program = tmp_path / "ncu"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {tmp_path}/printed\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    out = tmp_path / "counters.json"
    out.write_text('{"other-P64": {"made_with": {}}, "scan-N64": {"made_with": {}, "old": []}}')
    code = kernel_counters.main(["mla-P64", "--out", str(out)])
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[-4:] == ["-m", "tools.kernel_counters", "--profiled", "mla-P64"]
    assert "--clock-control none" in " ".join(arguments)
    if not printed:
        assert (code, json.loads(out.read_text())["scan-N64"]) == (3, {"made_with": {}, "old": []})
        assert "no table in the output of ncu (exit code 0)" in capsys.readouterr().err
        return
    assert code == 0
    written = json.loads(out.read_text())
    assert [*written] == ["other-P64", "scan-N64"], "the file keeps its other cases"
    assert sorted(written["scan-N64"]) == ["both", "forward", "made_with"]
    assert written["scan-N64"]["made_with"]["device"] == "NVIDIA H200"


def test_unusable_output_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_counters, "gpu_models", lambda: ["NVIDIA H200"])
    out = tmp_path / "counters.json"
    out.write_text("[")
    assert kernel_counters.main(["--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"--out {out}: ")
    assert error.endswith("; name another file, or remove it\n")


def test_command_without_ncu_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_counters, "gpu_models", lambda: ["NVIDIA H200"])
    monkeypatch.setenv("PATH", "/nonexistent")
    assert kernel_counters.main([]) == 3
    assert capsys.readouterr().err == "ncu is not on PATH: install NVIDIA Nsight Compute, or add its folder\n"


def test_machine_without_a_gpu_and_unknown_cases_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_counters, "gpu_models", list)
    assert (kernel_counters.main([]), kernel_peers.main([])) == (3, 3)
    assert capsys.readouterr().err == f"{kernel_counters.NO_GPU}\n" * 2
    assert kernel_counters.main(["mla-P9"]) == 2
    assert capsys.readouterr().err.startswith("unknown case 'mla-P9'; cases: attention-P128-softcap30, ")


def test_fastest_implementation_is_bold() -> None:
    times = {"a-P64": {"cuDNN": [1.0, 6.0]}, "b": {"flash": [2.0, 4.0]}}
    result = {"made_with": MADE, "ways": ["forward", "both"], "milliseconds": times}
    lines = kernel_peers.section(result, {"a-P64": [2.0, 5.0]})
    assert lines[-4:] == [
        "| `a-P64` | forward | 2.000 | **1.000** | - |",
        "|  | both | **5.000** | 6.000 | - |",
        "| `b` | forward | - | - | **2.000** |",
        "|  | both | - | - | **4.000** |",
    ]
