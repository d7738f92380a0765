"""Stacked experts of `transformers` 5 and newer, as the single experts that its checkpoints hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from weightsync.integrations.boxes import intersect
from weightsync.types import Box, Shard


def unstack_experts(
    shards: Iterable[Shard],
    names: Sequence[str] = ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
) -> list[Shard]:
    """Shards of `experts.gate_up_proj` and `experts.down_proj`, cut into those of each expert; others are unchanged.

    In memory the library stacks experts: `gate_up_proj` is (experts, 2 * width, hidden), `down_proj` is (experts,
    hidden, width). Its checkpoints, which are the wire format, have `experts.{number}.` and `names` for each. Works on
    any sharding of the stacked tensors, e.g. on what `torch_shards` gives for FSDP2.
    """
    gate, up, down = names
    cut: list[Shard] = []
    for shard in shards:
        prefix, _, kind = shard.name.rpartition(".")
        if prefix.endswith("experts") and kind == "gate_up_proj" and len(shard.shape) == 3:
            width = shard.shape[1] // 2
            cut += _experts(shard, prefix, gate, 0, width)
            cut += _experts(shard, prefix, up, width, 2 * width)
        elif prefix.endswith("experts") and kind == "down_proj" and len(shard.shape) == 3:
            cut += _experts(shard, prefix, down, 0, shard.shape[1])
        else:
            cut.append(shard)
    return cut


def _experts(shard: Shard, prefix: str, name: str, first: int, last: int) -> Iterator[Shard]:
    """What `shard` holds of rows `[first, last)` of each expert."""
    columns = shard.shape[2]
    for expert in range(shard.box.start[0], shard.box.stop[0]):
        held = intersect(shard.box, Box((expert, first, 0), (expert + 1, last, columns)))
        if held is not None:
            here = tuple(
                slice(a - o, b - o) for a, b, o in zip(held.start, held.stop, shard.box.start, strict=True)
            )
            box = Box((held.start[1] - first, held.start[2]), (held.stop[1] - first, held.stop[2]))
            yield Shard(f"{prefix}.{expert}.{name}", box, shard.view[here][0], (last - first, columns))
