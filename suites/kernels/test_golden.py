"""Every op's reference still gives the stored golden arrays: exactly in fp64, up to rounding in fp32.

B batch, T tokens. Only fixtures/make.py writes the arrays.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from fixtures import make
from suites.kernels.golden import FIXTURES, RELATIVE, differences, results, stored
from suites.ops import op_names, specs
from suites.support.lanes import Lane, lanes

# Relative to an array's largest entry. The inputs are exact in fp32, and the sums have some tens of terms: correct
# results read at most 13 units of roundoff on a CPU (the angle's gradient of mamba3_siso), and a GPU adds in another
# order.
FP32_RELATIVE = 32 * 2**-24
OP = next(op for op, spec in specs().items() if "y" in spec.golden.outputs)


@lanes("cpu", "h200")
def test_every_op_equals_its_golden_arrays_in_fp64(lane: Lane, row):
    """Reference and op: in fp64 the op adds only the backward that is derived by hand."""
    faults, agreeing, compared = [], 0, 0
    for op in op_names():
        arrays = stored(op)
        expected = {n: t for n, t in arrays.items() if n.startswith(("output.", "grad."))}
        lines = [] if expected else ["no fixture"]
        for impl in ("eager", "op") if expected else ():
            found = results(op, arrays, impl, device=lane.device)
            lines += [f"{impl}: {line}" for line in differences(found, expected, RELATIVE)]
            compared += sum(t.numel() for t in found.values())
        agreeing += not lines
        faults += [f"{op}: {line}" for line in lines]
    row.count(
        f"kernels/golden-{lane.name}/ops", agreeing, expected=len(op_names()), rule="C36", seen=compared,
        evidence=faults,
    )  # fmt: skip


@lanes("cpu", "h200")
@pytest.mark.parametrize("op", op_names())
def test_reference_in_fp32_is_within_rounding(lane: Lane, op: str):
    arrays = stored(op)
    found = results(op, arrays, dtype=torch.float32, device=lane.device)
    expected = {n: arrays[n] for n in found}
    assert not differences(found, expected, FP32_RELATIVE)


@lanes("cpu")
@pytest.mark.parametrize("op", op_names())
def test_one_perturbed_entry_of_any_array_is_detected(lane: Lane, op: str):
    arrays = stored(op)
    found = {n: t for n, t in arrays.items() if n.startswith(("output.", "grad."))}
    for name, t in found.items():
        off = t.clone()
        off.view(-1)[t.numel() // 2] += 2 * RELATIVE * t.abs().max() if t.is_floating_point() else 1
        (line,) = differences(found, found | {name: off}, RELATIVE)
        assert line.startswith(name)
    assert differences(found, {}, RELATIVE)
    # An input off by one part in a million must not pass either: the results depend on every input.
    for name in (n for n, t in arrays.items() if n.startswith("input.") and t.is_floating_point()):
        moved = results(op, arrays | {name: arrays[name] * (1 + 1e-6)})
        assert differences(moved, found, RELATIVE), name


@lanes("cpu")
def test_writer_names_differences_and_writes_only_on_request(lane: Lane, tmp_path, capsys):
    for source in FIXTURES.rglob("*.safetensors"):
        target = tmp_path / source.relative_to(FIXTURES)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(source.read_bytes())
    assert make.main(["--check"], tmp_path) == 0
    file = tmp_path / f"{OP}.safetensors"
    arrays = stored(OP)
    arrays["output.y"].view(-1)[3] += 1e-9
    save_file(arrays, file)
    perturbed = file.read_bytes()
    (tmp_path / "no_op.safetensors").write_bytes(perturbed)
    capsys.readouterr()
    assert make.main(["--check"], tmp_path) == 1
    output = capsys.readouterr().out
    assert f"{OP}: output.y: off by" in output
    assert "no_op.safetensors: of no op" in output
    assert file.read_bytes() == perturbed
    (tmp_path / "no_op.safetensors").unlink()
    assert make.main([], tmp_path) == 0
    assert make.main(["--check"], tmp_path) == 0
    assert {p.suffix for p in tmp_path.rglob("*") if p.is_file()} == {".safetensors"}
