"""Laws of the whole hybrid, for any layer pattern, block kinds, features, packing and cut point.

Fifteen fixed examples each; with HYPOTHESIS_PROFILE=nightly, fresh ones, and a failing one prints how to repeat it.
B batch, T tokens, D model dim, E experts.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from hypothesis import assume, given, note
from hypothesis import strategies as st
from torch import Tensor

from launch.caches import sync
from launch.data import SyntheticBatches
from launch.optimizers import OPTIMIZERS, parameter_groups
from launch.outputs import Files
from launch.policies import POLICIES
from launch.train import Trainer, TrainingPlan
from model import Hybrid, HybridConfig
from model.config import DSAConfig, EngramConfig, HyperConfig, MLAConfig, MTPConfig, NgramConfig
from model.decode import decode_step, empty_state
from model.hybrid import documents, next_token_targets
from model.moe import MoEBlock
from suites.compile.expectations import expected
from suites.model.programs import randomize_zero_parameters
from suites.support.hybrids import build, token_batch, watched_hybrid
from suites.support.lanes import Lane, lanes
from suites.support.properties import examples

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


@st.composite
def hybrids(draw: st.DrawFn, *, features: bool = False, **changes: Any) -> HybridConfig:
    """Draw a configuration of at most six layers: any pattern, kinds of A and M, gates, routing, and features."""
    pattern = "".join(draw(st.permutations("MAERMA")))[: draw(st.integers(2, 6))]
    depth = draw(st.integers(2, 6))
    letters = (pattern * depth)[:depth]
    chosen: dict[str, Any] = {"m_mixer": draw(st.sampled_from(["mamba3", "mimo", "mamba2"]))}
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
            "hyper": HyperConfig(2, 1),
        }
        options |= {"engram": EngramConfig(tuple(heads[:1]))} if heads else {}
        chosen |= {name: options[name] for name in draw(st.sets(st.sampled_from(sorted(options))))}
    chosen |= changes
    note(f"pattern {pattern} of depth {depth}, {chosen}")
    return HybridConfig("drawn", "narrow", pattern, depth, **SIZES | chosen)


@st.composite
def packed(draw: st.DrawFn, config: HybridConfig, batch: int = 1) -> Tensor:
    """Draw ids (B,T) that begin with BOS and hold up to three more documents."""
    ids = torch.randint(
        3, config.vocab_size, (batch, T), generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    for row in ids:
        row[[0, *draw(st.sets(st.integers(1, T - 1), min_size=1, max_size=3))]] = config.bos_id
    return ids


def fp64(config: HybridConfig) -> Hybrid:
    return randomize_zero_parameters(build(config)).double()


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@lanes("cpu")
@examples
@given(data=st.data())
def test_counts_follow_from_the_pattern_under_every_policy(lane: Lane, data: st.DataObject) -> None:
    config = data.draw(hybrids(null_rho=0.0))
    policy = data.draw(st.sampled_from(POLICIES))
    with watched_hybrid(config, policy, backend="eager") as hybrid:
        ids = token_batch(config, batch=2)
        hybrid.compiled.warm_up(ids)
        calls, islands = hybrid.forward(ids)
        report = hybrid.report()
    want = expected(config.kinds, policy)
    found = (len(report.breaks), islands, calls, report.unique_graphs)
    assert found == (want.graph_breaks, want.eager_islands, want.compiled_calls, want.unique_graphs)


@lanes("cpu")
@examples
@given(data=st.data())
def test_packed_documents_equal_separate_ones(lane: Lane, data: st.DataObject) -> None:
    config = data.draw(hybrids(**ROOMY))
    model, ids = fp64(config), data.draw(packed(config))
    starts = [*(ids[0] == config.bos_id).nonzero()[:, 0].tolist(), T]
    with torch.no_grad():
        whole = model.logits(ids)
        for first, last in pairwise(starts):
            close(whole[:, first:last], model.logits(ids[:, first:last]))


@lanes("cpu")
@examples
@given(data=st.data())
def test_a_row_does_not_depend_on_the_others(lane: Lane, data: st.DataObject) -> None:
    """Also where experts overflow: each row has its own slots."""
    config = data.draw(hybrids(features=True, capacity_factor=1.0))
    model, ids = fp64(config), data.draw(packed(config, batch=3))
    order = data.draw(st.permutations(range(3)))
    with torch.no_grad():
        whole = model.logits(ids)
        close(model.logits(ids[order]), whole[order])
        close(model.logits(ids[:1]), whole[:1])


@lanes("cpu")
@examples
@given(data=st.data(), cut=st.integers(1, T - 1))
def test_future_tokens_do_not_affect_the_past(lane: Lane, data: st.DataObject, cut: int) -> None:
    config = data.draw(hybrids(features=True, **ROOMY))
    model, ids = fp64(config), data.draw(packed(config))
    other = torch.cat([ids[:, :cut], data.draw(packed(config))[:, cut:]], 1)
    with torch.no_grad():
        close(model.logits(other)[:, :cut], model.logits(ids)[:, :cut])


@lanes("cpu")
@examples
@given(data=st.data())
def test_prefill_and_decode_equal_the_full_forward(lane: Lane, data: st.DataObject) -> None:
    config = data.draw(hybrids(**ROOMY))
    model, ids = fp64(config), data.draw(packed(config, batch=2))
    with torch.no_grad():
        state, found = empty_state(model, 2), []
        _, positions = documents(ids, config.bos_id)
        for token, position in zip(ids.T, positions.T, strict=True):
            logits, state = decode_step(model, token, state)
            found.append(logits)
            assert torch.equal(state.positions, position + 1), "a document begins at position 0"
        close(torch.stack(found, 1), model.logits(ids))


@lanes("cpu")
@examples
@given(data=st.data(), order=st.permutations(range(SIZES["experts"])))
def test_the_order_of_experts_does_not_matter(lane: Lane, data: st.DataObject, order: list[int]) -> None:
    config = data.draw(hybrids(features=True, capacity_factor=1.0))
    assume("E" in config.letters)
    model, ids = fp64(config), data.draw(packed(config, batch=2))
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


@lanes("cpu")
@examples
@given(data=st.data(), factor=st.sampled_from([1.0, 1.25, 4.0]))
def test_overflow_counts_the_pairs_beyond_each_capacity(
    lane: Lane, data: st.DataObject, factor: float
) -> None:
    config = data.draw(hybrids(capacity_factor=factor))
    assume("E" in config.letters)
    model, ids = fp64(config), data.draw(packed(config, batch=2))
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


@lanes("cpu")
@examples
@given(data=st.data())
def test_the_loss_is_the_mean_over_targets_of_the_rows(lane: Lane, data: st.DataObject) -> None:
    config = data.draw(hybrids(features=False, aux_weight=0.0, z_weight=0.0, dsa=None))
    model, ids = fp64(config), data.draw(packed(config, batch=3))
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


@lanes("cpu")
@examples
@given(data=st.data())
def test_features_do_not_change_the_other_weights(lane: Lane, data: st.DataObject) -> None:
    config = data.draw(hybrids(features=True))
    bare = build(config.replace(ngram=None, mtp=None, hyper=None, engram=None)).state_dict()
    # A branch wraps the block that it joins.
    full = {
        re.sub(r"(blocks\.\d+)(\.block)+", r"\1", name): t for name, t in build(config).state_dict().items()
    }
    assert bare.keys() <= full.keys()
    assert all(torch.equal(full[name], value) for name, value in bare.items())


@lanes("cpu")
@examples
@given(data=st.data(), name=st.sampled_from(sorted(OPTIMIZERS)))
def test_optimizer_groups_partition_the_parameters(lane: Lane, data: st.DataObject, name: str) -> None:
    model = build(data.draw(hybrids(features=True)))
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
    """Batches that note which ones a run has taken."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config.vocab_size, 2, T, seed=0, bos_id=config.bos_id)
        self.taken: list[int] = []

    def __next__(self) -> Tensor:
        self.taken.append(self.drawn)
        return super().__next__()


