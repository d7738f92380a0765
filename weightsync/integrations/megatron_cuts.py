"""Cuts: how one local Megatron parameter becomes shards of checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.types import Box, Shard


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What shapes alone don't say. `vocabulary`: real tokens, without padding. `groups`: key-value heads.

    `tied_embeddings`: the checkpoint has no head of its own. `stages`: layers of each virtual stage in the order of the
    model, `vpp_size * pp_size` of them (stage `chunk * pp_size + pp_rank` is a rank's chunk); by default all are equal.
    `experts`: the expert in each local place of this rank; by default contiguous blocks in the order of the ranks.
    """

    layers: int
    vocabulary: int
    heads: int
    groups: int
    head_dim: int
    expert_count: int = 0
    tied_embeddings: bool = False
    stages: tuple[int, ...] | None = None
    experts: tuple[int, ...] | None = None

    @classmethod
    def of_config(cls, config: Any, **changes: Any) -> Dimensions:
        """From a Hugging Face configuration; `changes` are fields to set otherwise."""
        heads = config.num_attention_heads
        counts = (
            getattr(config, key, None) for key in ("num_experts", "n_routed_experts", "num_local_experts")
        )
        found: dict[str, Any] = {
            "layers": config.num_hidden_layers,
            "vocabulary": config.vocab_size,
            "heads": heads,
            "groups": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "expert_count": next((count for count in counts if count), 0),
            "tied_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        }
        return cls(**{**found, **changes})


@dataclass(frozen=True, slots=True)
class Part:
    """One local parameter on its way to shards: the tensor, the grid axis that cuts it, and the checkpoint names."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    rank: int
    size: int
    dimensions: Dimensions


Cut = Callable[[Part], Iterator[Shard]]
"""Gives the shards of a part. Raises ValueError, or torch's RuntimeError, for a shape that it can't have."""


def whole(part: Part) -> Iterator[Shard]:
    """Every rank has all of it."""
    shape = tuple(part.tensor.shape)
    yield from _all_names(part.names, Box.whole(shape), part.tensor, shape)


def split(axis: int) -> Cut:
    """Equal parts along `axis`: 0 for column-parallel weights and biases, 1 for row-parallel weights."""

    def cut(part: Part) -> Iterator[Shard]:
        yield from _block(part.tensor, part.names[0], axis, part.rank, part.size)

    return cut


def vocabulary(part: Part) -> Iterator[Shard]:
    """Rows of a table that is padded at its end; padding is no part of the checkpoint."""
    yield from _vocabulary_of(part, part.names)


def embeddings(part: Part) -> Iterator[Shard]:
    """`vocabulary` for the first of two names (embeddings, head); of both if the model ties them."""
    yield from _vocabulary_of(part, part.names if part.dimensions.tied_embeddings else part.names[:1])


def head(part: Part) -> Iterator[Shard]:
    """`vocabulary` for the second of two names (embeddings, head); of both if it is a copy of the embeddings."""
    yield from _vocabulary_of(part, part.names if part.dimensions.tied_embeddings else part.names[1:])


def gated(part: Part) -> Iterator[Shard]:
    """A column-parallel pair in one tensor: on each rank its part of the first (gate), then of the second (up)."""
    for name, half in zip(part.names, _equal(part.tensor, 2, 0), strict=True):
        yield from _block(half, name, 0, part.rank, part.size)


def grouped_qkv(part: Part) -> Iterator[Shard]:
    """Weights or biases interleaved by group: all queries of a group, its key, its value; then the next group.

    Ranks cut the rows of this order into equal parts, whole groups or (more ranks than groups) parts of one.
    """
    d = part.dimensions
    queries = d.heads // d.groups
    rows, inner = part.tensor.shape[0], tuple(part.tensor.shape[1:])
    if rows * part.size != (d.heads + 2 * d.groups) * d.head_dim:
        raise ValueError(
            f"{part.size} ranks of {rows} rows are not {d.heads} + 2 * {d.groups} heads of {d.head_dim}"
        )
    q, k, v = part.names
    start = part.rank * rows
    for group in range(d.groups):
        at = group * (queries + 2) * d.head_dim
        for name, heads, total in ((q, queries, d.heads), (k, 1, d.groups), (v, 1, d.groups)):
            size = heads * d.head_dim
            first, last = max(at, start), min(at + size, start + rows)
            if first < last:
                begin = group * size + first - at
                box = Box((begin, *(0,) * len(inner)), (begin + last - first, *inner))
                yield Shard(
                    name, box, part.tensor[first - start : last - start], (total * d.head_dim, *inner)
                )
            at += size


def stacked_in(part: Part) -> Iterator[Shard]:
    """All local experts' first layers in one tensor, input-major: (hidden, experts * 2 * width), gate then up."""
    count = len(part.names) // 2
    hidden = part.tensor.shape[0]
    experts = part.tensor.view(
        count, hidden, -1
    )  # the memory is one (hidden, 2 * width) matrix after the other
    for number in range(count):
        pair = (part.names[number], part.names[count + number])
        for name, half in zip(pair, _equal(experts[number], 2, 1), strict=True):
            yield from _block(half.t(), name, 0, part.rank, part.size)


def stacked_out(part: Part) -> Iterator[Shard]:
    """All local experts' second layers in one tensor, input-major: (experts * width, hidden)."""
    experts = part.tensor.view(len(part.names), -1, part.tensor.shape[1])
    for name, expert in zip(part.names, experts, strict=True):
        yield from _block(expert.t(), name, 1, part.rank, part.size)


def _vocabulary_of(part: Part, names: Sequence[str]) -> Iterator[Shard]:
    rows, total = part.tensor.shape[0], part.dimensions.vocabulary
    if rows * part.size < total:
        raise ValueError(f"{part.size} ranks of {rows} rows hold fewer than {total} tokens")
    first = part.rank * rows
    last = min(first + rows, total)
    if first < last:
        shape = (total, *part.tensor.shape[1:])
        box = Box((first, *(0,) * (len(shape) - 1)), (last, *shape[1:]))
        yield from _all_names(names, box, part.tensor[: last - first], shape)


def _all_names(names: Sequence[str], box: Box, view: torch.Tensor, shape: tuple[int, ...]) -> Iterator[Shard]:
    for name in names:
        yield Shard(name, box, view, shape)


def _equal(tensor: torch.Tensor, count: int, axis: int) -> tuple[torch.Tensor, ...]:
    if tensor.shape[axis] % count:
        raise ValueError(f"dimension {axis} does not divide by {count}")
    return tensor.chunk(count, axis)


def _block(view: torch.Tensor, name: str, axis: int, rank: int, size: int) -> Iterator[Shard]:
    """`view` as block `rank` of `size` equal ones along `axis`."""
    n = view.shape[axis]
    shape = tuple(length * size if d == axis else length for d, length in enumerate(view.shape))
    start = tuple(rank * n if d == axis else 0 for d in range(view.dim()))
    yield Shard(name, Box(start, tuple(a + b for a, b in zip(start, view.shape, strict=True))), view, shape)
