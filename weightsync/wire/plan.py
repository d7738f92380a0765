"""The plan of one subscriber: which box goes from which publisher rank's slot to which place here.

Names are matched here, when the two sides meet; which cells bring what is wanted comes from the coordinator. Both are
computed once and replayed for every version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import compress

import numpy as np
import numpy.typing as npt

from weightsync._native import layout as col
from weightsync.errors import LayoutError, ProtocolError
from weightsync.moves import Int64s, View, ViewTable, contiguous_strides
from weightsync.types import DTYPES, Box
from weightsync.wire.boxes import intersect, volumes
from weightsync.wire.layout import MAX_SLOT_BYTES, Boxes, Catalogue

_MAX_LISTED = 20
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Want:
    """A box that a subscriber wants, under any of its tied `names`, to be written with byte `strides`."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    box: Box
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Matches:
    """What is wanted of what a publisher sends. `wants`: the numbers of the wants that it sends; `tensors`: the number in
    its catalogue of each; `boxes`: the same as a message."""

    wants: Int64s
    tensors: Int64s
    boxes: Boxes


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves of one subscriber, by publisher rank, then by place in that rank's slot. Arrays have one entry per move.

    `table`: rows for `_native.Program`. `ranks`, `offsets`: whose slot, and the byte in it. `wants`: number of the want.
    `deltas`: bytes from that want's first element to the move's. `names`: for messages.
    """

    table: Int64s
    ranks: Int64s
    offsets: Int64s
    wants: Int64s
    deltas: Int64s
    names: tuple[str, ...]
    size_bytes: int

    def only(self, rows: slice | BoolArray) -> Plan:
        """Some of the moves, as a plan of their own."""
        table = self.table[rows]
        names = self.names[rows] if isinstance(rows, slice) else tuple(compress(self.names, rows.tolist()))
        return Plan(
            table, self.ranks[rows], self.offsets[rows], self.wants[rows], self.deltas[rows], names,
            int(row_bytes(table).sum()),
        )  # fmt: skip

    def parts(self) -> dict[int, tuple[slice, Plan]]:
        """For each rank that is read: its moves here, and as a plan of their own."""
        found = {}
        for rank in np.unique(self.ranks).tolist():
            begin, end = np.searchsorted(self.ranks, [rank, rank + 1]).tolist()
            found[rank] = (slice(begin, end), self.only(slice(begin, end)))
        return found

    def ends(self) -> Int64s:
        """The byte after each move in its slot."""
        return self.offsets + row_bytes(self.table)


def match_names(
    catalogue: Catalogue,
    wants: Sequence[Want],
    *,
    allow_missing: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> Matches:
    """Find what is wanted in what is sent.

    `allow_missing` and `ignore` are shell patterns: wanted names that may be absent from the publisher, and published
    names that nobody here wants. Raises LayoutError that lists every disagreement.
    """
    held = {spec.name: number for number, spec in enumerate(catalogue.tensors)}
    problems: list[str] = []
    used: set[str] = set()
    found: list[tuple[int, int]] = []
    for number, want in enumerate(wants):
        sent = {name: catalogue.aliases.get(name, name) for name in want.names}
        sent = {name: owner for name, owner in sent.items() if owner in held}
        used.update(sent.values())
        owners = sorted(set(sent.values()))
        label = " = ".join(want.names)
        if not owners:
            if not any(_matches(name, allow_missing) for name in want.names):
                problems.append(f"{label}: wanted here, but the publisher does not have it")
            continue
        if len(owners) > 1:
            problems.append(f"{label}: tied here, but the publisher sends {', '.join(owners)} separately")
            continue
        spec = catalogue.tensors[held[owners[0]]]
        if spec.dtype != want.dtype:
            problems.append(
                f"{label}: the publisher sends {spec.dtype}, here it is {want.dtype}; "
                "set wire_dtype at the publisher or convert the server's tensor"
            )
        elif spec.shape != want.shape:
            problems.append(
                f"{label}: the publisher's shape is {list(spec.shape)}, here it is {list(want.shape)}"
            )
        else:
            found.append((number, held[owners[0]]))
    for spec in catalogue.tensors:
        if spec.name not in used and not _matches(spec.name, ignore):
            problems.append(f"{spec.name}: published, but nothing here takes it")
    if problems:
        shown = "\n  ".join(problems[:_MAX_LISTED])
        more = f"\n  and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise LayoutError(
            f"{len(problems)} tensors do not match (allow_missing= and ignore= take name patterns):\n  {shown}{more}"
        )
    boxes = Boxes.of(((tensor, wants[number].box) for number, tensor in found), catalogue.width)
    pairs = np.array(found, np.int64).reshape(-1, 2)
    return Matches(pairs[:, 0], pairs[:, 1], boxes)


def make_plan(
    catalogue: Catalogue,
    wants: Sequence[Want],
    matches: Matches,
    reads: Boxes,
    ranks: bytes,
    want: bytes,
    offsets: bytes,
) -> Plan:
    """The plan from what a coordinator says: `reads` are the boxes of the moves, with the columns `ranks` u32, `want` u32
    (row of `matches`) and `offsets` u64. Raises ProtocolError unless they fill every wanted box exactly once."""
    columns = reads.columns(catalogue)
    count = len(columns.tensor)
    if len(ranks) != 4 * count or len(want) != 4 * count or len(offsets) != 8 * count:
        raise ProtocolError("the columns of a plan differ in length")
    of_rank, of_match = (
        np.frombuffer(ranks, "<u4").astype(np.int64),
        np.frombuffer(want, "<u4").astype(np.int64),
    )
    at = np.frombuffer(offsets, "<u8").astype(np.int64)
    if (
        (at < 0).any()
        or (at >= MAX_SLOT_BYTES).any()
        or (np.diff(of_rank) < 0).any()
        or (of_match >= len(matches.wants)).any()
    ):
        raise ProtocolError("a plan that is not in order")
    if count and (columns.tensor != matches.tensors[of_match]).any():
        raise ProtocolError("a plan moves one tensor to another")
    _require_exact(matches.boxes, catalogue, of_match, columns.start, columns.stop)
    chosen = [wants[number] for number in matches.wants.tolist()]
    names = [catalogue.tensors[tensor].name for tensor in matches.tensors.tolist()]
    views = ViewTable([View(name, w.shape, w.box, w.strides) for name, w in zip(names, chosen, strict=True)])
    table, deltas = views.out_of_slot(
        of_match, columns.start, columns.stop, at, wire=[DTYPES[w.dtype] for w in chosen]
    )
    return Plan(
        table, of_rank, at, matches.wants[of_match], deltas, tuple(names[row] for row in of_match.tolist()),
        int(row_bytes(table).sum()),
    )  # fmt: skip


def _require_exact(
    wanted: Boxes, catalogue: Catalogue, of_match: Int64s, start: Int64s, stop: Int64s
) -> None:
    whole = wanted.columns(catalogue)
    sizes = volumes(start, stop)
    filled = np.zeros(len(whole.tensor), np.int64)
    np.add.at(filled, of_match, sizes)
    inside = (start >= whole.start[of_match]).all() and (stop <= whole.stop[of_match]).all()
    if not inside or (filled != volumes(whole.start, whole.stop)).any():
        raise ProtocolError("a plan that does not fill what is wanted")
    order = np.argsort(of_match, kind="stable")
    order = order[sizes[order] > 0]
    borders = np.searchsorted(of_match[order], np.arange(len(whole.tensor) + 1))
    for match in np.flatnonzero(np.diff(borders) > 1).tolist():
        rows = order[borders[match] : borders[match + 1]]
        if len(intersect(start[rows], stop[rows], start[rows], stop[rows]).left) != len(rows):
            raise ProtocolError("a plan that fills a box twice")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A plan cut into moves of bounded size. `owners`: the move of the plan that each part belongs to; `offsets`,
    `sizes`: its bytes in the slot; `deltas`: bytes to add to its owner's destination."""

    table: Int64s
    owners: Int64s
    offsets: Int64s
    sizes: Int64s
    deltas: Int64s


