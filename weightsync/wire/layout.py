"""What a publisher holds, without the memory: tensors, their shards, and where each lies in a slot."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import msgspec

from weightsync.config import TENSOR_ALIGNMENT
from weightsync.errors import LayoutError, ProtocolError
from weightsync.segment import round_up
from weightsync.types import DTYPES, Box


class TensorSpec(msgspec.Struct, array_like=True, frozen=True):
    """A logical tensor: its checkpoint name, its dtype on the wire, its whole shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class ShardSpec(msgspec.Struct, array_like=True, frozen=True):
    """A box of tensor number `tensor`, stored row-major at byte `offset` of every slot."""

    tensor: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: int

    @property
    def box(self) -> Box:
        return Box(self.start, self.stop)


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All tensors and shards of a publisher. `aliases` maps tied names to the name that is sent."""

    tensors: tuple[TensorSpec, ...]
    shards: tuple[ShardSpec, ...]
    aliases: dict[str, str]
    slot_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of weights in one version, without padding."""
        return sum(shard_bytes(self, shard) for shard in self.shards)

    def fingerprint(self) -> str:
        """Equal if and only if a plan made for one layout may be replayed on the other."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()

    def validate(self) -> None:
        """Raise ProtocolError unless every shard lies inside its tensor and the slot. Peers are not trusted."""
        for spec in self.tensors:
            if spec.dtype not in DTYPES:
                raise ProtocolError(
                    f"{spec.name}: dtype {spec.dtype!r} is unknown here; install the same release"
                )
            if any(n < 0 for n in spec.shape) or math.prod(spec.shape) >= 2**62 or len(spec.shape) > 8:
                raise ProtocolError(f"{spec.name}: impossible shape {spec.shape}")
        for shard in self.shards:
            if not 0 <= shard.tensor < len(self.tensors):
                raise ProtocolError(f"shard of tensor number {shard.tensor}, of {len(self.tensors)}")
            spec = self.tensors[shard.tensor]
            inside = len(shard.start) == len(shard.stop) == len(spec.shape) and all(
                0 <= a <= b <= n for a, b, n in zip(shard.start, shard.stop, spec.shape, strict=True)
            )
            if not inside or not 0 <= shard.offset <= self.slot_bytes - shard_bytes(self, shard):
                raise ProtocolError(f"{spec.name}: box {shard.box} at offset {shard.offset} lies outside")


def shard_bytes(layout: Layout, shard: ShardSpec) -> int:
    """Size of one shard in the slot."""
    return shard.box.size * DTYPES[layout.tensors[shard.tensor].dtype].itemsize


def lay_out(
    tensors: Iterable[TensorSpec], boxes: Iterable[tuple[int, Box]], aliases: dict[str, str]
) -> Layout:
    """Place shards one after the other in a slot, each aligned to 64 bytes.

    `boxes` are (tensor number, box) in slot order. Raises LayoutError on overlapping boxes of one tensor.
    """
    specs = tuple(tensors)
    shards: list[ShardSpec] = []
    offset = 0
    for tensor, box in boxes:
        shards.append(ShardSpec(tensor, box.start, box.stop, offset))
        size = box.size * DTYPES[specs[tensor].dtype].itemsize
        offset = round_up(offset + size, TENSOR_ALIGNMENT)
    _refuse_overlaps(specs, shards)
    return Layout(specs, tuple(shards), aliases, max(offset, TENSOR_ALIGNMENT))


def _refuse_overlaps(tensors: tuple[TensorSpec, ...], shards: list[ShardSpec]) -> None:
    by_tensor: dict[int, list[Box]] = {}
    for shard in shards:
        earlier = by_tensor.setdefault(shard.tensor, [])
        for other in earlier:
            if all(
                max(a, c) < min(b, d)
                for a, b, c, d in zip(shard.start, shard.stop, other.start, other.stop, strict=True)
            ):
                raise LayoutError(
                    f"{tensors[shard.tensor].name}: boxes {other} and {shard.box} overlap; register each element once"
                )
        earlier.append(shard.box)
