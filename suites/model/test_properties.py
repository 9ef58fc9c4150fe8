"""Laws of the whole hybrid, for any layer pattern, block kinds, features, packing and cut point.

Fifteen fixed examples each; with HYPOTHESIS_PROFILE=nightly, a hundred fresh ones. What is drawn is plain data, so that
a failing example is printed as a call: paste its arguments as `@example(...)` above the test.
B batch, T tokens, D model dim, E experts.
"""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from launch.caches import sync
from launch.children import Child, ChildError
from launch.contract import load
from launch.data import SyntheticBatches
from launch.optimizers import OPTIMIZERS, parameter_groups
from launch.outputs import Files
from launch.policies import POLICIES
from launch.programs import pattern_programs
from launch.retry import BEGUN, load_retry, supervise
from launch.train import Trainer, TrainingPlan
from model import Hybrid, HybridConfig
from model.config import DSAConfig, EngramConfig, HyperConfig, MLAConfig, MTPConfig, NgramConfig
from model.decode import decode_step, empty_state
from model.hybrid import documents, next_token_targets
from model.moe import MoEBlock
from suites.compile.expectations import expected
from suites.model.programs import randomize_zero_parameters
from suites.support.hybrids import build, token_batch, watched_hybrid
from suites.support.lanes import lanes
from suites.support.properties import examples

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane", "restored_dynamo")]

T = 20
SIZES: dict[str, Any] = {
    "d_model": 16,
    "vocab_size": 80,
    "seq_len": T,
    "q_heads": 2,
    "kv_heads": 1,
    "head_dim": 8,
    "m_heads": 2,
    "m_head_dim": 8,
    "m_state": 8,
    "m_groups": 1,
    "m_chunk": 8,
    "experts": 4,
    "top_k": 2,
    "expert_hidden": 8,
    "shared_hidden": 8,
    "r_heads": 2,
    "r_key": 4,
    "r_value": 4,
}
# No routing fills the slots of an expert: what a dropped token costs has laws of its own.
ROOMY = {"capacity_factor": 16.0}


Drawn = dict[str, Any]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make temporary folders below the test's; as an argument, a folder would be printed with each failing example."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def new_folder() -> Path:
    return Path(tempfile.mkdtemp())


@st.composite
def hybrids(draw: st.DrawFn, *, features: bool = False) -> Drawn:
    """Draw the fields of a hybrid of at most six layers: any pattern, kinds of A and M, gates, routing, features."""
    pattern = "".join(draw(st.permutations("MAERMA")))[: draw(st.integers(2, 6))]
    depth = draw(st.integers(2, 6))
    letters = (pattern * depth)[:depth]
    chosen: Drawn = {"layer_pattern": pattern, "depth": depth}
    chosen["m_mixer"] = draw(st.sampled_from(["mamba3", "mimo", "mamba2"]))
    chosen["attention_gate"] = draw(st.sampled_from(["none", "head", "channel"]))
    chosen["null_rho"] = draw(st.sampled_from([0.0, 0.5]))
    ranks = draw(st.sets(st.integers(1, letters.count("A")))) if "A" in letters else ()
    if ranks:
        chosen["dsa"] = DSAConfig(tuple(sorted(ranks)), heads=2, width=8, top_k=6)
    if draw(st.booleans()):
        chosen["mla"] = MLAConfig(8, 8, 8, 8, 8)
    if not ranks and "mla" not in chosen:
        chosen["window"] = draw(st.sampled_from([0, 5]))
    if features:
        heads = [i for i, letter in enumerate(letters) if letter == "A"]
        options = {
            "ngram": NgramConfig(table=50, heads=2, dim=4),
            "mtp": MTPConfig(),
            "hyper": HyperConfig(2, draw(st.integers(1, depth))),
        }
        options |= {"engram": EngramConfig((draw(st.sampled_from(heads)),))} if heads else {}
        chosen |= {name: options[name] for name in sorted(draw(st.sets(st.sampled_from(sorted(options)))))}
    return chosen


# One of two equal blocks has an Engram branch, and the streams open in another one than they close.
WRAPPED: Drawn = {
    "layer_pattern": "AMAE",
    "depth": 4,
    "engram": EngramConfig((0,)),
    "hyper": HyperConfig(2, 2),
}


def hybrid(drawn: Drawn, **changes: Any) -> HybridConfig:
    return HybridConfig("drawn", "narrow", **SIZES | drawn | changes)


