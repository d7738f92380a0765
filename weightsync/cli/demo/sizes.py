"""Model sizes of the demo, and how much work one training step and one request are at each size."""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = 256  # one token per byte


@dataclass(frozen=True, slots=True)
class GptSize:
    """Shape of a byte-level GPT and the work chosen for it, so that one CPU core shows progress in seconds."""

    layers: int
    heads: int
    width: int
    context: int  # bytes seen by one forward pass, in training and in serving
    batch: int  # sequences per optimizer step
    learning_rate: float
    publish_every: int  # optimizer steps between two versions
    reply_tokens: int  # bytes generated per request


SIZES: dict[str, GptSize] = {
    "tiny": GptSize(2, 2, 64, 32, 24, 4e-3, 8, 12),
    "small": GptSize(4, 4, 128, 32, 16, 3e-3, 4, 8),
    "medium": GptSize(6, 8, 256, 32, 8, 1.5e-3, 2, 6),
    "large": GptSize(8, 8, 512, 32, 4, 6e-4, 1, 4),
    "xl": GptSize(12, 12, 768, 24, 2, 3e-4, 1, 3),
}
