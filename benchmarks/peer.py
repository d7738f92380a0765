"""The other process of a benchmark: a server that follows a publisher and can be asked what it holds."""

from __future__ import annotations

import multiprocessing
import zlib
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np
import torch

from benchmarks.shapes import make_state

DEADLINE_S = 120.0


def checksum(state: dict[str, torch.Tensor]) -> int:
    """CRC-32 over all bytes in name order; independent of the library's digests."""
    crc = 0
    for name in sorted(state):
        crc = zlib.crc32(state[name].contiguous().view(torch.uint8).numpy(), crc)
    return crc


def _serve(
    connection: Connection, address: str, shapes: dict[str, tuple[int, ...]], options: dict[str, Any]
) -> None:
    import weightsync as ws

    state = make_state(shapes)
    with ws.Subscriber(address, state, **options) as subscriber:
        connection.send("joined")
        while True:
            order, value = connection.recv()
            if order == "follow":
                connection.send("waiting")
                connection.send(subscriber.wait_for(value, DEADLINE_S))
            elif order == "checksum":
                with subscriber.step():
                    connection.send((checksum(state), subscriber.check()))
            elif order == "stats":
                stats = subscriber.stats
                connection.send((list(stats.swap_pauses_s), list(stats.read_s), stats.transport))
            else:
                connection.send("bye")
                return


class Peer:
    """A server process. `follow(v)` returns once it waits for version v; `arrived()` once that is live."""

    def __init__(self, address: str, shapes: dict[str, tuple[int, ...]], **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, address, shapes, options), daemon=True)
        self._process.start()
        child.close()
        self._expect("joined")

    def follow(self, version: int) -> None:
        self._connection.send(("follow", version))
        self._expect("waiting")

    def arrived(self) -> int:
        return int(self._receive())

    def assert_holds(self, state: dict[str, torch.Tensor]) -> None:
        """Fail the run on one wrong byte."""
        self._connection.send(("checksum", None))
        found, wrong = self._receive()
        if wrong or found != checksum(state):
            raise AssertionError(f"the server holds wrong bytes: {wrong or 'its checksum differs'}")

    def stats(self) -> tuple[np.ndarray, np.ndarray, str]:
        """Swap pauses in seconds, read times in seconds, the transport."""
        self._connection.send(("stats", None))
        pauses, reads, transport = self._receive()
        return np.array(pauses), np.array(reads), transport

    def _receive(self) -> Any:
        if not self._connection.poll(DEADLINE_S):
            raise TimeoutError("the server process does not answer")
        return self._connection.recv()

    def _expect(self, word: str) -> None:
        got = self._receive()
        if got != word:
            raise AssertionError(f"expected {word!r} of the server process, got {got!r}")

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._connection.send(("stop", None))
            self._expect("bye")
        else:
            self._process.kill()
        self._process.join(DEADLINE_S)
