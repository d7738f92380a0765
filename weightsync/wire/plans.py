"""The plans of all destinations of a fleet, in columns: shared by readers with equal needs, unfolded per rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.moves import Int64s
from weightsync.wire.boxes import unfold
from weightsync.wire.columns import Int32s, Side, TensorTable
from weightsync.wire.patterns import RankSets


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves of one destination, ordered by source, then by place in its slot; one entry per move in each array.

    `offset`: byte in the slot of `source` where the box lies, row-major. `shard`: number of the destination's shard.
    `range`: number of the range, in `Plans.ranges` of the same rank, that brings the bytes.
    """

    source: Int32s
    tensor: Int32s
    start: Int64s
    stop: Int64s
    offset: Int64s
    size: Int64s
    shard: Int64s
    range: Int64s


@dataclass(frozen=True, slots=True)
class Ranges:
    """What one destination reads: bytes `offset : offset + size` of the slot of `source`, one entry per read."""

    source: Int32s
    offset: Int64s
    size: Int64s


@dataclass(frozen=True, slots=True)
class Staging:
    """What one source stages, in slot order: boxes of tensors, the byte `offset` of each in the slot, row-major, and
    `shard`, the number of its own shard that contains the box. A box may be staged twice (for different readers)."""

    tensor: Int32s
    start: Int64s
    stop: Int64s
    offset: Int64s
    size: Int64s
    shard: Int64s


@dataclass(frozen=True, slots=True)
class Plans:
    """All moves between two sides. Parcel `p` is piece `piece[p]` of `tensor[p]`, at byte `offset[p]` of its source's
    slot, a multiple of 64; region `r` is parcels `region_first[r] : region_first[r + 1]` of `region_source[r]`, at bytes
    `region_offset[r] : region_stop[r]`, all read by the ranks `readers[region_readers[r]]`; `region_bytes` is without
    the padding between parcels. Regions are ordered by source and place. `wanted_first`, `wanted_regions`: which regions
    each destination reads. `bytes_needed`: distinct wanted bytes, summed over destinations;
    `distinct_bytes`: those that anyone wants, counted once.
    """

    tensors: TensorTable
    sources: Side
    targets: Side
    piece_start: Int64s
    piece_stop: Int64s
    tensor: Int32s
    piece: Int32s
    size: Int64s
    offset: Int64s
    region_first: Int64s
    region_source: Int32s
    region_offset: Int64s
    region_stop: Int64s
    region_bytes: Int64s
    region_readers: Int32s
    readers: RankSets
    wanted_first: Int64s
    wanted_regions: Int64s
    slot_bytes: Int64s
    patterns: int
    bytes_needed: int
    distinct_bytes: int
    even_bytes: Int64s
    """Per source: bytes that would leave it if boxes could be cut at will, as even as the nearest holders allow."""

    def moves(self, target: int) -> Moves:
        """The plan of one destination rank."""
        regions = self._regions_of(target)
        counts = self.region_first[regions + 1] - self.region_first[regions]
        parcels = unfold(self.region_first[regions], counts)
        region = np.repeat(regions, counts)
        in_range = np.repeat(np.cumsum(self._begins_range(regions)) - 1, counts)
        tensor, piece = self.tensor[parcels], self.piece[parcels]
        at, shard = match_shards(
            self.targets, target, tensor, self.piece_start[piece], self.piece_stop[piece]
        )
        parcels, piece = parcels[at], piece[at]
        return Moves(
            self.region_source[region[at]], tensor[at], self.piece_start[piece], self.piece_stop[piece],
            self.offset[parcels], self.size[parcels], shard, in_range[at],
        )  # fmt: skip

    def ranges(self, target: int) -> Ranges:
        """The reads of one destination rank. Padding between parcels is read along."""
        regions = self._regions_of(target)
        begins = np.flatnonzero(self._begins_range(regions))
        ends = np.append(begins[1:], len(regions)) - 1
        first, last = regions[begins], regions[ends] if len(begins) else regions[:0]
        offset = self.region_offset[first]
        return Ranges(self.region_source[first], offset, self.region_stop[last] - offset)

    def staging(self, source: int) -> Staging:
        """The slot of one source rank."""
        begin, end = np.searchsorted(self.region_source, [source, source + 1])
        parcels = np.arange(self.region_first[begin], self.region_first[end])
        tensor, piece = self.tensor[parcels], self.piece[parcels]
        start, stop = self.piece_start[piece], self.piece_stop[piece]
        at, shard = match_shards(self.sources, source, tensor, start, stop)
        _, once = np.unique(at, return_index=True)
        return Staging(tensor, start, stop, self.offset[parcels], self.size[parcels], shard[once])

    def pairs(self) -> tuple[Int32s, Int32s, Int64s, Int64s]:
        """Source, destination, ranges and bytes of every pair that exchanges anything, ordered by destination. Padding is
        not counted."""
        regions = self.wanted_regions
        target = np.repeat(np.arange(self.targets.ranks, dtype=np.int32), np.diff(self.wanted_first))
        source = self.region_source[regions]
        begins_range = self._begins_range(regions)
        is_new = np.ones(len(regions), bool)
        is_new[1:] = (target[1:] != target[:-1]) | (source[1:] != source[:-1])
        begins_range |= is_new
        pairs = np.flatnonzero(is_new)
        pair_of = np.cumsum(is_new) - 1
        size = np.zeros(len(pairs), np.int64)
        np.add.at(size, pair_of, self.region_bytes[regions])
        return source[pairs], target[pairs], np.bincount(pair_of[begins_range], minlength=len(pairs)), size

    def count_moves(self) -> int:
        """Moves of all destinations together; one that fills several shards of a rank counts once."""
        parcels = np.diff(self.region_first)
        return int((parcels * self.readers.sizes()[self.region_readers]).sum())

    def _regions_of(self, target: int) -> Int64s:
        return self.wanted_regions[self.wanted_first[target] : self.wanted_first[target + 1]]

    def _begins_range(self, regions: Int64s) -> npt.NDArray[np.bool_]:
        begins = np.ones(len(regions), bool)
        begins[1:] = (regions[1:] != regions[:-1] + 1) | (
            self.region_source[regions[1:]] != self.region_source[regions[:-1]]
        )
        return begins


def match_shards(side: Side, rank: int, tensor: Int32s, start: Int64s, stop: Int64s) -> tuple[Int64s, Int64s]:
    """Which boxes lie in which shards of one rank: (box, shard) of each hit, ordered by box, then shard."""
    shards, layout = side.shards, int(side.layout[rank])
    begin, end = int(shards.first[layout]), int(shards.first[layout + 1])
    own = shards.tensor[begin:end]
    order = np.argsort(own, kind="stable")
    low, high = (np.searchsorted(own[order], tensor, side=which) for which in ("left", "right"))
    at = np.repeat(np.arange(len(tensor)), high - low)
    shard = order[unfold(low, high - low)] if len(at) else np.zeros(0, np.int64)
    inside = (shards.start[begin + shard] <= start[at]) & (stop[at] <= shards.stop[begin + shard])
    hit = inside.all(axis=1)
    return at[hit], shard[hit]
