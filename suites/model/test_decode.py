"""Decoding token by token equals the full sequence at once, for each stateful block. A law has the whole model.

B batch, T tokens.
"""

from __future__ import annotations

import pytest
import torch

from model import preset
from model.config import DSAConfig, MLAConfig, NgramConfig
from model.decode import empty_state, forget
from model.hybrid import documents
from suites.model.programs import randomize_zero_parameters
from suites.support.hybrids import build, token_batch
from suites.support.lanes import Lane, lanes

T = 64
BLOCKS = {
    "attention": ("A", {}),
    "attention_window": ("A", {"window": 9}),
    "attention_gate": ("A", {"attention_gate": "head"}),
    "attention_channel_gate": ("A", {"attention_gate": "channel"}),
    "mla": ("A", {"mla": MLAConfig(16, 16, 8, 8, 8)}),
    "mla_gate": ("A", {"mla": MLAConfig(16, 16, 8, 8, 8), "attention_gate": "channel"}),
    "dsa": ("A", {"dsa": DSAConfig(ranks=(1,), heads=2, width=8, top_k=7)}),
    "mamba3": ("M", {}),
    "mimo": ("M", {"m_mixer": "mimo"}),
    "mamba2": ("M", {"m_mixer": "mamba2"}),
    "m2rnn": ("R", {}),
}


@lanes("cpu", "h200")
@pytest.mark.parametrize("name", BLOCKS)
def test_block_decode_equals_full_forward(lane: Lane, name: str) -> None:
    letter, changes = BLOCKS[name]
    config = preset("nam12", "narrow", **changes)
    model = randomize_zero_parameters(build(config)).to(lane.device, torch.float64)
    block = model.blocks[config.letters.index(letter)]
    doc_ids, positions = documents(token_batch(config, 2, device=lane.device), config.bos_id)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, T, config.d_model, generator=g, dtype=torch.float64).to(lane.device)
    with torch.no_grad():
        whole = block(x, doc_ids, positions)
        state, found, leaking = block.empty_state(x[:, 0]), [], []
        never = state
        for t in range(T):
            place = (positions[:, t],) if letter == "A" else ()
            state = forget(state, positions[:, t] == 0)
            y, state = block.step(x[:, t], state, *place)
            found.append(y)
            y, never = block.step(x[:, t], never, *place)
            leaking.append(y)
    torch.testing.assert_close(torch.stack(found, 1), whole, rtol=1e-10, atol=1e-10)
    assert (positions == 0).sum() > 2
    assert (torch.stack(leaking, 1) - whole).abs().max() > 1e-3, "a state that is never emptied must differ"


@lanes("cpu")
def test_decode_refuses_unsupported_features(lane: Lane) -> None:
    model = build(preset("nam12", "narrow", ngram=NgramConfig(table=500)))
    with pytest.raises(ValueError, match="decoding does not support ngram"):
        empty_state(model, 1)
