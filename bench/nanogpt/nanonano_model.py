"""A GPT whose attention is computed in one of four ways."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanonano_settings import Settings

#: The kernels of `scaled_dot_product_attention` by device type. A CPU has one fused kernel.
BACKENDS = {
    "cuda": {
        "math": SDPBackend.MATH,
        "flash_attn": SDPBackend.FLASH_ATTENTION,
        "efficient_attn": SDPBackend.EFFICIENT_ATTENTION,
    },
    "cpu": {
        "math": SDPBackend.MATH,
        "flash_attn": SDPBackend.FLASH_ATTENTION,
        "efficient_attn": SDPBackend.FLASH_ATTENTION,
    },
}


class Attention(nn.Module):
    """Causal attention. Inputs and output are [batch, length, width]."""

    def __init__(self, settings: Settings, device_type: str) -> None:
        super().__init__()
        width, length = settings.n_embd, settings.block_size
        self.heads, self.dropout = settings.n_head, settings.dropout
        self.inputs = nn.Linear(width, 3 * width, bias=settings.bias)
        self.output = nn.Linear(width, width, bias=settings.bias)
        self.backend = BACKENDS[device_type].get(settings.attn_type)
        if self.backend is None:
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            self.register_buffer("later", later, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        thirds = self.inputs(x).chunk(3, -1)
        q, k, v = (third.unflatten(-1, (self.heads, -1)).transpose(1, 2) for third in thirds)
        dropout = self.dropout if self.training else 0.0
        if self.backend is None:
            heads = self._naive(q, k, v, dropout)
        else:
            with sdpa_kernel(self.backend):
                heads = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return F.dropout(self.output(heads.transpose(1, 2).flatten(2)), dropout, self.training)

    def _naive(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """The formula as it is written: whole [length, length] matrices of each head."""
        length = q.shape[-2]
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(self.later[:length, :length], -math.inf)
        return F.dropout(scores.softmax(-1), dropout) @ v


class Block(nn.Module):
    def __init__(self, settings: Settings, device_type: str) -> None:
        super().__init__()
        width, bias = settings.n_embd, settings.bias
        self.dropout = settings.dropout
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=bias) for _ in range(2))
        self.attention = Attention(settings, device_type)
        self.widen = nn.Linear(width, 4 * width, bias=bias)
        self.narrow = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        wide = F.gelu(self.widen(self.norms[1](x)))
        return x + F.dropout(self.narrow(wide), self.dropout, self.training)


class GPT(nn.Module):
    """Predicts the next token. The head is the embedding of the tokens."""

    def __init__(self, settings: Settings, symbols: int, device_type: str) -> None:
        super().__init__()
        width = settings.n_embd
        self.dropout = settings.dropout
        self.tokens = nn.Embedding(symbols, width)
        self.places = nn.Embedding(settings.block_size, width)
        self.blocks = nn.ModuleList(Block(settings, device_type) for _ in range(settings.n_layer))
        self.norm = nn.LayerNorm(width, bias=settings.bias)
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                # The outputs of all blocks are added up.
                is_output = name.endswith(("output.weight", "narrow.weight"))
                scale = math.sqrt(2 * settings.n_layer) if is_output else 1.0
                nn.init.normal_(weight, std=0.02 / scale)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss. Both arguments are [batch, length] of symbols' numbers."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def weights(self) -> int:
        """Returns the number of weights without those of places, as it is usually given."""
        return sum(weight.numel() for weight in self.parameters()) - self.places.weight.numel()
