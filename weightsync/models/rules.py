"""A model as a table of rules: each checkpoint tensor's shape, how it may be cut, and what servers fuse it into."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from weightsync.errors import ConfigError
from weightsync.moves import Int64s

VOCABULARY_PADDING = 64
"""Servers and Megatron pad the vocabulary to a multiple of this, and of the tensor-parallel degree."""


class Split(Enum):
    """How tensor parallelism cuts a tensor."""

    WHOLE = "whole"
    """Every rank has all of it."""
    COLUMN = "column"
    """Along dimension 0, evenly."""
    ROW = "row"
    """Along dimension 1, evenly."""
    KV = "kv"
    """Along dimension 0 by KV heads, each on several ranks where there are more ranks than heads."""
    VOCABULARY = "vocabulary"
    """Along dimension 0 after padding; the padding is on no wire."""


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One checkpoint tensor per layer of `layers` (one in all, if that is empty) and per expert of `experts`.

    `name` has `{layer}` and `{expert}` in it. `units` is what can't be cut along the split dimension: heads, or 0 for
    single rows. `parameter` is the server's fused parameter, in which the tensor is part number `part` along dimension
    0; experts are stacked in front. Tensors without layers live on the first or, `is_last`, last pipeline stage.
    """

    name: str
    shape: tuple[int, ...]
    split: Split
    parameter: str
    part: int = 0
    units: int = 0
    layers: tuple[int, ...] = ()
    experts: int = 0
    is_last: bool = False
    itemsize: int = 2

    @property
    def dimension(self) -> int:
        """The dimension that tensor parallelism cuts."""
        return 1 if self.split is Split.ROW else 0

    def local_size(self, ranks: int) -> int:
        """Extent of one of `ranks` parts along `dimension`, with padding. Raises ConfigError if it can't be cut so."""
        size = self.shape[self.dimension]
        if self.split is Split.WHOLE:
            return size
        if self.split is Split.VOCABULARY:
            unit = math.lcm(VOCABULARY_PADDING, ranks)
            return -(-size // unit) * unit // ranks
        units = self.units or size
        if self.split is Split.KV and ranks > units and ranks % units == 0:
            return size // units
        if units % ranks:
            what = "heads" if self.units else "rows" if self.dimension == 0 else "columns"
            raise ConfigError(
                f"{self.name}: {units} {what} can't be divided among {ranks} tensor-parallel ranks"
            )
        return size // ranks

    def cut(self, index: Int64s, ranks: int) -> tuple[Int64s, Int64s]:
        """Boxes of parts `index` of `ranks`: start and stop, (parts, dimensions of the tensor)."""
        local, d, size = self.local_size(ranks), self.dimension, self.shape[self.dimension]
        start = np.zeros((len(index), len(self.shape)), np.int64)
        stop = np.tile(np.array(self.shape, np.int64), (len(index), 1))
        if self.split is not Split.WHOLE:
            copies = ranks * local // size if self.split is Split.KV else 1
            start[:, d] = np.minimum(index // copies * local, size)
            stop[:, d] = np.minimum(start[:, d] + local, size)
        return start, stop


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All rules of a model. `is_tied`: the output head is the embedding, under the embedding's name."""

    family: str
    layers: int
    experts: int
    is_tied: bool
    rules: tuple[TensorRule, ...]

    @property
    def parameters(self) -> int:
        """Elements of all tensors of the checkpoint."""
        return sum(
            math.prod(rule.shape) * max(1, len(rule.layers)) * max(1, rule.experts) for rule in self.rules
        )


def stage_of_layers(layers: int, stages: int) -> Int64s:
    """The pipeline stage of each layer: contiguous, the first stages take the remainder."""
    if stages > layers:
        raise ConfigError(f"pp={stages}: the model has {layers} layers only")
    sizes = np.full(stages, layers // stages) + (np.arange(stages) < layers % stages)
    return np.repeat(np.arange(stages), sizes)
