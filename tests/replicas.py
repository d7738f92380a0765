"""What the processes of the tests with replicas do: each rank serves its rows of every tensor of `roles.model`.

All elements of a publish are one number, so ranks that serve two versions at one step show it in the weights.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import weightsync as ws
from tests import roles
from tests.processes import Peer, eventually
from weightsync import Box, Shard

State = SimpleNamespace
Seen = tuple[int, float]
"""A version and its content."""


def rows_of(rank: int, ranks: int, size: dict[str, int] | None = None) -> list[Shard]:
    """Own memory for this rank's rows, filled with -1."""
    shards = []
    for name, tensor in roles.model(**(size or {})).state_dict().items():
        shape, step = tuple(tensor.shape), -(-tensor.shape[0] // ranks)
        stop = min(shape[0], (rank + 1) * step)
        box = Box((rank * step, *([0] * (len(shape) - 1))), (stop, *shape[1:]))
        shards.append(Shard(name, box, torch.full(box.shape, -1, dtype=tensor.dtype), shape))
    return shards


def open_rank(
    state: State,
    address: str,
    rank: int,
    ranks: int = 2,
    *,
    size: dict[str, int] | None = None,
    **options: Any,
) -> None:
    """One rank of replica `tp`, driven by an engine."""
    options = {"replica": "tp", "rank": rank, "ranks": ranks, "name": f"tp.{rank}", **options}
    _open(state, address, rows_of(rank, ranks, size), **options)


def open_in_group(state: State, address: str, store: str, rank: int, ranks: int = 2, **options: Any) -> None:
    """One rank of a replica whose ranks agree over gloo."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=20)
    )
    state.stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
    _open(
        state, address, rows_of(rank, ranks), **{"group": dist.group.WORLD, "name": f"tp.{rank}", **options}
    )


def _open(state: State, address: str, shards: list[Shard], **options: Any) -> None:
    state.served = {shard.name: shard.view for shard in shards}
    sub = ws.Subscriber(address, shards, **{"timeout_s": 20.0, **options})
    state.sub = state.stack.enter_context(sub.start(20.0))


def promote(state: State, version: int | None = None) -> None:
    state.pub.promote(version)


def roll_back(state: State, version: int | None = None) -> None:
    state.pub.rollback(version)


def refusal(state: State) -> str | None:
    """Why the coordinator does not let this rank in."""
    return state.sub._link.refusal


def states(state: State) -> list[str]:
    return sorted(member.state for member in state.pub.status().members)


def proposal(state: State) -> int:
    return int(state.sub.proposal)


def turn(state: State, number: int) -> Seen | None:
    """A step boundary and a step; None: nothing serves here yet."""
    return None if state.sub.switch(number) is None else roles.look(state)


def serve_until(state: State, last: int, most_s: float = 20.0) -> list[Seen]:
    """Step until version `last`; what was seen at each step."""
    seen: list[Seen] = []
    deadline = time.monotonic() + most_s
    while not seen or seen[-1][0] < last:
        assert time.monotonic() < deadline, f"still {seen[-1:]}: {state.sub.stats}"
        seen.append(roles.look(state))
    return seen


class Engine:
    """Drives the ranks of a replica: one boundary, with the newest decision that any of them knows, then a step of all."""

    def __init__(self, *ranks: Peer) -> None:
        self.ranks = list(ranks)

    def proposals(self) -> list[int]:
        return [rank.call(proposal) for rank in self.ranks]

    def turn(self) -> Seen | None:
        """What all ranks served at this step; None if one has nothing to serve yet. Never two things."""
        number = max(self.proposals())
        for rank in self.ranks:
            rank.tell(turn, number)
        seen = [rank.reply() for rank in self.ranks]
        assert len(set(seen) - {None}) <= 1, f"the ranks served {seen} at one step"
        return seen[0] if len(set(seen)) == 1 else None

    def serve_until(self, version: int) -> list[Seen]:
        """Step until all serve this version, or a newer one; gives what was served, each once."""
        return self._serve(lambda seen: seen[0] >= version, f"the replica serves version {version}")

    def serve_content(self, content: float) -> list[Seen]:
        """Step until all serve this content; gives what was served, each once."""
        return self._serve(lambda seen: seen[1] == content, f"the replica serves {content}")

    def _serve(self, is_enough: Callable[[Seen], bool], what: str) -> list[Seen]:
        served: list[Seen] = []

        def is_there() -> bool:
            seen = self.turn()
            if seen is not None and seen not in served[-1:]:
                served.append(seen)
            return seen is not None and is_enough(seen)

        eventually(is_there, what)
        return served

    def await_decision(self, after: int) -> int:
        """Until some rank knows of a newer decision than `after`; no boundary yet."""
        return int(
            eventually(lambda: max(self.proposals()) > after and max(self.proposals()), "it is decided")
        )


def driven(peer: Callable[[], Peer], address: str, **options: Any) -> Engine:
    """Two ranks that an engine drives."""
    engine = Engine(peer(), peer())
    for number, rank in enumerate(engine.ranks):
        rank.call(open_rank, address, number, **options)
    return engine


def grouped(peer: Callable[[], Peer], address: str, store: Path, **options: Any) -> list[Peer]:
    """Two ranks that agree over gloo."""
    ranks = [peer(), peer()]
    form_group(ranks, address, store, **options)
    return ranks


def form_group(ranks: list[Peer], address: str, store: Path, **options: Any) -> None:
    for number, rank in enumerate(ranks):
        rank.tell(open_in_group, address, str(store), number, **options)
    for rank in ranks:
        rank.reply()


def leave_group(state: State) -> None:
    """End the subscriber and the process group; the weights stay."""
    state.sub.close()
    dist.destroy_process_group()


class Wire:
    """A TCP address in front of another, whose connections can be cut."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._is_cut = False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """Whatever is sent from now on is lost."""
        with self._lock:
            self._is_cut = True
            self._end_all()

    def mend(self) -> None:
        with self._lock:
            self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10.0)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_all(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._connect(self._listener.accept()[0])

    def _connect(self, near: socket.socket) -> None:
        with self._lock:
            try:
                if self._is_cut:
                    raise ConnectionError("cut")
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                return
            self._ends += [near, far]
        for source, sink in ((near, far), (far, near)):
            self._threads.append(threading.Thread(target=self._carry, args=(source, sink)))
            self._threads[-1].start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError), source:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
