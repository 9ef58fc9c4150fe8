"""launch.train over ranks is one training: gradients, losses and checkpoints are as in one process. Rules C14, C21.

DDP and FSDP2 bitwise; heads and experts that are divided over the ranks within the rounding of fp64.
"""

from __future__ import annotations

import pytest

from suites.distributed.ranks import run_shared, sound
from suites.distributed.training import FAULTS, LAYOUTS, SAVED, STEPS
from suites.support.lanes import MANY_GPUS, Lane, lanes
from suites.support.planted import planted
from suites.support.reduce import largest, smallest

pytestmark = pytest.mark.long(90)

WHOLE = ("ddp", "fsdp2")
DIVIDED = ("expert", "tensor")
GRID = "expert and tensor"
MANY = 8  # ranks on the CPU; on GPUs one each
# Blocks of the compiled models: those that a division changes, and no more.
COMPILED = {"ddp": "AE", "fsdp2": "AE", "expert": "E", "tensor": "A"}
# Relative, in fp64 and fp32: sums in another order; a fault is larger by orders of magnitude.
ROUNDING, ROUNDING_32 = 1e-9, 1e-5
SAME_ROWS, NO_EXCHANGE, NO_SUM, SPLIT, _ = FAULTS
SMALL_BUCKET = 0.01  # MiB; smaller than any block
# A rank runs its rows one by one. The bias moves by too little to change which experts a token takes.
PARTS = {"rows": 1, "bias_rate": 1e-9, "pattern": "AE", "steps": 1}


@pytest.fixture(scope="module")
def results(lane: Lane, tmp_path_factory) -> dict[str, list[dict]]:
    """The results of one start of the ranks for all tests of this file."""
    place = str(tmp_path_factory.mktemp("checkpoints"))
    cases: dict[str, dict] = {}
    for division in WHOLE:
        cases[division] = {"program": "compare", "division": division}
        cases[f"{division}, compiled"] = {**cases[division], **compiled(division)}
        if lane.device == "cpu":
            cases[f"{division}, parts"] = {**cases[division], **PARTS}
        cases[f"{division}, resumed"] = {"program": "resumed", "division": division, "place": place}
    for division in DIVIDED:
        wide = {"program": "compare", "division": division, "wide": True, "steps": 2}
        cases[division] = wide
        cases[f"{division}, compiled"] = {**wide, **compiled(division)}
    for division, fault in zip(("ddp", *DIVIDED), FAULTS):
        cases[fault] = {**cases[division], "fault": fault, "steps": 1}
    small = {**cases["ddp, compiled"], "bucket": SMALL_BUCKET}
    cases |= {"small buckets": small, SPLIT: {**small, "fault": SPLIT}}
    # On a GPU each process would choose the tiles of a reduction, and with them the order of its sum, by measuring.
    fixed = {"TORCHINDUCTOR_DETERMINISTIC": "1"} if lane.device == "cuda" else {}
    return run_shared(cases, lane.device, variables=fixed)


def compiled(division: str) -> dict[str, object]:
    """Return the arguments of a case in which every region is compiled by Inductor."""
    return {"policy": "regional", "steps": 1, "pattern": COMPILED[division]}


@lanes("cpu", "h200x2")
@pytest.mark.parametrize("division", WHOLE)
@planted("C14", "every rank takes the first rows of the batch")
def test_ranks_train_as_one_process(lane: Lane, division: str, results, row) -> None:
    """Eager, and with every region compiled by Inductor; the reference is compiled too.

    Bitwise, but for compiled regions on a GPU: there they are compared within the rounding of fp32.
    """
    eager, regional = sound(results, division), sound(results, f"{division}, compiled")
    bitwise = [*eager, *regional] if lane.device == "cpu" else eager
    case = f"distributed/train-{division}"
    different = sum(one["gradients"]["different"] for one in bitwise)
    row.count(f"{case}/gradients_that_differ", different, expected=0, **about(bitwise))
    if lane.device == "cuda":
        apart = largest(one["gradients"]["relative"] for one in regional)
        row.bound(f"{case}/compiled_gradient_error", apart, "ratio", at_most=ROUNDING_32, **about(regional))
    recompiles, seen = (sum(one[what] for one in regional) for what in ("recompiles", "programs"))
    row.count(f"{case}/recompiles", recompiles, expected=0, seen=seen, rule="C8")
    for one in bitwise:
        assert one["losses"] == one["one"]
        assert one["weights"]["different"] == 0
        assert one["timeout"] == 7200.0
    for one in eager:
        assert one["dropped"]["stated"] == one["dropped"]["all"] > one["dropped"]["own"]
    for one in regional:
        assert one["losses"] == pytest.approx(one["one"], rel=ROUNDING_32)
        assert one["programs"] == one["expected_programs"] == 3
        # DDP's warm-up is followed by new groups; FSDP2's is inside the wrapped model, and regions with experts compile
        # in the first steps on a GPU.
        assert one["groups"] == (2 if division == "ddp" and lane.device == "cpu" else 1)
    faulty = sound(results, SAME_ROWS)
    assert all(one["gradients"]["different"] > 0 and one["losses"] != one["one"] for one in faulty)


def about(compared: list[dict]) -> dict[str, object]:
    """Return what a row of compared gradients has in common with the others."""
    seen = sum(one["gradients"]["tensors"] - one["gradients"]["zero"] for one in compared)
    return {
        "seen": seen,
        "rule": "C14",
        "evidence": [
            f"losses {one['losses']}, one process {one['one']}; repeated: {one['repeated']}"
            for one in compared
        ],
    }


