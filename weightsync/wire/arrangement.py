"""What the ranks of a publisher stage, and which of it each member reads. Pure: layouts and wants in, messages out."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from weightsync.errors import LayoutError
from weightsync.moves import Int64s
from weightsync.types import DTYPES
from weightsync.wire import messages as m
from weightsync.wire.boxes import volumes
from weightsync.wire.cells import Cells, Reads, extend_cells, match_cells, plan_cells
from weightsync.wire.columns import Int32s, ShardColumns, Side
from weightsync.wire.layout import Boxes, Layout, merge_layouts

_MOST_COPIES = 3
"""How often the bytes of a rank may lie in its slot, in the orders of several fleets."""


@dataclass(slots=True, eq=False)
class _Target:
    """Members of one host that want the same. `reads` is None until it is arranged; `refusal` says why it can't be."""

    number: int
    boxes: Boxes
    wants: ShardColumns
    host: str
    reads: Reads | None = None
    refusal: str | None = None


class Arrangement:
    """Cells for everything that is held, cut by everything that is wanted. Raises LayoutError if ranks disagree."""

    def __init__(self, layouts: Sequence[Layout], hosts: Sequence[str]) -> None:
        self.layouts, self.hosts = list(layouts), list(hosts)
        self.catalogue, self._shards = merge_layouts(layouts)
        numbers = {spec.name: number for number, spec in enumerate(self.catalogue.tensors)}
        self._known = [[numbers[spec.name] for spec in layout.tensors] for layout in layouts]
        self._table = self.catalogue.table()
        self._targets: dict[tuple[Boxes, str], _Target] = {}
        self._numbers: list[_Target] = []
        self._origins: list[Int64s] = [np.zeros(0, np.int64) for _ in layouts]
        self.edition = 0
        self.cells = plan_cells(self._table, self._side(self._shards, self.hosts), self._side([], []))
        self._base = self.counts()
        self._first_bytes = self.cells.slot_bytes

    def counts(self) -> list[int]:
        """Cells of each rank."""
        return [int(n) for n in np.diff(self.cells.first)]

    def want(self, boxes: Boxes, host: str) -> int:
        """The number of a target; a new one has no reads before `arrange`. Raises ProtocolError."""
        target = self._targets.get((boxes, host))
        if target is None:
            columns = boxes.columns(self.catalogue)
            target = self._targets[boxes, host] = _Target(len(self._numbers), boxes, columns, host)
            self._numbers.append(target)
        return target.number

    def arrange(self, *, keep: bool) -> bool:
        """Make cells for all targets. `keep`: cells are in use, so new ones only come after them; else all are planned
        anew. Returns whether the cells changed."""
        fresh = [t for t in self._numbers if t.reads is None and t.refusal is None]
        if not fresh:
            return False
        before = self.cells
        try:
            self._plan(fresh, keep)
        except LayoutError:
            for target in fresh:  # one of them wants what nobody has: which?
                try:
                    self._plan([target], keep)
                except LayoutError as error:
                    target.refusal = str(error)
            self._plan([t for t in fresh if t.refusal is None], keep)
        for target in self._numbers if self.cells is not before else fresh:
            if target.refusal is None:
                near = np.array([0 if host == target.host else 1 for host in self.hosts])
                target.reads = match_cells(self._table, self.cells, target.wants, near)
                if target.reads is None:
                    target.refusal = "the planner left a gap"
        return self.cells is not before

    def clone(self) -> Arrangement:
        """Another one with the same cells and targets; what is arranged in one is not seen in the other."""
        other = copy(self)
        other._numbers = [replace(target) for target in self._numbers]
        other._targets = {(target.boxes, target.host): target for target in other._numbers}
        return other

    def take_targets(self, later: Arrangement) -> None:
        """Those that were added to the one this was cloned from, since."""
        for target in later._numbers[len(self._numbers) :]:
            self.want(target.boxes, target.host)

    @property
    def size(self) -> int:
        """Rows that planning works on, about: cells that are there, and boxes that are wanted."""
        return len(self.cells.tensor) + sum(len(target.wants.tensor) for target in self._numbers)

    def refusal(self, number: int) -> str | None:
        """Why a target can't have what it wants."""
        return self._numbers[number].refusal

    def reads(self, number: int) -> Reads | None:
        return self._numbers[number].reads

    def boxes(self, number: int) -> Boxes:
        """What a target wants."""
        return self._numbers[number].boxes

    def want_bytes(self, number: int) -> Int64s:
        """The size of each box that a target wants."""
        wants = self._numbers[number].wants
        itemsize = np.array([DTYPES[spec.dtype].itemsize for spec in self.catalogue.tensors], np.int64)
        return volumes(wants.start, wants.stop) * itemsize[wants.tensor]

    def needs(self, number: int) -> list[int]:
        """How many cells of each rank's slot must be there before the target can be served from it."""
        reads = self._require(number)
        needs = np.zeros(len(self.hosts), np.int64)
        np.maximum.at(needs, reads.rank, reads.cell + 1)
        return [int(n) for n in needs]

    def plan(self, epoch: int, number: int) -> m.Plan:
        """What a target reads, as a message."""
        reads = self._require(number)
        row = self.cells.first[reads.rank] + reads.cell
        return m.Plan(
            epoch,
            self._boxes(row),
            reads.rank.astype("<u4").tobytes(),
            reads.want.astype("<u4").tobytes(),
            self.cells.offset[row].astype("<u8").tobytes(),
        )

    def digests(self, number: int, of_ranks: Sequence[Int64s]) -> bytes:
        """From the digests of all cells of each rank those of a target's moves, in its order."""
        reads = self._require(number)
        first = np.cumsum([0, *map(len, of_ranks)])
        found = np.concatenate(of_ranks)[first[reads.rank] + reads.cell]
        return found.astype("<u8").tobytes()

    def stage(self, epoch: int, rank: int) -> m.Stage:
        """What a rank stages, as a message; the boxes are of the rank's own tensors, in its own numbers."""
        row = np.arange(self.cells.first[rank], self.cells.first[rank + 1])
        own = np.full(len(self.catalogue.tensors), -1, np.int32)
        own[self._known[rank]] = np.arange(len(self._known[rank]))
        return m.Stage(
            epoch,
            self._boxes(row, own, self.layouts[rank].catalogue.width),
            self.cells.offset[row].astype("<u8").tobytes(),
            self.cells.parent[row].astype("<u4").tobytes(),
        )

    def extend(
        self, epoch: int, rank: int, *, version: int, slot: int, generation: int, first: int
    ) -> m.Extend:
        """How a sealed slot that holds `first` cells of a rank gets the others, out of those."""
        base = self._base[rank]
        origins = self._origins[rank]
        found = origins[first - base :].copy()
        while (found >= first).any():  # cut out of a cell that is not there yet either
            late = found >= first
            found[late] = origins[found[late] - base]
        return m.Extend(epoch, version, slot, generation, first, found.astype("<u4").tobytes())

    def _require(self, number: int) -> Reads:
        reads = self._numbers[number].reads
        if reads is None:
            raise LayoutError("not arranged yet")
        return reads

    def _boxes(self, row: Int64s, numbers: Int32s | None = None, width: int | None = None) -> Boxes:
        cells = self.cells
        whole = np.array([0, len(row)], np.int64)
        tensor = cells.tensor[row] if numbers is None else numbers[cells.tensor[row]]
        return Boxes.pack(ShardColumns(whole, tensor, cells.start[row, :width], cells.stop[row, :width]))

    def _plan(self, fresh: list[_Target], keep: bool) -> None:
        sources = self._side(self._shards, self.hosts)
        if not keep:
            known = [t for t in self._numbers if t.reads is not None] + fresh
            targets = self._side([t.wants for t in known], [t.host for t in known])
            planned = plan_cells(self._table, sources, targets)
            if not _equal(planned, self.cells):
                self.cells, self._base = planned, np.diff(planned.first).tolist()
                self._origins = [np.zeros(0, np.int64) for _ in self.hosts]
                self.edition += 1
            return
        targets = self._side([t.wants for t in fresh], [t.host for t in fresh])
        grown, origin = extend_cells(self._table, sources, self.cells, targets)
        if (grown.slot_bytes > _MOST_COPIES * self._first_bytes + (32 << 20)).any():
            raise LayoutError(
                f"the publisher's slots hold the orders of {_MOST_COPIES} layouts already; a new publisher has room again"
            )
        added = np.diff(grown.first) - np.diff(self.cells.first)
        if not added.any():
            return
        borders = np.concatenate([[0], np.cumsum(added)])
        self._origins = [
            np.concatenate([old, origin[a:b]])
            for old, a, b in zip(self._origins, borders[:-1], borders[1:], strict=True)
        ]
        self.cells = grown

    def _side(self, layouts: Sequence[ShardColumns], hosts: Sequence[str]) -> Side:
        names = {name: number for number, name in enumerate(dict.fromkeys([*self.hosts, *hosts]))}
        host: Int32s = np.array([names[name] for name in hosts], np.int32)
        alone = np.arange(len(hosts), dtype=np.int32)
        width = self.catalogue.width
        empty = ShardColumns.of([], width)
        parts = [empty, *layouts]
        counts = [len(part.tensor) for part in layouts]
        shards = ShardColumns(
            np.cumsum([0, *counts]).astype(np.int64),
            np.concatenate([part.tensor for part in parts]),
            np.concatenate([part.start for part in parts]),
            np.concatenate([part.stop for part in parts]),
        )
        # every rank is a process of its own, and of racks nothing is known
        process = alone + np.int32(1 << 20 if layouts is not self._shards else 0)
        return Side(shards, alone, process, host, host, np.zeros(len(hosts), np.int32))


def _equal(one: Cells, other: Cells) -> bool:
    return all(
        np.array_equal(getattr(one, column), getattr(other, column))
        for column in ("first", "tensor", "start", "stop", "offset", "parent")
    )
