"""NgramHash: rows of the table against a hash in Python integers, documents, and a hash that is stable across builds.

B batch, T tokens, H hash heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model import preset
from model.config import NgramConfig
from model.hybrid import documents
from model.ngram import NgramHash, primes_from
from suites.model.programs import randomize_zero_parameters
from suites.support.hybrids import token_batch
from suites.support.lanes import Lane, lanes

NGRAM = NgramConfig(orders=(2, 3), heads=8, table=500)
CONFIG = preset("nam12", "narrow", ngram=NGRAM)


def by_hand(module: NgramHash, ids: Tensor, doc_ids: Tensor, across: bool = False) -> Tensor:
    """Look up rows of the table, one token and one head at a time. `across` is the fault: it ignores documents."""
    B, T = ids.shape
    multipliers, biases, primes = (t.tolist() for t in (module.multiplier, module.bias, module.prime))
    rows = torch.zeros(B, T, len(primes), dtype=torch.int64)
    for b in range(B):
        tokens, docs = ids[b].tolist(), doc_ids[b].tolist()
        for t in range(T):
            for h, prime in enumerate(primes):
                mixed = biases[h]
                for j in range(NGRAM.orders[h // NGRAM.heads]):
                    if t >= j and (across or docs[t - j] == docs[t]):
                        mixed ^= multipliers[h][j] * tokens[t - j]
                rows[b, t, h] = mixed % prime + sum(primes[:h])
    return rows.to(ids.device)


class Unseeded(NgramHash):
    """The incorrect form: multipliers from the global generator, and none in the checkpoint."""

    def __init__(self, config) -> None:
        super().__init__(config)
        odd = torch.randint(0, 2**30, self.multiplier.shape) * 2 + 1
        self.register_buffer("multiplier", odd, persistent=False)


@lanes("cpu", "h200")
def test_hash_equals_python_integer_hash(lane: Lane) -> None:
    module = NgramHash(CONFIG).to(lane.device)
    ids = token_batch(CONFIG, 2, device=lane.device)
    ids[1, 3] = 2**31  # a product near 2^62 must be exact
    doc_ids, _ = documents(ids, CONFIG.bos_id)
    rows = module.rows(ids, doc_ids)
    assert torch.equal(rows, by_hand(module, ids, doc_ids))
    assert not torch.equal(rows, by_hand(module, ids, doc_ids, across=True))
    assert bool((rows >= module.offset).all())
    assert bool((rows < module.offset + module.prime).all())


@lanes("cpu", "h200")
def test_ngram_embeds_the_hashed_rows(lane: Lane) -> None:
    module = randomize_zero_parameters(NgramHash(CONFIG)).to(lane.device).double()
    ids = token_batch(CONFIG, 2, device=lane.device)
    doc_ids, _ = documents(ids, CONFIG.bos_id)
    embedded = torch.stack([module.table[r].flatten() for r in by_hand(module, ids, doc_ids).flatten(0, 1)])
    expected = (embedded @ module.output.weight.T).view(*ids.shape, -1)
    torch.testing.assert_close(module(ids, doc_ids), expected, rtol=1e-12, atol=1e-12)


def two_builds(kind: type[NgramHash]) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of a build, of a build under another global seed, and of that one with the first one's checkpoint."""
    ids = token_batch(CONFIG, 2)
    doc_ids, _ = documents(ids, CONFIG.bos_id)
    torch.manual_seed(1)
    first = kind(CONFIG)
    torch.manual_seed(2)
    second = kind(CONFIG)
    rows = second.rows(ids, doc_ids)
    second.load_state_dict(first.state_dict(), strict=False)
    return first.rows(ids, doc_ids), rows, second.rows(ids, doc_ids)


@lanes("cpu")
def test_two_builds_have_the_same_hash(lane: Lane) -> None:
    first, second, restored = two_builds(NgramHash)
    assert torch.equal(first, second)
    assert torch.equal(first, restored)
    first, second, restored = two_builds(Unseeded)
    assert not torch.equal(first, second)
    assert not torch.equal(first, restored)


@lanes("cpu")
def test_another_seed_is_restored_from_the_checkpoint(lane: Lane) -> None:
    saved = NgramHash(CONFIG.replace(ngram=NgramConfig(table=500, seed=7)))
    other = NgramHash(CONFIG)
    assert not torch.equal(saved.multiplier, other.multiplier)
    other.load_state_dict(saved.state_dict())
    assert torch.equal(saved.multiplier, other.multiplier)


@lanes("cpu")
def test_tables_are_of_different_prime_sizes(lane: Lane) -> None:
    primes = primes_from(500_000, 16)
    assert primes[:3] == [500_009, 500_029, 500_041]
    assert len(set(primes)) == 16
    assert bool((NgramHash(CONFIG).multiplier[:, :2] % 2 == 1).all()), "an even multiplier loses a bit"
