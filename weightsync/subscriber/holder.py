"""This member's own slots, served to others that want the same boxes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import zmq

from weightsync.config import HUGE_PAGE
from weightsync.segment import Segment
from weightsync.versioning.swap.mode import SwapMode, Uint64s
from weightsync.wire.plan import Matches
from weightsync.wire.registry import make_exporter
from weightsync.wire.transport import Environment, Exporter, LocalSlot, SlotHeaders


class Holder:
    """Exports the slots of `mode`, once it has some. A slot can be read from `open` until it is opened again; readers see
    by its generation that it holds something else. Raises TransportError where one of `transports` can't serve."""

    def __init__(
        self, mode: SwapMode, environment: Environment, data_host: str, transports: Iterable[str]
    ) -> None:
        self._slots = [LocalSlot(segment, mapping, mapping.size) for segment, mapping in mode.slot_memory()]
        self._bases = np.array([slot.mapping.address for slot in self._slots], np.uint64)
        segment = Segment.create("weightsync-server-headers", HUGE_PAGE)
        self._header = LocalSlot(segment, segment.map(writable=True), HUGE_PAGE)
        self._headers = SlotHeaders(self._header.mapping)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._exporters: list[Exporter] = []
        self._generation = 0
        self.offers: dict[str, dict[str, str]] = {}
        served = replace(environment, context=self._context, host=data_host)
        try:
            for name in transports:
                exporter = make_exporter(name, served)
                self._exporters.append(exporter)
                exporter.register(self._slots, self._header)
                self.offers[name] = exporter.export() | {"at": data_host}
        except BaseException:
            self.close()
            raise

    def offsets(self, mode: SwapMode, matches: Matches) -> Uint64s:
        """Where in a slot each wanted box lies."""
        found: Uint64s = mode.destinations(0)[matches.wants] - self._bases[0]
        return found

    def open(self, slot: int) -> int:
        """The slot is about to be filled; returns the generation under which its new content can be read. Who reads before
        it is verified gets what he deserves: everybody verifies for himself."""
        self._generation += 1
        self._headers.open(slot, self._generation)
        self._headers.raise_watermark(slot, self._slots[slot].segment.size)
        return self._generation

    def close(self) -> None:
        for exporter in self._exporters:
            exporter.close()
        self._context.term()
        self._header.mapping.close()
        self._header.segment.close()
