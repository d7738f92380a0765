"""The plan of one subscriber: which box goes from the publisher's slot to which place here.

A pure function of two layouts; computed when they meet, replayed for every version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from weightsync._native import layout as col
from weightsync.errors import LayoutError
from weightsync.moves import Int64s, MoveRows, contiguous_strides
from weightsync.types import DTYPES, Box
from weightsync.wire.layout import Layout, shard_bytes

_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Want:
    """A box that a subscriber wants, under any of its tied `names`, to be written with byte `strides`."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    box: Box
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All moves of one subscriber, ordered by their place in the slot. Arrays have one entry per move.

    `table`: rows for `_native.Program`. `offsets`: byte offset in the publisher's slot. `shards`: number of the shard
    in the publisher's layout. `wants`: number of the want. `names`: for messages.
    """

    table: Int64s
    offsets: Int64s
    shards: Int64s
    wants: Int64s
    names: tuple[str, ...]
    size_bytes: int


def plan_moves(
    layout: Layout, wants: Sequence[Want], *, allow_missing: Iterable[str] = (), ignore: Iterable[str] = ()
) -> Plan:
    """Match what is wanted with what is held, each element exactly once.

    `allow_missing` and `ignore` are shell patterns: wanted names that may be absent from the publisher, and published
    names that nobody here wants. Raises LayoutError that lists every disagreement.
    """
    held = {spec.name: number for number, spec in enumerate(layout.tensors)}
    shards_of: dict[int, list[int]] = {}
    for number, shard in enumerate(layout.shards):
        shards_of.setdefault(shard.tensor, []).append(number)
    problems: list[str] = []
    used: set[str] = set()
    pairs: list[tuple[int, int]] = []
    for number, want in enumerate(wants):
        sent = {name: layout.aliases.get(name, name) for name in want.names}
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
        spec = layout.tensors[held[owners[0]]]
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
            match = [s for s in shards_of.get(held[owners[0]], ()) if layout.shards[s].box == want.box]
            if match:
                pairs.append((number, match[0]))
            else:
                boxes = ", ".join(str(layout.shards[s].box) for s in shards_of.get(held[owners[0]], ()))
                problems.append(f"{label}: box {want.box} is wanted here, the publisher holds {boxes}")
    for spec in layout.tensors:
        if spec.name not in used and not _matches(spec.name, ignore):
            problems.append(f"{spec.name}: published, but nothing here takes it")
    if problems:
        shown = "\n  ".join(problems[:_MAX_LISTED])
        more = f"\n  and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise LayoutError(
            f"{len(problems)} tensors do not match (allow_missing= and ignore= take name patterns):\n  {shown}{more}"
        )
    pairs.sort(key=lambda pair: layout.shards[pair[1]].offset)
    return _build(layout, wants, pairs)


def _build(layout: Layout, wants: Sequence[Want], pairs: list[tuple[int, int]]) -> Plan:
    rows = MoveRows(len(pairs))
    for row, (number, shard_number) in enumerate(pairs):
        want, shard = wants[number], layout.shards[shard_number]
        spec = layout.tensors[shard.tensor]
        dtype = DTYPES[spec.dtype]
        rows.fill(
            row, dtype, dtype, spec.name, spec.shape, shard.box, shard.offset,
            src_strides=contiguous_strides(shard.box.shape, dtype.itemsize), dst_strides=want.strides,
        )  # fmt: skip
    return Plan(
        rows.table,
        np.array([layout.shards[s].offset for _, s in pairs], np.int64),
        np.array([s for _, s in pairs], np.int64),
        np.array([w for w, _ in pairs], np.int64),
        tuple(layout.tensors[layout.shards[s].tensor].name for _, s in pairs),
        sum(shard_bytes(layout, layout.shards[s]) for _, s in pairs),
    )


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
    for number, row in enumerate(plan.table):
        for part, delta in _cut(row, max_bytes):
            tables.append(part)
            owners.append(number)
            deltas.append(delta)
    table = np.stack(tables) if tables else np.zeros((0, col.COLUMNS), np.int64)
    sizes = np.array([_row_bytes(row) for row in table], np.int64)
    return SplitPlan(
        table, np.array(owners, np.int64), table[:, col.OFFSET].copy(), sizes, np.array(deltas, np.int64)
    )


_ITEMSIZE_OF_RAW = {dtype.raw_code: dtype.itemsize for dtype in DTYPES.values()}


def _row_bytes(row: Int64s) -> int:
    count = int(row[col.NDIM])
    return (
        int(np.prod(row[col.SHAPE : col.SHAPE + count], dtype=np.int64))
        * _ITEMSIZE_OF_RAW[int(row[col.SRC_TYPE])]
    )


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
