"""Packed documents are isolated: [A|B] gives the same result for B as B alone, through all layers of the model."""

from __future__ import annotations

import pytest
import torch

from model import preset
from model.hybrid import documents, next_token_targets
from suites.support.hybrids import build, token_batch
from suites.support.lanes import Lane, lanes

SPLIT = 24


@lanes("cpu", "h200")
def test_documents_start_at_bos(lane: Lane) -> None:
    ids = torch.tensor([[2, 9, 9, 2, 9, 2], [9, 9, 2, 9, 9, 9]])
    doc_ids, positions = documents(ids, bos_id=2)
    assert doc_ids.tolist() == [[1, 1, 1, 2, 2, 3], [0, 0, 1, 1, 1, 1]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]
    assert next_token_targets(ids, doc_ids).tolist() == [[9, 9, -1, 9, -1, -1], [9, -1, 9, 9, 9, -1]]


@lanes("cpu", "h200")
@pytest.mark.parametrize(("name", "mixer"), [("nam12", "mamba3"), ("nam12", "mamba2"), ("nam56r", "mamba3")])
def test_second_document_does_not_depend_on_the_first(lane: Lane, name: str, mixer: str, row) -> None:
    # A capacity that no routing overflows: the experts' slots are the only thing that a packed row shares.
    config = preset(name, "narrow", m_mixer=mixer, capacity_factor=16.0)
    model = build(config, lane.device).double()
    ids = token_batch(config, 1, device=lane.device)
    ids[:, 1:][ids[:, 1:] == config.bos_id] = 9
    ids[:, SPLIT] = config.bos_id
    with torch.no_grad():
        packed = model.logits(ids)[:, SPLIT:]
        alone = model.logits(ids[:, SPLIT:])
        ids[:, 5] += 1
        changed = model.logits(ids)
    assert not torch.equal(changed[:, :SPLIT], packed[:, :SPLIT]), (
        "the first document must change, or the test shows nothing"
    )
    row.bound(
        f"model/{name}-{mixer}/document_leak", float((packed - alone).abs().max()), "logits", at_most=1e-10,
        rule="C36", seen=packed.numel(),
        evidence=("fp64: what is left is the order of sums over a longer row",),
    )  # fmt: skip
    assert torch.equal(changed[:, SPLIT:], packed), "a change in document 1 changed document 2"
    assert model.overflow() == 0


@lanes("cpu", "h200")
def test_future_tokens_do_not_affect_the_past(lane: Lane) -> None:
    config = preset("nam12", "narrow", capacity_factor=16.0)
    model = build(config, lane.device)
    ids = token_batch(config, 1, device=lane.device)
    later = ids.clone()
    later[:, 40:] = later[:, 40:] + 1
    with torch.no_grad():
        assert torch.equal(model.logits(ids)[:, :40], model.logits(later)[:, :40])
