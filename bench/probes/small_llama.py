"""A small Llama in plain torch, for galore_training.py in probes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.gate_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            each(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(
            rotated(q, rotation), rotated(k, rotation), v, is_causal=True
        )
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.gate_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turns pairs of elements by angles that grow with the position."""
    cosine, sine = rotation
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class SmallLlama(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.half = width // heads // 2
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        powers = torch.arange(self.half, device=tokens.device) / self.half
        angles = positions[:, None] * 10_000.0**-powers
        x, rotation = self.tokens(tokens), (angles.cos(), angles.sin())
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))
