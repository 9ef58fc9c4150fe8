"""Every optional feature, and every other kind of block, inside the whole model: disabled, it is bitwise equal to a
model without it; enabled, it trains, isolates documents and compiles.

B batch, T tokens.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bumpgate.plugin.rows import Seen
from launch.policies import POLICIES
from launch.step import make_optimizer
from model import HybridConfig, preset
from model.config import TreeConfig
from model.features import Features
from model.head import LossHead
from model.hybrid import BLOCKS, documents, next_token_targets
from suites.compile.expectations import expected
from suites.model.programs import FEATURES, TOGETHER, VARIANTS, program, randomize_zero_parameters
from suites.support.hybrids import SEED, build, token_batch, watched_hybrid
from suites.support.lanes import Lane, lanes

SPLIT, T = 24, 64
STEPS = 8
INSTRUMENTS = ("graphs", "graph_breaks", "recompiles")
ALL = FEATURES | VARIANTS
EVERY = {name: value for changes in FEATURES.values() for name, value in changes.items()}


def inputs_for(config: HybridConfig, batch: int, *spans, device: str) -> Features | None:
    """Return a synthetic program if the model reads one."""
    reads = config.structure or config.ngram or config.tree
    return program(config, batch, *spans, device=device) if reads else None


def featured(lane: Lane, dtype: torch.dtype = torch.float64, **changes):
    """Return a config that no routing overflows, and its model in eval mode with every feature's parameters nonzero."""
    config = preset("nam12", "narrow", capacity_factor=16.0, **changes)
    return config, randomize_zero_parameters(build(config, lane.device)).to(dtype).eval()


@lanes("cpu", "h200")
def test_features_off_is_bit_equal_to_model_without_them(lane: Lane) -> None:
    """Compare with the parts assembled here without any feature code, under the same seed."""
    config = preset("nam12", "narrow")
    model = build(config, lane.device)
    torch.manual_seed(SEED)
    embedding = nn.Embedding(config.vocab_size, config.d_model)
    nn.init.normal_(embedding.weight, std=config.d_model**-0.5)
    blocks = nn.ModuleList(BLOCKS[kind](config) for kind in config.kinds)
    parts = nn.ModuleDict({"embedding": embedding, "blocks": blocks}).to(lane.device)
    assert list(model.state_dict()) == list(parts.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), parts.state_dict().values()))
    ids = token_batch(config, 2, device=lane.device)
    doc_ids, positions = documents(ids, config.bos_id)
    x, aux = embedding(ids), torch.zeros((), device=lane.device)
    for letter, block in zip(config.letters, blocks):
        x, extra = block(x) if letter == "E" else (block(x, doc_ids, positions), 0.0)
        aux = aux + extra
    loss = LossHead(config.logit_softcap, config.norm_eps)(
        x, embedding.weight, next_token_targets(ids, doc_ids)
    )
    assert torch.equal(model(ids), loss + aux)


@lanes("cpu", "h200")
@pytest.mark.parametrize("feature", ["structure", "ngram", "tree", "engram"])
def test_feature_starts_as_the_identity(lane: Lane, feature: str) -> None:
    config = preset("nam12", "narrow")
    ids = token_batch(config, 2, device=lane.device)
    on = build(config.replace(**FEATURES[feature]), lane.device)
    with torch.no_grad():
        without, asleep = build(config, lane.device)(ids), on(ids)
        assert torch.equal(without, asleep)
        inputs = inputs_for(on.config, 2, (0, T, 1), device=lane.device)
        assert not torch.equal(without, randomize_zero_parameters(on)(ids, inputs)), (
            "with nonzero parameters it must change the result"
        )


