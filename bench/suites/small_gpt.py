"""A small GPT in plain torch, for memory_of_a_step.py and training_losses.py in probes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        thirds = self.inputs(self.norms[0](x)).chunk(3, -1)
        split = (third.unflatten(-1, (self.heads, -1)).transpose(1, 2) for third in thirds)
        heads = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.output(heads.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norms[1](x))))


class SmallGPT(nn.Module):
    """Returns scores of the tokens; its head is their embedding."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def tiny() -> SmallGPT:
    """One of 1.9 million weights, for a CPU."""
    return SmallGPT(layers=3, width=192, heads=4, vocabulary=2048, length=256)


def small() -> SmallGPT:
    """One of 124 million weights, for a GPU: GPT-2's sizes."""
    return SmallGPT(layers=12, width=768, heads=12, vocabulary=50304, length=1024)
