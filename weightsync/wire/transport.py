"""The one interface of all data transports.

A transport has two ends. The *exporter* lives in the publisher; the *reader* in a subscriber. Order of calls:

    publisher                                     subscriber
    1. exporter = T.exporter(context)
    2. exporter.register(slots, header)  once
    3. offer = exporter.export()      ──offer──▶  4. reader = T.reader(context); reader.connect(offer)
                                                  5. moves = reader.prepare(plan) once for each plan
                                                  6. reader.read(moves, job)      for every version
    7. exporter.close()                           8. reader.close()

`read` is one-sided: the publisher's code takes no part in it beyond serving memory. It blocks until the bytes of all
moves are in place and returns their digests; run it on a thread of your own, one at a time for each reader. `close()` is
idempotent and legal after any error; after a TransportError nothing else is.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import zmq

from weightsync import _native
from weightsync.errors import EvictedError, SyncTimeoutError, TransportError
from weightsync.segment import Mapping, Segment
from weightsync.wire.keys import Keys
from weightsync.wire.plan import Plan

Uint64s = npt.NDArray[np.uint64]

HEADER_STRIDE = 64
TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Caps:
    """What a transport can do. Planners and subscribers read this, never its name."""

    one_sided: bool
    cross_host: bool
    maps_slots: bool
    encrypted: bool = False
    device_memory: bool = False


@dataclass(slots=True)
class LocalSlot:
    """A staging slot as its owner sees it; its first `used` bytes have pages, the rest is room to grow."""

    segment: Segment
    mapping: Mapping
    used: int


@dataclass(frozen=True, slots=True)
class Environment:
    """What a transport is given by its host: keys, the control address's host, this side's instance, copy threads. The
    publisher's side also has the zmq context that checks keys, and a callback for a reader's process that ended."""

    context: zmq.Context[Any] | None
    keys: Keys | None
    host: str
    instance: str
    threads: int
    on_gone: Callable[[str], None]


@dataclass(slots=True)
class ReadJob:
    """One version to read: from which slot, to which addresses, until when.

    `destinations`: absolute address of each move. `digests`: filled, one u64 for each move. `progress` and `cancel`:
    a u64 and a u32 shared with the thread that watches: bytes done, and nonzero to stop.
    """

    slot: int
    generation: int
    destinations: Uint64s
    digests: Uint64s
    timeout_s: float
    progress: ctypes.c_uint64
    cancel: ctypes.c_uint32

    def raise_for(self, status: int, peer: str) -> None:
        """Turn a native status into the error it means."""
        if status == _native.OK:
            return
        if status == _native.EVICTED:
            raise EvictedError("the publisher reused the slot while it was being read")
        if status == _native.CANCELLED:
            raise TransportError(f"{peer}: reading was stopped")
        raise SyncTimeoutError(
            f"{peer}: staging did not advance within {self.timeout_s:g} s; is the publisher stopped?"
        )


class Exporter(ABC):
    """The publisher's end."""

    caps: ClassVar[Caps]

    @abstractmethod
    def register(self, slots: list[LocalSlot], header: LocalSlot) -> None:
        """Take note of all slots and of the header page (see `SlotHeaders`), once."""

    def grow(self) -> bool:
        """More of the slots is used by now; whether `export` says something else from here on."""
        return False

    @abstractmethod
    def export(self) -> dict[str, str]:
        """What a reader needs to connect, as text."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving."""

    def readers(self) -> list[str]:
        """Instances that may have the slots mapped, and serve from them unseen. Only with `caps.maps_slots`."""
        return []


class Reader(ABC):
    """The subscriber's end."""

    caps: ClassVar[Caps]

    def why_not(self, offer: dict[str, str]) -> str | None:
        """Why `auto` should pass this path over, although it may work; None: it is fine. Called before `connect`."""
        return None

    @abstractmethod
    def connect(self, offer: dict[str, str], timeout_s: float) -> None:
        """Reach the publisher and prove the path with a bit-exact exchange. Raises TransportError."""

    @abstractmethod
    def prepare(self, plan: Plan) -> Any:
        """Compile a plan; several may be in use at once. Raises TransportError if it leads out of the publisher's slots."""

    @abstractmethod
    def read(self, moves: Any, job: ReadJob) -> None:
        """Move all bytes of a prepared plan, of one version. Raises EvictedError, SyncTimeoutError, TransportError: as soon
        as the peer's end closes, where the transport can tell."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    def slot_segments(self, size: int) -> list[Segment]:
        """The first `size` bytes of the publisher's slots themselves, to be mapped read-only as live memory. Only with
        `caps.maps_slots`."""
        raise TransportError("this transport can't map the publisher's slots")

    def liveness_fd(self) -> int | None:
        """A descriptor that becomes readable when the peer is gone, if there is such a thing."""
        return None


class SlotHeaders:
    """The page that says how far each slot is: written by the publisher, mapped read-only by readers on its host.

    Layout: 16 bytes of token; then for each slot, every 64 bytes from 64 on, u64 generation and u64 watermark.
    """

    def __init__(self, mapping: Mapping) -> None:
        self._base = mapping.address
        self._words = mapping.array.view(np.uint64)
        self._bytes = mapping.array

    @property
    def token(self) -> bytes:
        return self._bytes[:TOKEN_BYTES].tobytes()

    @token.setter
    def token(self, value: bytes) -> None:
        self._bytes[:TOKEN_BYTES] = np.frombuffer(value, np.uint8)

    def address(self, slot: int) -> int:
        """Where the slot's {generation, watermark} lies."""
        return self._base + HEADER_STRIDE * (slot + 1)

    def generation(self, slot: int) -> int:
        return int(self._words[HEADER_STRIDE // 8 * (slot + 1)])

    def watermark(self, slot: int) -> int:
        return int(self._words[HEADER_STRIDE // 8 * (slot + 1) + 1])

    def raise_watermark(self, slot: int, watermark: int) -> None:
        """More of a sealed slot is there."""
        self._words[HEADER_STRIDE // 8 * (slot + 1) + 1] = watermark

    def open(self, slot: int, generation: int) -> None:
        """A new use of the slot begins: readers of an older one see it by the generation."""
        self._words[HEADER_STRIDE // 8 * (slot + 1) + 1] = 0
        self._words[HEADER_STRIDE // 8 * (slot + 1)] = generation