def split_moves(plan: Plan, max_bytes: int) -> SplitPlan:
    """Cut every move larger than `max_bytes` along its outermost dimensions; all sources are contiguous."""
    tables: list[Int64s] = []
    owners: list[int] = []
    deltas: list[int] = []
    for number, size in enumerate(row_bytes(plan.table).tolist()):
        row = plan.table[number]
        for part, delta in _cut(row, max_bytes) if size > max_bytes else [(row, 0)]:
            tables.append(part)
            owners.append(number)
            deltas.append(delta)
    table = np.stack(tables) if tables else np.zeros((0, col.COLUMNS), np.int64)
    return SplitPlan(
        table,
        np.array(owners, np.int64),
        table[:, col.OFFSET].copy(),
        row_bytes(table),
        np.array(deltas, np.int64),
    )


_ITEMSIZE_OF_RAW = {dtype.raw_code: dtype.itemsize for dtype in DTYPES.values()}


def row_bytes(table: Int64s) -> Int64s:
    """Bytes of each move of a table without casts."""
    if not len(table):
        return np.zeros(0, np.int64)
    shape = table[:, col.SHAPE : col.SHAPE + col.MAX_NDIM]
    is_real = np.arange(col.MAX_NDIM)[None, :] < table[:, col.NDIM][:, None]
    itemsize = np.array([_ITEMSIZE_OF_RAW.get(code, 0) for code in range(5)], np.int64)
    found: Int64s = (
        np.prod(np.where(is_real, shape, 1), axis=1, dtype=np.int64) * itemsize[table[:, col.SRC_TYPE]]
    )
    return found


