"""A small byte-level GPT in plain PyTorch: pre-norm blocks, learned positions, tied embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightsync.cli.demo.sizes import VOCABULARY, GptSize


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer of four times the width."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width)
        self.mlp_out = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(rows, length, width))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)))
        mixed: Tensor = x + self.mlp_out(hidden)
        return mixed


class Gpt(nn.Module):
    """Logits of the next byte. `head.weight` and `embedding.weight` are one tensor under two names."""

    def __init__(self, size: GptSize, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self._initialise(size, torch.Generator().manual_seed(seed))

    def _initialise(self, size: GptSize, generator: torch.Generator) -> None:
        """GPT-2's initialisation: 0.02, and the residual outputs smaller by sqrt(2 * layers)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                spread = 0.02 / (2 * size.layers) ** 0.5 if is_residual else 0.02
                nn.init.normal_(parameter, std=spread, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def hidden(self, tokens: Tensor) -> Tensor:
        """`(rows, length)` byte values to `(rows, length, width)`."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte after the last one only, `(rows, 256)`: what generation needs."""
        logits: Tensor = self.head(self.hidden(tokens)[:, -1])
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy, in nats per byte, of `(rows, context + 1)` byte values."""
        logits = self.head(self.hidden(tokens[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