@lanes("cpu")
@examples
@given(
    data=st.data(),
    stops=st.lists(st.integers(1, 5), min_size=1, max_size=2, unique=True).map(sorted),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_stopped_runs_train_every_batch_once(
    lane: Lane,
    tmp_path_factory: Any,
    restored_dynamo: None,
    data: st.DataObject,
    stops: list[int],
    optimizer: str,
) -> None:
    """A run that is stopped at any steps and resumed has the losses and weights of a run that is not."""
    config = data.draw(hybrids(features=True, bias_rate=1e-3))
    plan = TrainingPlan(6, policy="eager", optimizer=optimizer)
    folder: Path = tmp_path_factory.mktemp("run")

    def trainer(source: Recorded, checkpoint: Path | None) -> Trainer:
        return Trainer(config, plan, source, files=Files(checkpoint=checkpoint), backend="eager")

    source = Recorded(config)
    whole = trainer(source, None)
    whole.run(allow_synthetic="smoke")
    taken, losses = [], []
    for part, stop in enumerate([*stops, 6]):
        resumed = trainer(Recorded(config), folder / "checkpoint.pt")
        if part:
            resumed.resume()
        resumed.run(until=stop, allow_synthetic="smoke")
        taken += resumed.source.taken  # type: ignore[attr-defined]
        losses += resumed.losses
    assert taken == source.taken == [*range(6)]
    assert losses == whole.losses
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


TREES = st.dictionaries(
    st.sampled_from(["a/k.so", "a/k.json", "b/k.so", "c"]), st.binary(max_size=3), max_size=4
)


@lanes("cpu")
@examples
@given(first=TREES, second=TREES, own=TREES)
def test_a_synced_cache_never_mixes_two_trees(lane: Lane, tmp_path_factory: Any, first, second, own) -> None:
    """Each file of the last seed is that seed's, any other stays as it was, and a second sync copies nothing."""
    folder: Path = tmp_path_factory.mktemp("sync")
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
