"""What the processes of the tests with several publisher ranks do: every rank holds boxes, every server wants others.

Content number n of a tensor is made from its name, the place of each element and n, so that an element from another
tensor, place or version is another number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

import weightsync as ws
import weightsync.wire.link
import weightsync.wire.ranks
from tests.roles import settle
from weightsync import Box, Shard
from weightsync.errors import SyncTimeoutError, WeightSyncError
from weightsync.subscriber import session
from weightsync.wire import messages as m
from weightsync.wire.layout import Boxes, Catalogue

T = TypeVar("T")
State = SimpleNamespace
Shapes = Mapping[str, tuple[int, ...]]

MODEL: dict[str, tuple[int, ...]] = {
    "embed": (37, 10),
    "q": (16, 12),
    "k": (8, 12),
    "v": (8, 12),
    "o": (12, 16),
    "experts": (4, 6, 8),
    "norm": (12,),
    "steps": (),
}
"""Uneven in places; `q`, `k` and `v` lie in one storage on servers that fuse them."""
_DTYPES = {"experts": torch.bfloat16, "steps": torch.int64, "o": torch.float64}


def dtype_of(name: str) -> torch.dtype:
    return _DTYPES.get(name, torch.float32)


def content(name: str, shape: Sequence[int], number: int) -> torch.Tensor:
    """The whole tensor; every number is exact in bfloat16."""
    places = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    values = (places * 7 + number * 31 + zlib.crc32(name.encode())) % 251
    return torch.from_numpy(np.asarray(values)).to(dtype_of(name))


def part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]


# ---- how tensors are cut

Cut = Callable[[tuple[int, ...], int, int], list[Box]]
"""The boxes of a tensor of this shape that rank `r` of `n` holds or wants."""


def whole(shape: tuple[int, ...], rank: int, ranks: int) -> list[Box]:
    return [Box.whole(shape)]


def along(axis: int) -> Cut:
    """Even pieces, the last ones smaller or none, as torch cuts them; tensors without such an axis are replicated."""

    def cut(shape: tuple[int, ...], rank: int, ranks: int) -> list[Box]:
        return grid(shape, {axis % len(shape): (rank, ranks)}) if shape else whole(shape, rank, ranks)

    return cut


def grid(shape: tuple[int, ...], places: Mapping[int, tuple[int, int]]) -> list[Box]:
    """The box at (index, count) along some axes; nothing if it is empty."""
    start, stop = [0] * len(shape), list(shape)
    for axis, (index, count) in places.items():
        step = -(-shape[axis] // count)
        start[axis], stop[axis] = min(shape[axis], index * step), min(shape[axis], (index + 1) * step)
    box = Box(tuple(start), tuple(stop))
    return [box] if box.size else []


def two_ways(shape: tuple[int, ...], rank: int, ranks: int) -> list[Box]:
    """Rows by columns."""
    if len(shape) < 2:
        return rows(shape, rank, ranks)
    high = 2 if ranks % 2 == 0 else 1
    return grid(
        shape, {0: (rank // (ranks // high), high), len(shape) - 1: (rank % (ranks // high), ranks // high)}
    )


def hybrid(shape: tuple[int, ...], rank: int, ranks: int) -> list[Box]:
    """Rows in halves of the ranks, every half holds all of it, as HSDP does."""
    half = max(1, ranks // 2)
    return rows(shape, rank % half, half)


rows, columns = along(0), along(-1)
CUTS: dict[str, Cut] = {
    "whole": whole,
    "pipeline": whole, "rows": rows, "columns": columns, "two ways": two_ways, "hybrid": hybrid,
}  # fmt: skip


def shards_of(shapes: Shapes, cut: str, rank: int, ranks: int) -> list[Shard]:
    """Own memory for every box, filled with -7. `pipeline`: each tensor is whole, on one rank."""
    return [
        Shard(name, box, torch.full(box.shape, -7, dtype=dtype_of(name)), shape)
        for number, (name, shape) in enumerate(shapes.items())
        if cut != "pipeline" or number % ranks == rank
        for box in CUTS[cut](shape, rank, ranks)
    ]


def fused_shards(shapes: Shapes, cut: str, rank: int, ranks: int) -> list[Shard]:
    """As `shards_of`, but q, k and v are rows of one storage, and `embed` is stored transposed."""
    plain = {shard.name: shard for shard in shards_of(shapes, cut, rank, ranks)}
    names = [name for name in ("q", "k", "v") if name in plain]
    storage = torch.full((sum(len(plain[name].view) for name in names), plain["q"].view.shape[1]), -7.0)
    views = dict(zip(names, storage.split([len(plain[name].view) for name in names]), strict=True))
    if "embed" in plain:
        views["embed"] = torch.full(tuple(plain["embed"].view.shape)[::-1], -7.0).t()
    return [Shard(s.name, s.box, alone(views.get(s.name, s.view)), s.shape) for s in plain.values()]


def alone(view: torch.Tensor) -> torch.Tensor:
    """This view without the tensor that it was made from, which a server that moves memory must not leave behind."""
    empty = torch.empty(0, dtype=view.dtype)
    return empty.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


@torch.no_grad()
def fill(shards: Iterable[Shard], number: int) -> None:
    for shard in shards:
        shard.view.copy_(part(content(shard.name, shard.shape, number), shard.box))


def assert_content(shards: Iterable[Shard], number: int) -> None:
    for shard in shards:
        expected = part(content(shard.name, shard.shape, number), shard.box)
        assert torch.equal(shard.view, expected), (
            f"{shard.name}{shard.box} is not content {number}: {shard.view}"
        )


# ---- several ranks in this process


def together(*calls: Callable[[], T]) -> list[T]:
    """Run them at the same time, as ranks do; raises what the first of them raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60.0) for future in [pool.submit(call) for call in calls]]


