"""A tiny transformer. B batch, T tokens, D model dim, H heads, V vocabulary."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

V, D, H, LAYERS = 64, 32, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.norm_mlp(x))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B,T,V) of token ids (B,T)."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean loss in nats of predicting each next token of ids (B,T)."""
    return cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def setup(seed: int = 0) -> tuple[Tiny, Tensor]:
    """A model, and a batch (8,33) in which each token is the one before it plus 1 to 3."""
    torch.manual_seed(seed)
    return Tiny(), (torch.randint(1, 4, (8, 33)).cumsum(1) % V)
