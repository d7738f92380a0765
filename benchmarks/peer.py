"""The other process of a benchmark: a server that follows a publisher and can be asked what it holds."""

from __future__ import annotations

import multiprocessing
import zlib
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np
import torch

from benchmarks.shapes import Cut, change, make_state

DEADLINE_S = 120.0


def checksum(state: dict[str, torch.Tensor]) -> int:
    """CRC-32 over all bytes in name order; independent of the library's digests."""
    crc = 0
    for name in sorted(state):
        crc = zlib.crc32(state[name].contiguous().view(torch.uint8).numpy(), crc)
    return crc


def _serve(
    connection: Connection, address: str, shapes: dict[str, tuple[int, ...]], cut: Cut | None, options: dict[str, Any]
) -> None:  # fmt: skip
    import weightsync as ws

    state = make_state(shapes)
    source: Any = state
    if cut is not None:
        source = cut.shards(state)
        state = {shard.name: shard.view for shard in source}
    with ws.Subscriber(address, source, **options) as subscriber:
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
                connection.send(
                    (list(stats.swap_pauses_s), list(stats.read_s), stats.transport, stats.bytes_received)
                )
            else:
                connection.send("bye")
                return


def _train(
    connection: Connection, address: str, seed: int, shapes: dict[str, tuple[int, ...]], cut: Cut
) -> None:
    import weightsync as ws

    shards = cut.shards(make_state(shapes, seed=seed))
    with ws.Publisher(address, rank=cut.rank, ranks=cut.ranks, timeout_s=DEADLINE_S) as publisher:
        publisher.register(shards)
        connection.send("joined")
        while connection.recv() == "publish":
            publisher.publish()
            change({shard.name: shard.view for shard in shards})  # the next version
            connection.send("published")
        connection.send("bye")


class TrainerRank:
    """Another rank of the publisher, in a process of its own. Holds `make_state(shapes, seed=seed)` at its first version,
    and that with one more `change` at each after it."""

    def __init__(self, address: str, seed: int, shapes: dict[str, tuple[int, ...]], cut: Cut) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(target=_train, args=(child, address, seed, shapes, cut), daemon=True)
        self._process.start()
        child.close()

    def publish(self) -> None:
        self._connection.send("publish")

    def await_word(self, word: str) -> None:
        """`joined` after the start, `published` after each publish."""
        if not self._connection.poll(DEADLINE_S) or (got := self._connection.recv()) != word:
            raise AssertionError(f"a rank of the publisher did not say {word!r} but {got!r}")

    def close(self) -> None:
        self._connection.send("stop")
        self.await_word("bye")
        self._process.join(DEADLINE_S)


class Peer:
    """A server process (with `cut`: one rank of a sharded server). `follow(v)` returns once it waits for version v;
    `arrived()` once that is live."""

    def __init__(
        self, address: str, shapes: dict[str, tuple[int, ...]], cut: Cut | None = None, **options: Any
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._cut = cut
        self._connection, child = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child, address, shapes, cut, options), daemon=True
        )
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
        if self._cut is not None:
            state = {shard.name: shard.view for shard in self._cut.shards(state)}
        if wrong or found != checksum(state):
            raise AssertionError(f"the server holds wrong bytes: {wrong or 'its checksum differs'}")

    def stats(self) -> tuple[np.ndarray, np.ndarray, str]:
        """Swap pauses in seconds, read times in seconds, the transport."""
        self._connection.send(("stats", None))
        pauses, reads, transport, _ = self._receive()
        return np.array(pauses), np.array(reads), transport

    def received(self) -> int:
        """Bytes received so far, of all versions."""
        self._connection.send(("stats", None))
        return int(self._receive()[3])

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
