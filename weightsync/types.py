"""Values shared by both sides: boxes, shards, dtypes and reports. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType

import msgspec

if TYPE_CHECKING:
    import torch

Version = NewType("Version", int)
Epoch = NewType("Epoch", int)


@dataclass(frozen=True, slots=True)
class Box:
    """Half-open N-d interval `[start, stop)` in the global index space of one logical tensor, in elements."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a complete tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        inner = ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True))
        return f"[{inner}]"


@dataclass(frozen=True, slots=True)
class Shard:
    """A local, possibly strided, view that holds (trainer) or wants (server) a box of the logical tensor `name`.

    `shape` is the shape of the whole logical tensor; `view.shape` equals `box.shape`. Several shards may view one
    tensor (fused storage such as `qkv_proj` is three shards).
    """

    name: str
    box: Box
    view: torch.Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype by its torch name, the size of an element, and its code in the native table."""

    name: str
    itemsize: int
    raw_code: int
    float_code: int | None = None


_RAW = {1: 1, 2: 2, 4: 3, 8: 4}
_FLOATS = {"float16": 16, "bfloat16": 17, "float32": 18, "float64": 19}
_SIZES = {
    1: "bool int8 uint8 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu",
    2: "int16 uint16 float16 bfloat16",
    4: "int32 uint32 float32",
    8: "int64 uint64 float64 complex64",
}
DTYPES: dict[str, DType] = {
    name: DType(name, size, _RAW[size], _FLOATS.get(name))
    for size, names in _SIZES.items()
    for name in names.split()
}
"""Every dtype that can be moved, by its torch name without the `torch.` prefix."""


class MemberReport(msgspec.Struct):
    """What one member did with one version, in seconds; None: not yet. `ready_s` and `live_s` count from the `publish()`
    call, `read_s` and `swap_pause_s` are durations. `relayed_bytes`: how much of it came from other members."""

    transport: str = ""
    read_s: float | None = None
    ready_s: float | None = None
    live_s: float | None = None
    swap_pause_s: float | None = None
    error: str | None = None
    relayed_bytes: int = 0


@dataclass(slots=True)
class SyncReport:
    """What happened to one version. Times in seconds since the `publish()` call; None: not yet."""

    version: int
    epoch: int
    tensors: int
    size_bytes: int
    stage_s: float | None = None
    ready_s: float | None = None
    live_s: float | None = None
    members: dict[str, MemberReport] = field(default_factory=dict)


class MemberStatus(msgspec.Struct):
    """One subscriber as the coordinator sees it; `lag` is in versions behind the newest sealed one."""

    name: str
    host: str
    pid: int
    role: str
    transport: str
    swap: str
    state: str
    live_version: int | None
    lag: int | None
    last_seen_s: float
    error: str | None = None


class FleetStatus(msgspec.Struct):
    """A publisher and its members, as answered by the coordinator. `missing_ranks`: those of its `ranks` that are not there
    (or whose slots are not yet), in words."""

    address: str
    epoch: int
    publisher: str
    version: int
    slots: int
    size_bytes: int
    tensors: int
    members: list[MemberStatus]
    ranks: int = 1
    missing_ranks: list[str] = []
