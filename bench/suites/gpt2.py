"""GPT-2 in plain torch as Adan's authors measured it: dropout, and whole attention matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from suites.adan_published import Published

VOCABULARY, POSITIONS = 49_280, 2_048
DROPOUT = 0.1


class Attention(nn.Module):
    def __init__(self, size: Published) -> None:
        super().__init__()
        self.heads = size.heads
        self.inputs = nn.Linear(size.embedding, 3 * size.embedding)
        self.output = nn.Linear(size.embedding, size.embedding)

    def forward(self, x: Tensor) -> Tensor:
        thirds = self.inputs(x).chunk(3, -1)
        split = (third.unflatten(-1, (self.heads, -1)).transpose(1, 2) for third in thirds)
        # Not in tiles: the published peaks grow with the heads, by the matrices of all layers.
        with sdpa_kernel(SDPBackend.MATH):
            heads = F.scaled_dot_product_attention(*split, dropout_p=DROPOUT, is_causal=True)
        return F.dropout(self.output(heads.transpose(1, 2).flatten(2)), DROPOUT)


class Block(nn.Module):
    def __init__(self, size: Published) -> None:
        super().__init__()
        width = size.embedding
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(size)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        wide = gelu(self.widen(self.norms[1](x)))
        return x + F.dropout(self.narrow(wide), DROPOUT)


def gelu(x: Tensor) -> Tensor:
    """As GPT-2 has it, and in as many operations: each keeps its inputs for the backward."""
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


class GPT2(nn.Module):
    """The head is the embedding of the tokens."""

    def __init__(self, size: Published) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.embedding)
        self.positions = nn.Embedding(POSITIONS, size.embedding)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.embedding)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The loss over the next tokens, and the logits."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.tokens(tokens) + self.positions(places), DROPOUT)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        shifted = logits[:, :-1].contiguous().flatten(0, 1)
        return F.cross_entropy(shifted, tokens[:, 1:].flatten()), logits


def make_gradients(model: GPT2) -> None:
    """Makes gradients from a short sequence: it only matters that a backward has made them."""
    tokens = torch.randint(VOCABULARY, (1, 128), device=model.norm.weight.device)
    model.zero_grad()
    model(tokens)[0].backward()
