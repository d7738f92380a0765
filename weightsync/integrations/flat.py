"""Flat buffers: shards of tensors that are stored flattened and one after the other (FSDP1, ZeRO-3)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from weightsync.errors import LayoutError
from weightsync.integrations.boxes import interval_to_boxes
from weightsync.types import Shard


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A tensor of `shape`, flattened row-major, that begins at element `offset` of a flat parameter."""

    name: str
    shape: tuple[int, ...]
    offset: int = 0


def flat_shards(buffer: torch.Tensor, start: int, tensors: Iterable[FlatTensor]) -> list[Shard]:
    """The shards in a one-dimensional `buffer` that holds `[start, start + len(buffer))` of a flat parameter.

    An interval of a tensor is a few boxes, and each is a shard that views the buffer. Elements of no tensor are
    padding. Tensors outside the buffer have no shards here. Raises LayoutError unless the buffer
    is one-dimensional and dense.
    """
    if buffer.dim() != 1 or (buffer.numel() > 1 and buffer.stride(0) != 1):
        raise LayoutError(
            f"a flat buffer has one dense dimension, this one has shape {list(buffer.shape)} and strides "
            f"{list(buffer.stride())}; pass the buffer that the framework allocated, flattened"
        )
    shards: list[Shard] = []
    stop = start + buffer.numel()
    for tensor in tensors:
        first = max(start, tensor.offset)
        last = min(stop, tensor.offset + math.prod(tensor.shape))
        at = first - start
        for box in (
            interval_to_boxes(tensor.shape, first - tensor.offset, last - tensor.offset)
            if first < last
            else ()
        ):
            shards.append(Shard(tensor.name, box, buffer[at : at + box.size].view(box.shape), tensor.shape))
            at += box.size
    return shards