Rows = tuple[int, list[set[int]]]  # a seed, and where each row begins a further document


def packed(rows: int = 1) -> st.SearchStrategy[Rows]:
    """Rows that begin with BOS and hold up to three more documents."""
    starts = st.sets(st.integers(1, T - 1), min_size=1, max_size=3)
    return st.tuples(st.integers(0, 99), st.lists(starts, min_size=rows, max_size=rows))


def ids_of(config: HybridConfig, rows: Rows) -> Tensor:
    """Return the ids (B,T) of the rows.

    Only BOS occurs twice in a row: of equal keys, rounding would decide which ones a sparse layer chooses.
    """
    seed, starts = rows
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([3 + torch.randperm(config.vocab_size - 3, generator=generator)[:T] for _ in starts])
    for row, begins in zip(ids, starts):
        row[[0, *begins]] = config.bos_id
    return ids


def fp64(config: HybridConfig) -> Hybrid:
    return randomize_zero_parameters(build(config)).double()


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@examples
@given(drawn=hybrids(features=True), policy=st.sampled_from(POLICIES))
@example(drawn=WRAPPED, policy="regional")
def test_counts_follow_from_the_pattern_under_every_policy(drawn: Drawn, policy: str) -> None:
    """Also the budget of programs, which stops a run that compiles more."""
    config = hybrid(drawn, null_rho=0.0)
    with watched_hybrid(config, policy, backend="eager") as watched:
        ids = token_batch(config, batch=2)
        watched.compiled.warm_up(ids)
        calls, islands = watched.forward(ids)
        report = watched.report()
    want = expected(config.regions, policy, features=config.ngram is not None)
    found = (len(report.breaks), islands, calls, report.unique_graphs)
    assert found == (want.graph_breaks, want.eager_islands, want.compiled_calls, want.unique_graphs)
    assert pattern_programs(watched.model, policy, load()) == want.unique_graphs


@examples
@given(drawn=hybrids(), rows=packed())
def test_packed_documents_equal_separate_ones(drawn: Drawn, rows: Rows) -> None:
    config = hybrid(drawn, **ROOMY)
    model, ids = fp64(config), ids_of(config, rows)
    starts = [*(ids[0] == config.bos_id).nonzero()[:, 0].tolist(), T]
    with torch.no_grad():
        whole = model.logits(ids)
        for first, last in pairwise(starts):
            close(whole[:, first:last], model.logits(ids[:, first:last]))


@examples
@given(drawn=hybrids(features=True), rows=packed(3), order=st.permutations(range(3)))
def test_a_row_does_not_depend_on_the_others(drawn: Drawn, rows: Rows, order: list[int]) -> None:
    """Also where experts overflow: each row has its own slots."""
    config = hybrid(drawn, capacity_factor=1.0)
    model, ids = fp64(config), ids_of(config, rows)
    with torch.no_grad():
        whole = model.logits(ids)
        close(model.logits(ids[order]), whole[order])
        close(model.logits(ids[:1]), whole[:1])


@examples
@given(drawn=hybrids(features=True), rows=packed(), others=packed(), cut=st.integers(1, T - 1))
def test_future_tokens_do_not_affect_the_past(drawn: Drawn, rows: Rows, others: Rows, cut: int) -> None:
    config = hybrid(drawn, **ROOMY)
    model, ids = fp64(config), ids_of(config, rows)
    other = torch.cat([ids[:, :cut], ids_of(config, others)[:, cut:]], 1)
    with torch.no_grad():
        close(model.logits(other)[:, :cut], model.logits(ids)[:, :cut])


@examples
@given(drawn=hybrids(), rows=packed(2))
def test_prefill_and_decode_equal_the_full_forward(drawn: Drawn, rows: Rows) -> None:
    config = hybrid(drawn, **ROOMY)
    model, ids = fp64(config), ids_of(config, rows)
    with torch.no_grad():
        state, found = empty_state(model, 2), []
        _, positions = documents(ids, config.bos_id)
        for token, position in zip(ids.T, positions.T, strict=True):
            logits, state = decode_step(model, token, state)
            found.append(logits)
            assert torch.equal(state.positions, position + 1), "a document begins at position 0"
        close(torch.stack(found, 1), model.logits(ids))