@lanes("cpu", "h200")
@pytest.mark.parametrize("feature", ALL)
def test_feature_on_trains(lane: Lane, feature: str) -> None:
    config, model = featured(lane, torch.float32, **ALL[feature])
    model.train()
    known = set(build(preset("nam12", "narrow")).state_dict())
    ids = token_batch(config, 2, device=lane.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(3):
        loss = model(ids, inputs_for(config, 2, (0, T, 1), device=lane.device))
        loss.backward()
        if step == 0:
            dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
            assert [n for n in dead if n not in known] == []
            assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[1] < losses[0]


@lanes("cpu", "h200")
@pytest.mark.parametrize("feature", ALL)
def test_second_document_does_not_depend_on_the_first(lane: Lane, feature: str) -> None:
    config, model = featured(lane, **ALL[feature])
    ids = token_batch(config, 1, device=lane.device)
    ids[:, 1:][ids[:, 1:] == config.bos_id] = 9
    ids[:, SPLIT] = config.bos_id
    both = inputs_for(config, 1, (0, SPLIT, 1), (SPLIT, T, 2), device=lane.device)
    other_first = inputs_for(config, 1, (0, SPLIT, 5), (SPLIT, T, 2), device=lane.device)
    second = inputs_for(config, 1, (0, T - SPLIT, 2), device=lane.device)
    changed_ids = ids.clone()
    changed_ids[:, 5] += 1
    with torch.no_grad():
        packed = model.logits(ids, both)
        alone = model.logits(ids[:, SPLIT:], second)
        changed = model.logits(changed_ids, other_first)
    assert not torch.equal(changed[:, :SPLIT], packed[:, :SPLIT]), "the first document must change"
    # fp64: the remaining difference is the order of sums over a longer row.
    assert float((packed[:, SPLIT:] - alone).abs().max()) <= 1e-10
    assert float((packed[:, SPLIT:] - changed[:, SPLIT:]).abs().max()) <= 1e-10


def past_moves(model: nn.Module, config: HybridConfig, ids: Tensor, inputs: Features | None) -> float:
    """Return how far the logits before token 40 move when the ids from it on change."""
    later = ids.clone()
    later[:, 40:] = later[:, 40:] + 1
    with torch.no_grad():
        now, then = model.logits(ids, inputs), model.logits(later, inputs)
    assert not torch.equal(now[:, 40:], then[:, 40:])
    return float((now[:, :40] - then[:, :40]).abs().max())


@lanes("cpu", "h200")
@pytest.mark.parametrize("feature", ALL)
def test_future_tokens_do_not_affect_the_past(lane: Lane, feature: str) -> None:
    config, model = featured(lane, **ALL[feature])
    ids = token_batch(config, 1, device=lane.device)
    inputs = inputs_for(config, 1, (0, T, 1), device=lane.device)
    assert past_moves(model, config, ids, inputs) <= 1e-10  # a GPU sums chunks in any order


@lanes("cpu", "h200")
def test_published_tree_ffn_leaks_the_future(lane: Lane) -> None:
    """Not causal: a token in a chunk reads the mean of the whole chunk. The control of the test above."""
    config, model = featured(lane, tree=TreeConfig(chunks=24, edges=24, width=16, causal=False))
    ids = token_batch(config, 1, device=lane.device)
    ids[:, 36:44] = 9  # one document around the chunk, which extends past token 40
    inputs = Features.absent(ids, config)
    inputs.start[:, 0], inputs.end[:, 0] = 36, 44
    assert past_moves(model, config, ids, inputs) > 1e-6


@lanes("cpu", "h200")
@pytest.mark.parametrize("feature", [feature for feature in ALL if feature != "hyper_two_streams"])
def test_eight_regional_steps_with_features(lane: Lane, feature: str, row, canaries) -> None:
    """Batches of three sizes; the features' inputs are present at one step and absent at the next."""
    canaries(*INSTRUMENTS)
    backend = "eager"  # breaks and recompiles come from Dynamo; AOTAutograd, five times slower, runs below
    with watched_hybrid("nam12", "regional", device=lane.device, backend=backend, **ALL[feature]) as hybrid:
        config, model = hybrid.config, hybrid.model
        regions = len(config.letters) + 1
        regions += model.token_features is not None
        hybrid.compiled.warm_up(token_batch(config, 2, device=lane.device))
        warm = hybrid.report()
        before = (len(warm.recompiles), warm.unique_graphs, warm.calls)
        optimizer = make_optimizer(model)
        for step in range(STEPS):
            batch = (2, 4, 3)[step % 3]
            ids = token_batch(config, batch, seed=step, device=lane.device)
            known = inputs_for(config, batch, (0, T, step), device=lane.device) if step % 2 else None
            model(ids, known).backward()
            optimizer.step()
            optimizer.zero_grad()
        report = hybrid.report()
    case = f"model/nam12-{feature}"
    calls = report.calls - before[2]
    seen = Seen(calls, report.evidence())
    assert calls == STEPS * regions, "a region ran as plain Python, or in pieces"
    row.count(f"{case}/graph_breaks", len(report.breaks), expected=0, rule="C6", seen=seen)
    row.count(f"{case}/recompiles", len(report.recompiles) - before[0], expected=0, rule="C8", seen=seen)
    assert report.unique_graphs == before[1]


@lanes("cpu", "h200")
@pytest.mark.parametrize("changes", ["features", *TOGETHER])
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in ("eager", "regional")])
def test_all_features_under_the_other_policies(lane: Lane, policy: str, changes: str, canaries) -> None:
    """No policy depends on features or kinds of blocks: each compiles to as many graphs as without them."""
    if policy == "per_block" and changes == "features":
        # Token features are a separate region there, see test_eight_regional_steps_with_features.
        changes = "latent_sparse_mimo"
    canaries(*INSTRUMENTS)
    on = EVERY if changes == "features" else TOGETHER[changes]
    with watched_hybrid("nam12", policy, device=lane.device, backend="eager", **on) as hybrid:
        ids = token_batch(hybrid.config, 2, device=lane.device)
        hybrid.compiled.warm_up(ids)
        calls, _ = hybrid.forward(ids)
        report = hybrid.report()
    want = expected(hybrid.config.kinds, policy)
    assert (len(report.breaks), calls, report.unique_graphs) == (
        want.graph_breaks,
        want.compiled_calls,
        want.unique_graphs,
    ), report.evidence()


@lanes("cpu", "h200")
def test_compiled_equals_eager_with_all_features(lane: Lane) -> None:
    with watched_hybrid("nam12", "regional", device=lane.device, backend="aot_eager", **EVERY) as hybrid:
        randomize_zero_parameters(hybrid.model).double()
        eager = build(hybrid.config, lane.device, torch.float64)
        eager.load_state_dict(hybrid.model.state_dict())
        ids = token_batch(hybrid.config, 2, device=lane.device)
        known = program(hybrid.config, 2, (0, T, 1), device=lane.device)
        for model in (hybrid.model, eager):
            model(ids, known).backward()
        assert hybrid.report().calls
    for ours, theirs in zip(hybrid.model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@lanes("cpu")
def test_unused_inputs_are_refused(lane: Lane) -> None:
    config = preset("nam12", "narrow")
    ids = token_batch(config, 1)
    with pytest.raises(ValueError, match="structure, ngram and tree are all off"):
        build(config)(ids, Features.absent(ids, config))