@lanes("cpu")
@pytest.mark.parametrize("division", WHOLE)
def test_rows_in_parts_train_as_one_process(lane: Lane, division: str, results) -> None:
    """The gradients of every part of a rank's rows are exchanged, and the balance of the experts is averaged."""
    ranks = sound(results, f"{division}, parts")
    for one in ranks:
        assert one["gradients"]["zero"] == 0
        assert one["gradients"]["relative"] <= ROUNDING_32
        assert one["losses"] == pytest.approx(one["one"], rel=ROUNDING_32)
        assert one["state"] == ranks[0]["state"]
        assert set(one["balance"]) == {"blocks.1.expert_bias", "blocks.1.load"}
        assert smallest(one["balance"].values()) > 1, "a balance that did not move would agree, too"


@lanes("cpu", "h200x2")
@planted("C27", "Dynamo splits regions where DDP's buckets end")
def test_buckets_do_not_split_regions(lane: Lane, results, row) -> None:
    """Blocks that are larger than a bucket of gradients, as at full size: each kind of region is still one program."""
    ranks = sound(results, "small buckets")
    programs = [one["programs"] for one in ranks]
    beyond = sum(programs) - sum(one["expected_programs"] for one in ranks)
    case = "distributed/train-ddp/programs_beyond_budget_with_small_buckets"
    evidence = [f"rank {rank}: {count} programs" for rank, count in enumerate(programs)]
    row.count(case, beyond, expected=0, seen=sum(programs), rule="C27", evidence=evidence)
    assert largest(one["gradients"]["relative"] for one in ranks) <= ROUNDING_32
    assert all("ProgramBudgetError" in one["error"] for one in results[SPLIT]), results[SPLIT]


@lanes("cpu", "h200x2")
@pytest.mark.parametrize("division", DIVIDED)
@planted("C14", "experts without their exchange, heads without their sum")
def test_divided_blocks_train_as_one_process(lane: Lane, division: str, results, row) -> None:
    """Experts over the ranks with an all-to-all, attention heads over the ranks with DTensor; under FSDP2."""
    compared = sound(results, division, f"{division}, compiled")
    apart = largest(one["gradients"]["relative"] for one in compared)
    case = f"distributed/train-{division}/gradient_error"
    row.bound(case, apart, "ratio", at_most=ROUNDING, **about(compared))
    for one in compared:
        assert one["losses"] == pytest.approx(one["one"], rel=ROUNDING)
        assert one["programs"] == one["expected_programs"]
    assert {one["programs"] for one in compared} == {0, 2}
    faulty = sound(results, NO_EXCHANGE if division == "expert" else NO_SUM)
    assert all(one["gradients"]["relative"] > 1e-3 for one in faulty), faulty


@lanes("cpu", *MANY_GPUS)
def test_many_ranks_train_as_one_process(lane: Lane, row) -> None:
    """With experts and heads divided at once, in two columns of ranks; on GPUs also in every other layout."""
    layouts = LAYOUTS if lane.device == "cuda" else (GRID,)
    wide = {"program": "compare", "wide": True, "steps": 1, "pattern": "AE"}
    cases: dict[str, dict] = {division: {**wide, "division": division} for division in layouts}
    cases |= {fault: {**cases[GRID], "fault": fault} for fault in (NO_EXCHANGE, NO_SUM)}
    found = run_shared(cases, lane.device, MANY if lane.device == "cpu" else lane.count)
    for division in layouts:
        compared = sound(found, division)
        case = f"distributed/train-{division.replace(' ', '_')}-{len(compared)}_ranks/gradient_error"
        apart = largest(one["gradients"]["relative"] for one in compared)
        row.bound(case, apart, "ratio", at_most=ROUNDING, **about(compared))
        assert all(one["losses"] == pytest.approx(one["one"], rel=ROUNDING) for one in compared)
    assert all(one["gradients"]["relative"] > 1e-3 for one in sound(found, NO_EXCHANGE, NO_SUM))


@lanes("cpu", "h200x2")
@pytest.mark.parametrize("division", WHOLE)
def test_resumed_ranks_equal_uninterrupted_ranks(lane: Lane, division: str, results, row) -> None:
    """Bitwise, over the same ranks and in one process: the checkpoint does not depend on how many wrote it."""
    compared = sound(results, f"{division}, resumed")
    differ = sum(one[case]["different"] for one in compared for case in ("weights", "weights_alone"))
    seen = sum(one["weights"]["tensors"] for one in compared)
    case = f"distributed/train-{division}/weights_that_differ_after_resume"
    row.count(case, differ, expected=0, seen=seen, rule="C21")
    for one in compared:
        assert len(one["losses"]) == STEPS
        assert one["again"] == one["alone"] == one["losses"][SAVED:]


@lanes("cpu", "h200x2")
def test_rank_0_alone_writes(lane: Lane, results, row) -> None:
    ddp, sharded = (sound(results, f"{division}, resumed") for division in WHOLE)
    files = [name for one in (*ddp[1:], *sharded[1:]) for name in one["files"]]
    written = [*ddp[0]["files"], *sharded[0]["files"]]
    row.count("distributed/train/files_of_other_ranks", files, expected=0, seen=written, rule="C21")
    assert written == ["log.jsonl", "state.pt"] * 2
    assert ddp[0]["steps_logged"] == STEPS