@examples
@given(drawn=hybrids(features=True), rows=packed(2), order=st.permutations(range(SIZES["experts"])))
def test_the_order_of_experts_does_not_matter(drawn: Drawn, rows: Rows, order: list[int]) -> None:
    config = hybrid(drawn, capacity_factor=1.0)
    assume("E" in config.letters)
    model, ids = fp64(config), ids_of(config, rows)
    for block in model.blocks:
        if isinstance(block, MoEBlock):
            block.expert_bias.copy_(torch.linspace(-0.3, 0.3, config.experts))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for block in other.blocks:
            if isinstance(block, MoEBlock):
                for part in (block.router.weight, block.up, block.down, block.expert_bias):
                    part.copy_(part[order])
        close(other(ids), model(ids))
    assert other.overflow() == model.overflow()


@examples
@given(drawn=hybrids(), rows=packed(2), factor=st.sampled_from([1.0, 1.25, 4.0]))
def test_overflow_counts_the_pairs_beyond_each_capacity(drawn: Drawn, rows: Rows, factor: float) -> None:
    config = hybrid(drawn, capacity_factor=factor)
    assume("E" in config.letters)
    model, ids = fp64(config), ids_of(config, rows)
    routed: list[tuple[Tensor, int]] = []
    for block in model.blocks:
        if isinstance(block, MoEBlock):
            route = block.route
            block.route = lambda u, route=route: routed.append((r := route(u)).expert) or r  # type: ignore[assignment]
    with torch.no_grad():
        model(ids)
    slots = config.bucket(T)
    loads = [Counter(row[row >= 0].tolist()) for experts in routed for row in experts]
    assert model.overflow() == sum(max(0, n - slots) for load in loads for n in load.values())


@examples
@given(drawn=hybrids(), rows=packed(3))
def test_the_loss_is_the_mean_over_targets_of_the_rows(drawn: Drawn, rows: Rows) -> None:
    config = hybrid(drawn, aux_weight=0.0, z_weight=0.0, dsa=None)
    model, ids = fp64(config), ids_of(config, rows)
    doc_ids, _ = documents(ids, config.bos_id)
    counts = (next_token_targets(ids, doc_ids) >= 0).sum(1)
    assume(bool((counts > 0).all()) and len(set(counts.tolist())) > 1)
    model(ids).backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for row, count in zip(ids, counts):
        (model(row[None]) * count / counts.sum()).backward()
    for name, p in model.named_parameters():
        if name in whole:
            close(p.grad, whole[name])


@examples
@given(drawn=hybrids(features=True))
def test_features_do_not_change_the_other_weights(drawn: Drawn) -> None:
    config = hybrid(drawn)
    bare = build(config.replace(ngram=None, mtp=None, hyper=None, engram=None)).state_dict()
    # A branch wraps the block that it joins.
    full = {
        re.sub(r"(blocks\.\d+)(\.block)+", r"\1", name): t for name, t in build(config).state_dict().items()
    }
    assert bare.keys() <= full.keys()
    assert all(torch.equal(full[name], value) for name, value in bare.items())


@examples
@given(drawn=hybrids(features=True))
def test_optimizer_groups_partition_the_parameters(drawn: Drawn) -> None:
    model = build(hybrid(drawn))
    groups = parameter_groups(model)
    placed = Counter(path for group in groups for path, _ in group["params"])
    assert placed == Counter(path for path, _ in model.named_parameters())
    for group in groups:
        matrices = group["rule"] == "muon"
        assert all(p.ndim >= 2 for _, p in group["params"]) or not matrices
        assert matrices == ("weight_decay" not in group), "only matrices decay"
        assert not (
            matrices and any("router" in path or path.startswith("head") for path, _ in group["params"])
        )


class Recorded(SyntheticBatches):
    """Batches that note which ones a run has taken. The run fails when it asks for batch `fails`."""

    def __init__(self, config: HybridConfig, fails: int = -1) -> None:
        super().__init__(config.vocab_size, 2, T, seed=0, bos_id=config.bos_id)
        self.taken: list[int] = []
        self.fails = fails

    def __next__(self) -> Tensor:
        if self.drawn == self.fails:
            raise RuntimeError(OUT_OF_MEMORY)
        self.taken.append(self.drawn)
        return super().__next__()


OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
STEPS = 6