def _row_bytes(row: Int64s) -> int:
    return int(row_bytes(row[None, :])[0])


def _cut(row: Int64s, max_bytes: int) -> list[tuple[Int64s, int]]:
    """Parts of one row and their destination deltas. Flattened first where the destination is contiguous too."""
    if _row_bytes(row) <= max_bytes:
        return [(row, 0)]
    row = _flatten(row)
    count = int(row[col.NDIM])
    shape = row[col.SHAPE : col.SHAPE + count]
    axis = next(d for d in range(count) if shape[d] > 1)
    step_bytes = _row_bytes(row) // int(shape[axis])
    step = max(1, max_bytes // step_bytes)
    parts: list[tuple[Int64s, int]] = []
    for begin in range(0, int(shape[axis]), step):
        part = row.copy()
        part[col.SHAPE + axis] = min(step, int(shape[axis]) - begin)
        part[col.INDEX] += begin * row[col.INDEX_STRIDE + axis]
        part[col.OFFSET] += begin * row[col.SRC_STRIDE + axis]
        shift = begin * int(row[col.DST_STRIDE + axis])
        parts += (
            [(inner, shift + delta) for inner, delta in _cut(part, max_bytes)]
            if step == 1
            else [(part, shift)]
        )
    return parts


def _flatten(row: Int64s) -> Int64s:
    count = int(row[col.NDIM])
    shape = row[col.SHAPE : col.SHAPE + count].tolist()
    item = _ITEMSIZE_OF_RAW[int(row[col.SRC_TYPE])]
    strides = [row[c : c + count].tolist() for c in (col.SRC_STRIDE, col.DST_STRIDE, col.INDEX_STRIDE)]
    whole = [list(contiguous_strides(shape, unit)) for unit in (item, item, 1)]
    if strides != whole:
        return row
    flat = row.copy()
    flat[col.NDIM] = 1
    flat[col.SHAPE : col.COLUMNS] = 0
    flat[col.SHAPE] = int(np.prod(shape, dtype=np.int64))
    flat[col.SRC_STRIDE], flat[col.DST_STRIDE], flat[col.INDEX_STRIDE] = item, item, 1
    return flat
