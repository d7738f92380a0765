"""A plan cut into ranges of a slot, each small enough for a message or a buffer, with the moves that it carries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightsync import _native
from weightsync.moves import Int64s
from weightsync.wire.plan import Plan, split_moves
from weightsync.wire.transport import ReadJob, Uint64s

_MAX_GAP = 64 << 10


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of the slot and the compiled moves out of it. `moves`: their numbers in the plan."""

    offset: int
    length: int
    program: _native.Program
    moves: Int64s
    sources: Uint64s
    targets: Uint64s

    def land(self, address: int, job: ReadJob) -> None:
        """Copy, digesting, from `address`, where the range's bytes lie, to where the job wants them."""
        digests = np.zeros(len(self.moves), np.uint64)
        self.program.run(
            self.sources + np.uint64(address), job.destinations[self.moves] + self.targets, digests
        )
        halves, parts = job.digests.view(np.uint32).reshape(-1, 2), digests.view(np.uint32).reshape(-1, 2)
        np.add.at(halves, self.moves, parts)  # a digest is two sums mod 2^32
        job.progress.value += self.length


def cut_plan(plan: Plan, max_bytes: int) -> list[Chunk]:
    """Ranges in the order of the slot, of about `max_bytes` and without wide gaps."""
    split = split_moves(plan, max_bytes)
    order = np.argsort(split.offsets, kind="stable")
    offsets, table = split.offsets[order], split.table[order]
    owners, deltas = split.owners[order], split.deltas[order].astype(np.uint64)
    ends = offsets + split.sizes[order]
    starts = _starts(offsets, ends, max_bytes)
    chunks = []
    for first, last in zip(starts, [*starts[1:], len(ends)], strict=True):
        some, offset = slice(first, last), int(offsets[first])
        sources = (offsets[some] - offset).astype(np.uint64)
        length = int(ends[some].max()) - offset
        chunks.append(
            Chunk(offset, length, _native.Program(table[some]), owners[some], sources, deltas[some])
        )
    return chunks


def _starts(offsets: Int64s, ends: Int64s, max_bytes: int) -> list[int]:
    """Where to cut moves in slot order into ranges of at most `max_bytes` (unless one is larger) without wide gaps."""
    starts: list[int] = []
    begin = end = -1
    for number, (offset, stop) in enumerate(zip(offsets.tolist(), ends.tolist(), strict=True)):
        if begin < 0 or stop - begin > max_bytes or offset - end > _MAX_GAP:
            starts.append(number)
            begin = offset
        end = stop
    return starts