def trainer(source: Recorded, config: HybridConfig, optimizer: str, checkpoint: Path | None, every: int = 0):
    plan = TrainingPlan(STEPS, policy="eager", optimizer=optimizer, checkpoint_every=every)
    return Trainer(config, plan, source, files=Files(checkpoint=checkpoint), backend="eager")


def assert_same_training(run: Trainer, whole: Trainer) -> None:
    """The run ends with the weights of one that was not interrupted, and has its losses from where it began."""
    assert run.losses == whole.losses[STEPS - len(run.losses) :]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], value), name


@examples
@given(
    drawn=hybrids(features=True),
    stops=st.lists(st.integers(1, 5), min_size=1, max_size=2, unique=True).map(sorted),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_stopped_runs_train_every_batch_once(
    drawn: Drawn,
    stops: list[int],
    optimizer: str,
) -> None:
    """A run that is stopped at any steps and resumed has the losses and weights of a run that is not."""
    config = hybrid(drawn, bias_rate=1e-3)
    checkpoint = new_folder() / "checkpoint.pt"
    whole = trainer(Recorded(config), config, optimizer, None)
    whole.run(allow_synthetic="smoke")
    taken = []
    for part, stop in enumerate([*stops, STEPS]):
        resumed = trainer(Recorded(config), config, optimizer, checkpoint)
        if part:
            resumed.resume()
        resumed.run(until=stop, allow_synthetic="smoke")
        taken += resumed.source.taken  # type: ignore[attr-defined]
    assert taken == [*range(STEPS)]
    assert_same_training(resumed, whole)


@examples
@given(
    drawn=hybrids(),
    fails=st.lists(st.sampled_from([-1, 0, 1, 2, 4]), min_size=3, max_size=3),
    every=st.sampled_from([0, 1]),
)
def test_a_retry_trains_no_batch_twice(drawn: Drawn, fails: list[int], every: int) -> None:
    """A launch that fails after training has begun is final, and a retry continues from the last checkpoint.

    fails: the batch at which each launch fails, -1 for none. every: steps between checkpoints, 0 for none.
    """
    config, folder, retry = hybrid(drawn), new_folder(), load_retry()
    launches: list[Trainer] = []

    def run(children: list[Child], **options: Any) -> dict[str, tuple[str, ...]]:
        checkpoint = folder / "checkpoint.pt"
        source = Recorded(config, fails[len(launches)])
        launches.append(started := trainer(source, config, "adamw", checkpoint, every))
        if checkpoint.exists():
            started.resume()
        try:
            with patch.dict(os.environ, {BEGUN: children[0].environment[BEGUN]}):  # type: ignore[index]
                started.run(allow_synthetic="smoke")
        except RuntimeError as error:
            raise ChildError("run", 1, "failed", [str(error)]) from None
        return {"run": ("done",)}

    with patch("launch.retry.run", run):
        code = supervise(0, [], {}, seconds=1, log=folder / "log")
    trained = [len(launch.losses) for launch in launches]
    assert len(launches) <= 1 + retry.times
    assert max(trained[:-1], default=0) <= retry.last_step, "a retry after training had begun"
    if code == 0:
        assert sum(trained) - STEPS == (0 if every else sum(trained[:-1])), "batches that were trained twice"
        whole = trainer(Recorded(config), config, "adamw", None)
        whole.run(allow_synthetic="smoke")
        assert_same_training(launches[-1], whole)
    else:
        assert launches[-1].step < STEPS


TREES = st.dictionaries(
    st.sampled_from(["a/k.so", "a/k.json", "b/k.so", "c"]), st.binary(max_size=3), max_size=4
)


@examples
@given(first=TREES, second=TREES, own=TREES)
def test_a_synced_cache_never_mixes_two_trees(first, second, own) -> None:
    """Each file of the last seed is that seed's, any other stays as it was, and a second sync copies nothing."""
    folder = new_folder()
    for name, tree in (("first", first), ("second", second), ("target", own)):
        (folder / name).mkdir()
        for path, content in tree.items():
            (folder / name / path).parent.mkdir(exist_ok=True)
            (folder / name / path).write_bytes(content)
    sync(folder / "first", folder / "target")
    copied = sync(folder / "second", folder / "target")
    before = own | first
    wanted = before | second
    assert {n: (folder / "target" / n).read_bytes() for n in wanted} == wanted
    assert sorted(copied) == sorted(n for n, content in second.items() if before.get(n) != content)
    assert sync(folder / "second", folder / "target") == []
