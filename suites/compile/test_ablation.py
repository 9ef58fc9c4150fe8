"""A fault in one stage of the compiler is attributed to that stage: Dynamo, AOTAutograd or Inductor.

Section 4, Dynamo/Inductor: backends "eager" and "aot_eager" as an ablation, as in `python -m launch.ablation`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import ablation
from launch.ablation import FACTOR, STAGES, AblationResult, main
from suites.launch.conftest import launched  # noqa: F401 (autouse: what a launcher exports, for main)
from suites.support.child import run_json
from suites.support.lanes import lanes
from suites.support.planted import planted

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane")]

SECONDS = 400
# Fault -> the stage it is injected into, and the first backend that shows it.
FAULTS = {
    "guards": ("dynamo", "eager"),
    "decomposition": ("aot", "aot_eager_decomp_partition"),
    "lowering": ("inductor", "inductor"),
}


@pytest.mark.long(65)
@planted("C36", "Dynamo without guards, a wrong decomposition, a wrong Inductor lowering")
def test_ablation_attributes_fault_to_its_stage(tmp_path: Path, row) -> None:
    found = {}
    for fault in FAULTS:
        directory = tmp_path / fault
        directory.mkdir()
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(directory)}
        program = "suites.compile.programs", "stage_fault", fault
        found[fault] = run_json(*program, environment=environment, timeout=SECONDS)
    wrong = [
        finding["line"]
        for fault, finding in found.items()
        if (finding["stage"], finding["backend"]) != FAULTS[fault]
    ]
    assert all(finding["ratio"] > 100 * FACTOR for finding in found.values()), "a fault, not a rounding error"
    row.count("compile/ablation/faults_misattributed", wrong, expected=0, rule="C36", seen=found)


@pytest.mark.long(55)
def test_ablation_of_correct_compiler_finds_no_fault(restored_dynamo, capsys) -> None:
    """A correct compiler yields one line and no finding; every stage ran."""
    assert main(["--preset", "nam12", "--layers", "E"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no stage at fault: backend ")


@pytest.mark.parametrize(("stage", "code"), [("", 0), ("inductor", 1)])
def test_ablation_exit_code_reports_the_fault(
    stage: str, code: int, restored_dynamo, monkeypatch, capsys
) -> None:
    """The batches have two lengths, so that a wrongly reused graph is detected."""
    lengths = []

    def found(config, batches, *rest) -> AblationResult:
        lengths.extend(ids.shape[1] for ids in batches)
        return AblationResult(stage, "inductor", "loss", 99.0)

    monkeypatch.setattr(ablation, "attribute", found)
    assert main(["--preset", "nam12"]) == code
    assert capsys.readouterr().out.startswith(stage or "no stage at fault")
    assert len(set(lengths)) == 2


def test_ablation_usage_errors_and_stage_names(capsys) -> None:
    for wrong in ([], ["--preset", "nam13"], ["--preset", "nam12", "--policy", "eager"]):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["--preset", "nam12", "--layers", "AX"])
    assert caught.value.code == 2
    assert set(STAGES.values()) == {"dynamo", "aot", "inductor"}
    assert (
        str(AblationResult("aot", "aot_eager", error="ValueError: x"))
        == "aot: backend aot_eager: ValueError: x"
    )