def outcomes(*calls: Callable[[], Any]) -> list[Any]:
    """As `together`; an error takes the place of its result."""

    def run(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except WeightSyncError as error:
            return error

    return together(*(lambda call=call: run(call) for call in calls))


class Ranks(AbstractContextManager["Ranks"]):
    """All ranks of a publisher in this process, each with its shards."""

    def __init__(self, address: str, shards: Sequence[list[Shard]], **options: Any) -> None:
        self.shards = list(shards)
        self.pubs = [ws.Publisher(address, rank=0, ranks=len(shards), **options)]
        self.address = self.pubs[0].address
        for rank in range(1, len(shards)):
            self.pubs.append(ws.Publisher(self.address, rank=rank, ranks=len(shards), **options))

    def register(self, timeout_s: float = 20.0) -> Ranks:
        try:
            together(
                *(
                    lambda pub=pub, shards=shards: pub.register(shards, timeout_s=timeout_s)
                    for pub, shards in zip(self.pubs, self.shards, strict=True)
                )
            )
        except BaseException:
            self.close()
            raise
        return self

    def publish(self, number: int, **options: Any) -> list[ws.Ticket]:
        """Publish content `number` from all ranks, and scribble over it at once."""
        for shards in self.shards:
            fill(shards, number)
        tickets = together(*(lambda pub=pub: pub.publish(**options) for pub in self.pubs))
        for shards in self.shards:
            fill(shards, -3)
        return tickets

    def close(self) -> None:
        for pub in reversed(self.pubs):
            pub.close()

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- one rank in a process of its own


def open_rank(
    state: State, address: str, rank: int, ranks: int, cut: str, *, is_empty: bool = False, **options: Any
) -> str:
    """Bind or find the address; returns the real one."""
    state.pub = state.stack.enter_context(ws.Publisher(address, rank=rank, ranks=ranks, **options))
    state.shards = [] if is_empty else shards_of(MODEL, cut, rank, ranks)
    return str(state.pub.address)


def register_rank(state: State, timeout_s: float = 20.0) -> None:
    state.pub.register(state.shards, timeout_s=timeout_s)


def publish_rank(state: State, number: int, *, members: int = 0, **options: Any) -> int:
    """Publish content `number` and scribble over it at once; the version."""
    if members:
        state.pub.wait_for_members(members, 20.0)
    fill(state.shards, number)
    state.ticket = state.pub.publish(**options)
    fill(state.shards, -3)
    return int(state.ticket.version)


def await_ticket(state: State, stage: str, timeout_s: float = 20.0) -> dict[str, str | None]:
    return {name: report.error for name, report in state.ticket.wait(stage, timeout_s).members.items()}


def await_end(state: State) -> None:
    """Block until this rank can't publish any more; raises why."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        with contextlib.suppress(SyncTimeoutError):
            state.pub.wait_for_members(1000, 0.05)


def be_impatient(state: State) -> None:
    """A silent rank counts as gone after a second, instead of five."""
    weightsync.wire.link.MEMBER_TIMEOUT_S = 1.0
    weightsync.wire.ranks.MEMBER_TIMEOUT_S = 1.0


# ---- servers


def open_servers(
    state: State,
    address: str,
    cut: str,
    ranks: Iterable[int],
    of: int,
    *,
    is_fused: bool = False,
    **options: Any,
) -> list[str]:
    """Server ranks of one tensor parallel group, each a subscriber of its own; returns their transports."""
    make = fused_shards if is_fused else shards_of
    state.wants = [make(MODEL, cut, rank, of) for rank in ranks]
    state.subs = [
        state.stack.enter_context(
            ws.Subscriber(address, shards, name=f"{os.getpid()}.{n}", timeout_s=20.0, **options)
        )
        for n, shards in enumerate(state.wants)
    ]
    return [str(sub.stats.transport) for sub in state.subs]


def await_content(state: State, version: int, number: int, timeout_s: float = 20.0) -> None:
    """Every server rank reaches the version and sees exactly that content."""
    for sub, shards in zip(state.subs, state.wants, strict=True):
        sub.wait_for(version, timeout_s)
        with sub.step() as live:
            assert live == version
            assert not sub.check()
            assert_content(shards, number)


def look(state: State, number: int) -> list[int]:
    """The live versions, all with this content."""
    seen = []
    for sub, shards in zip(state.subs, state.wants, strict=True):
        with sub.step() as live:
            assert_content(shards, number)
            seen.append(int(live))
    return seen


def serve(state: State) -> None:
    """Step on a thread of its own until `stop_serving`; the content must be whole at every step."""
    state.enough, state.seen, state.trouble = threading.Event(), [], []

    def run() -> None:
        try:
            while not state.enough.wait(0.002):
                for sub, shards in zip(state.subs, state.wants, strict=True):
                    with sub.step() as live:
                        first = shards[0]
                        number = next(n for n in range(64) if _starts(first, n))
                        assert_content(shards, number)
                        if (live, number) not in state.seen:
                            state.seen.append((int(live), number))
        except BaseException as error:
            state.trouble.append(error)

    state.server = threading.Thread(target=run)
    state.server.start()
    state.stack.callback(state.enough.set)


def _starts(shard: Shard, number: int) -> bool:
    return torch.equal(shard.view, part(content(shard.name, shard.shape, number), shard.box))


def misread(state: State, how: str, name: str) -> None:
    """Join again and read wrong bytes of `name`: two pieces of one rank from each other's places (`places`), those of two
    ranks into each other's boxes (`ranks`), or one from 64 bytes further on (`shift`)."""
    use = session.Session.use

    def spoiled(self: session.Session, plan: m.Plan) -> None:
        session.Session.use = use
        columns = plan.boxes.columns(self._catalogue)
        offset, rank = np.frombuffer(plan.offsets, "<u8").copy(), np.frombuffer(plan.ranks, "<u4")
        tensor = next(n for n, spec in enumerate(self._catalogue.tensors) if spec.name == name)
        mine = np.flatnonzero(columns.tensor == tensor).tolist()
        shape = columns.stop - columns.start
        pairs = (
            [a, b]
            for a, b in itertools.combinations(mine, 2)
            if (shape[a] == shape[b]).all() and (rank[a] == rank[b]) == (how == "places")
        )
        pair = mine[:1] if how == "shift" else next(pairs)
        if how == "shift":
            offset[pair] += 64
        elif how == "places":
            offset[pair] = offset[pair[::-1]]
        else:
            columns.start[pair], columns.stop[pair] = columns.start[pair[::-1]], columns.stop[pair[::-1]]
        use(self, m.Plan(plan.epoch, Boxes.pack(columns), plan.ranks, plan.wants, offset.tobytes()))
        self.recipe = dataclasses.replace(self.recipe, message=plan)

    session.Session.use = spoiled
    (sub,) = state.subs
    sub._rejoin()
    settle(lambda: session.Session.use is use)


def refusals(state: State) -> str:
    return "; ".join(sub.stats.last_error or "" for sub in state.subs)


def await_refusal(state: State) -> str:
    """Why the first version that this server could not have was refused."""
    (sub,) = state.subs
    settle(lambda: sub.stats.last_error is not None)
    return str(sub.stats.last_error)


# ---- servers of a real trainer: slices of each parameter


def tensor_parallel(shapes: Shapes, rank: int, ranks: int, dtype: torch.dtype) -> list[Shard]:
    """Slices as an engine holds them: columns of what leads out of a block (`o_proj`, `down_proj`), rows of all other
    matrices; q, k and v in one storage; gate and up of experts cut each for itself."""
    shards: list[Shard] = []
    for name, shape in shapes.items():
        axis = len(shape) - 1 if "o_proj" in name or "down_proj" in name else len(shape) - 2
        if len(shape) < 2:
            boxes = [Box.whole(shape)]
        elif "gate_up_proj" in name:
            half = shape[1] // 2
            (inner,) = grid((shape[0], half, shape[2]), {1: (rank, ranks)})
            boxes = [
                Box((0, at + inner.start[1], 0), (shape[0], at + inner.stop[1], shape[2])) for at in (0, half)
            ]
        else:
            boxes = grid(shape, {axis: (rank, ranks)})
        shards += [Shard(name, box, torch.full(box.shape, -7, dtype=dtype), shape) for box in boxes]
    return _fuse(shards)


def _fuse(shards: list[Shard]) -> list[Shard]:
    groups: dict[str, list[Shard]] = {}
    for shard in shards:
        prefix, found, _ = shard.name.partition("self_attn.")
        is_input = found and shard.name.rpartition(".")[0][-6:] in ("q_proj", "k_proj", "v_proj")
        groups.setdefault(f"{prefix}{shard.name.rpartition('.')[2]}" if is_input else shard.name, []).append(
            shard
        )
    fused: list[Shard] = []
    for group in groups.values():
        names = {shard.name for shard in group}
        if len(names) == 1:
            fused += group
            continue
        storage = torch.cat([shard.view for shard in group])
        pieces = storage.split([len(shard.view) for shard in group])
        fused += [Shard(s.name, s.box, alone(piece), s.shape) for s, piece in zip(group, pieces, strict=True)]
    return fused


def _layout(address: str) -> Catalogue:
    """What is published there, asked every second: a question that comes before the last rank is not answered."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return ws.fetch_layout(address, timeout_s=1.0)
        except SyncTimeoutError:
            if time.monotonic() > deadline:
                raise


def serve_slices(
    state: State, address: str, rank: int, ranks: int, last: int, folder: str, **options: Any
) -> list[int]:
    """Step until version `last`; keeps the slices of every version in a file for each. Returns the versions seen."""
    layout = _layout(address)
    (dtype,) = {spec.dtype for spec in layout.tensors}
    shapes = {spec.name: tuple(spec.shape) for spec in layout.tensors}
    shards = tensor_parallel(shapes, rank, ranks, getattr(torch, dtype))
    seen: list[int] = []
    with ws.Subscriber(address, shards, name=f"tp{ranks}.{rank}", timeout_s=60.0, **options) as sub:
        while not seen or seen[-1] < last:
            sub.wait_for(seen[-1] + 1 if seen else 1, 60.0)
            with sub.step() as version:
                assert not sub.check()
                kept = [(s.name, s.box.start, s.box.stop, s.view.clone()) for s in shards]
            torch.save(kept, Path(folder) / f"tp{ranks}.{rank}.v{version}.pt")
            seen.append(int(version))
    return seen
