"""The table of the kernels: reviewed values, "-" for others, and other peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bumpgate.core.baseline import Baseline, BaselineError, Reviewed, load
from tests.support.tree import ROOT
from tools import op_table

HERE = {"device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0"}
OTHER = {"torch": "2.99.0", "triton": "9.9.9"}
TIMED = {
    "kernels/scan-N64/forward_milliseconds": 0.5,
    "kernels/scan-N64/forward_error_ratio": 1.25,
}
COMPILED = {
    "kernels/scan.walk_kernel-N64-bf16/code": {
        "3.6.0": "registers=96 spills=4",
        "3.7.1": "registers=255 spills=1",  # of another triton
    },
    "kernels/scan.sum_kernel-N64-bf16/code": {"3.6.0": "registers=128 spills=8"},
    "kernels/scan.walk_kernel-N64-G1-bf16/code": {"3.6.0": "registers=254 spills=1"},  # of another shape
    "kernels/scanner.walk_kernel-N64-bf16/code": {"3.6.0": "registers=253 spills=1"},  # of another op
}


def baseline(lane: str, values: dict[str, float]) -> Baseline:
    rows = {id: Reviewed(value, "", "lower") for id, value in values.items()}
    return Baseline(lane, made_with=HERE, rows=rows)


def compiled(rows: dict[str, dict[str, str]]) -> Baseline:
    found = {id: Reviewed(None, "counts", "code", values=values) for id, values in rows.items()}
    return Baseline("cpu", made_with=HERE, rows=found)


def page(timed: dict[str, float]) -> str:
    return op_table.markdown(baseline("h200", timed), compiled(COMPILED), *op_table.measured())


def cells(text: str) -> list[list[str]]:
    """Return the cells of the first table."""
    table = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_markdown_row_has_errors_times_and_code() -> None:
    _, _, forward, both = cells(page(TIMED))
    assert forward == [
        "`scan-N64`", "1.25", "-", "forward", "0.500", "-", "-", "-", "128", "12",
    ]  # fmt: skip
    assert both == ["", "", "", "forward + backward", "-", "-", "-", "-", "", ""]


def test_peer_is_the_first_of_the_evidence() -> None:
    run, _ = op_table.measured()
    peers = op_table.peers_of(run)
    assert peers["kernels/attention-P64/both"] == ("flash-attn 4", 3.7783)
    assert peers["kernels/mamba3_siso-N64-G8/forward"][0] == "mamba-ssm"
    rows = {"kernels/a-P9/forward_milliseconds": 1.5}
    fastest = {"kernels/a-P9/forward": ("cuDNN", 1.0)}
    assert op_table.fastest_peer(rows, "kernels/a-P9/forward", fastest) == ("1.000 cuDNN", "1.50")
    assert op_table.fastest_peer(rows, "kernels/a-P9/both", fastest) == ("-", "-")
    assert op_table.fastest_peer({}, "kernels/a-P9/forward", fastest) == ("-", "-")


def test_marks_print_the_distance_and_the_known_bound() -> None:
    slow, known = "causal_conv1d-D3584/both_milliseconds", "attention-P128-softcap30/forward_milliseconds"
    low, high = (f"moe_combine-E64-K6/{way}_roofline_fraction" for way in ("forward", "both"))
    values = {f"kernels/{id}": v for id, v in {slow: 0.378, known: 1.4175, low: 0.76, high: 0.88}.items()}
    printed = {row.strip("`"): more for row, _, *more in op_table.marks(values, {})}
    assert printed[slow] == ["0.378", "missed by 5.0%", "not measured"]
    assert printed[known] == ["1.417", "missed by 5.0%", op_table.all_marks()[known][1]]
    assert (printed[low][1], printed[high][1:]) == ("missed by 5.0%", ["10.0%", ""])
    assert printed["mamba3_siso-N128-G1/both_milliseconds"] == ["-", "-", ""]


def test_page_lists_the_marks_that_are_missed_or_not_measured() -> None:
    met, missed = "causal_conv1d-D3584/both_milliseconds", "moe_combine-E64-K6/both_roofline_fraction"
    text = page(
        {f"kernels/{met}": 0.3, f"kernels/{missed}": 0.5, "kernels/scan-N64/forward_milliseconds": 0.5}
    )
    assert f"1 of {len(op_table.all_marks())} marks of `suites/ops` are met. The others:" in text
    assert (f"| `{met}` |" in text, f"| `{missed}` | 0.8 | 0.500 | missed by 37.5% |" in text) == (
        False,
        True,
    )


def test_results_of_another_build_are_not_mixed_into_the_table() -> None:
    """Times of peers, and counters: of the build of these rows, or of another one."""
    run, counters = op_table.measured()
    values = {
        "kernels/attention-P64/forward_milliseconds": 1.5,
        "kernels/dsa_indexer-K256-loss/both_roofline_fraction": 0.03,
    }
    rows = {id: Reviewed(value, "", "lower") for id, value in values.items()}

    def text(build: dict[str, str]) -> str:
        return op_table.markdown(Baseline("h200", build, rows), compiled({}), run, counters)

    assert "1.165 flash-attn 4" in cells(text(run.provenance))[2][5]
    assert cells(text(OTHER))[2][5] == "-"
    of_counters = counters["dsa_indexer-K256-loss"]["made_with"]
    assert f"(on torch {of_counters['torch']}, triton" in text(OTHER)
    assert "(on torch" not in text(of_counters)


def test_markdown_without_timed_kernels_raises() -> None:
    with pytest.raises(BaselineError, match=r"no kernel was timed; pytest -m h200 suites/kernels$"):
        page({})


def test_docs_table_matches_the_reviewed_rows() -> None:
    ran, compiled = (load(ROOT / "baselines" / f"{lane}.json", lane) for lane in ("h200", "cpu"))
    text = op_table.markdown(ran, compiled, *op_table.measured())
    assert (ROOT / "docs/kernels.md").read_text() == text, "python -m tools.op_table --out docs/kernels.md"


def test_unwritable_output_is_reported_in_one_line(tmp_path: Path, capsys) -> None:
    assert op_table.main(["--out", str(tmp_path / "absent" / "table.md")]) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert "No such file or directory" in stderr
