"""A coordinator's state with ranks and members that say what real ones would say, without sockets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from weightsync.types import Box
from weightsync.wire import messages as m
from weightsync.wire.fleet import Fleet
from weightsync.wire.layout import Boxes, Catalogue, Layout, TensorSpec

EPOCH = 7
W = TensorSpec("w", "float32", (4,))
T = TypeVar("T")
Held = tuple[TensorSpec, Box]


def whole(*specs: TensorSpec) -> list[Held]:
    return [(spec, Box.whole(spec.shape)) for spec in specs]


def layout_of(held: Sequence[Held], aliases: dict[str, str] | None = None) -> Layout:
    """What a rank says that it holds, one entry a box."""
    specs = tuple(dict.fromkeys(spec for spec, _ in held))
    width = Catalogue(specs, {}).width
    return Layout(specs, aliases or {}, Boxes.of(((specs.index(spec), box) for spec, box in held), width))


def rows(start: int, stop: int, spec: TensorSpec = W) -> Held:
    """Rows `start:stop` of a tensor."""
    return spec, Box((start, *([0] * (len(spec.shape) - 1))), (stop, *spec.shape[1:]))


def hello(
    name: str,
    instance: str | None = None,
    last_epoch: int = 0,
    holds: list[int] | None = None,
    host: str = "host",
) -> m.Hello:
    return m.Hello(name, instance or name, "server", host, 1, "remap", last_epoch, holds)


class Scene:
    """A fleet, and what it has sent to whom. `now` is the clock of all that is said; `stages` the newest order to each
    rank."""

    def __init__(self, *held: Sequence[Held], slots: int = 2, relay: str = "never") -> None:
        self.fleet = Fleet(address="tcp://x", publisher="p", epoch=EPOCH)
        self.now = 0.0
        self.held, self.slots, self.relay = [list(one) for one in held], slots, relay
        self._inbox: dict[bytes, list[m.ToMember]] = defaultdict(list)
        self.stages: dict[bytes, m.Stage] = {}
        self._asked = 0

    @classmethod
    def opened(cls, *held: Sequence[Held], slots: int = 2, relay: str = "never") -> Scene:
        """All ranks are there, and their slots."""
        scene = cls(*held, slots=slots, relay=relay)
        for rank in range(len(held)):
            scene.enlist(rank)
        for rank in range(len(held)):
            scene.offer(rank)
        return scene

    def tell(self, route: bytes, message: m.FromMember) -> list[m.ToMember]:
        """Everything that a turn of the coordinator with this message sends back to the same peer."""
        self.fleet.receive(route, message, self.now)
        self.turn()
        return self._inbox[route]

    def turn(self) -> None:
        self.fleet.settle(self.now)
        for to, message in self.fleet.drain():
            self._inbox[to].append(message)
            if isinstance(message, m.Stage):
                self.stages[to] = message

    def wait(self, seconds: float) -> None:
        """Let time pass for everybody."""
        self.now += seconds
        self.fleet.tick(self.now)
        self.turn()

    def take(self, route: bytes) -> list[m.ToMember]:
        """What a peer was sent since the last time."""
        return self._inbox.pop(route, [])

    def take_one(self, route: bytes, kind: type[T]) -> T:
        """The only message of a kind among them."""
        found = [message for message in self.take(route) if isinstance(message, kind)]
        assert len(found) == 1, found
        return found[0]

    # ---- ranks

    def enlist(self, rank: int, *, route: bytes | None = None, **changes: Any) -> list[m.ToMember]:
        """A rank presents itself; gives what it is told."""
        fields: dict[str, Any] = {
            "rank": rank, "ranks": len(self.held), "instance": f"life of rank {rank}", "name": "p", "host": "trainer",
            "pid": rank, "last_epoch": 0, "version": 0, "slots": self.slots, "layout": layout_of(self.held[rank]),
            "takeover": False, "relay": self.relay,
        }  # fmt: skip
        route = route or self.route(rank)
        self.take(route)
        self.tell(route, m.Enlist(**(fields | changes)))
        return self.take(route)

    @staticmethod
    def route(rank: int) -> bytes:
        return b"rank%d" % rank

    def offer(self, rank: int) -> None:
        self.tell(self.route(rank), m.Offers(EPOCH, {"shm": {"of": str(rank)}}))

    def cells(self, rank: int) -> int:
        """How many a rank was told to stage."""
        return len(self.stages[self.route(rank)].boxes.tensor) // 4

    def begin(
        self, version: int, rank: int = 0, *, when_full: str = "wait", max_lag: int | None = None, timeout_s: float = 10.0
    ) -> m.Answer | None:  # fmt: skip
        """What a rank that wants to stage is answered; None: not yet."""
        self._asked += 1
        ask = m.Begin(EPOCH, self._asked, version, when_full, max_lag, timeout_s)
        self.tell(self.route(rank), ask)
        return self.answer(rank)

    def answer(self, rank: int = 0) -> m.Answer | None:
        """To the last question that a rank asked; it asks one at a time."""
        answers = [message for message in self.take(self.route(rank)) if isinstance(message, m.Answer)]
        return answers[-1] if answers else None

    def digests(self, rank: int, version: int) -> bytes:
        """Of all cells of a rank, each of its own number."""
        return (np.arange(self.cells(rank)) + 1000 * rank + 10**6 * version).astype("<u8").tobytes()

    def seal(self, version: int, rank: int = 0) -> None:
        self.tell(self.route(rank), m.Sealed(EPOCH, version, self.digests(rank, version)))

    def publish(self, version: int, **options: Any) -> int:
        """All ranks stage a version; gives its slot."""
        answers = [self.begin(version, rank, **options) for rank in range(len(self.held))]
        slots = {-1 if answer is None else answer.slot for answer in answers}
        assert len(slots) == 1 and slots != {-1}, answers
        for rank in range(len(self.held)):
            self.seal(version, rank)
        return slots.pop()

    # ---- members

    def join(
        self, name: str, wants: Sequence[Held] | None = None, said: m.Hello | None = None, *, pulls: bool = True
    ) -> bytes:  # fmt: skip
        """A member that wants these boxes (all of `w`), and the next version."""
        route = name.encode()
        self.tell(route, said or hello(name))
        if pulls:
            self.want(route, whole(W) if wants is None else wants)
            self.tell(route, m.Pull(EPOCH, 0))
        return route

    def want(self, route: bytes, wants: Sequence[Held]) -> None:
        assert self.fleet.books.arrangement is not None
        self.tell(route, m.Wants(EPOCH, boxes_of(self.fleet.books.arrangement.catalogue, wants)))


def boxes_of(catalogue: Catalogue, wants: Sequence[Held]) -> Boxes:
    numbers = {spec.name: number for number, spec in enumerate(catalogue.tensors)}
    return Boxes.of(((numbers[spec.name], box) for spec, box in wants), catalogue.width)
