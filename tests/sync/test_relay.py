"""Members that read from each other: right bytes at every version, and each leaves the trainer once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync as ws
from tests import roles
from tests.processes import Peer, eventually
from tests.replicas import Engine, open_rank
from weightsync import Box, Shard
from weightsync.errors import ConfigError, TransportError
from weightsync.types import SyncReport
from weightsync.wire import keys as key_folders
from weightsync.wire.transport import Environment
from weightsync.wire.transports.zmq import ZmqReader

SHAPES = {"a": (512, 1024), "b": (300, 1000), "c": (7,), "d": (1024, 1024), "e": (256, 2048), "f": (1 << 20,)}
SIZE = sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())
RELAY: dict[str, Any] = {"relay": "always", "transports": ("zmq",)}


def content(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Fleet:
    """A publisher and servers in this process."""

    def __init__(self, stack: ExitStack, **options: Any) -> None:
        self._stack = stack
        self.trained = content(0)
        self.publisher = stack.enter_context(ws.Publisher("tcp://127.0.0.1:0", **RELAY | options))
        self.publisher.register(self.trained)
        self.servers: dict[str, tuple[ws.Subscriber, dict[str, torch.Tensor]]] = {}

    def join(self, name: str, state: dict[str, torch.Tensor] | None = None, **options: Any) -> ws.Subscriber:
        served = {key: torch.zeros(shape) for key, shape in SHAPES.items()} if state is None else state
        made = ws.Subscriber(self.publisher.address, served, name=name, timeout_s=15, **options)
        self.servers[name] = (self._stack.enter_context(made), served)
        return made

    def publish(self) -> SyncReport:
        """One more version, live and right everywhere."""
        self.publisher.wait_for_members(len(self.servers), 15)
        holders = sum(server._holder is not None for server, _ in self.servers.values())
        eventually(lambda: self._known_holders() == holders, "the coordinator knows who serves")
        for name, tensor in content(self.publisher.version + 1).items():
            self.trained[name].copy_(tensor)
        ticket = self.publisher.publish()
        ticket.wait("ready", 15)
        for name in self.servers:
            self.require(name, ticket.version)
        return ticket.wait("live", 15)

    def _known_holders(self) -> int:
        coordinator = self.publisher._coordinator
        assert coordinator is not None
        found: int = coordinator.look(
            lambda fleet: sum(member.serves is not None for member in fleet.books.members.values())
        )
        return found

    def require(self, name: str, version: int) -> None:
        subscriber, served = self.servers[name]
        subscriber.wait_for(version, 15)
        with subscriber.step() as live:
            assert live == version and not subscriber.check()
            for key, tensor in content(version).items():
                assert torch.equal(served[key], tensor), (name, key)


@pytest.fixture
def fleet() -> Iterator[Callable[..., Fleet]]:
    with ExitStack() as stack:
        yield lambda **options: Fleet(stack, **options)


def egress(report: SyncReport) -> float:
    """Copies of the model that left the trainer."""
    return sum(SIZE - member.relayed_bytes for member in report.members.values()) / SIZE


@pytest.mark.parametrize("transport", ["auto", "zmq"])
@pytest.mark.parametrize("swap", ["remap", "copy", "flip"])
def test_each_version_leaves_the_trainer_once_and_is_right_everywhere(
    fleet: Callable[..., Fleet], swap: str, transport: str
) -> None:
    made = fleet()
    for number in range(4):
        made.join(f"s{number}", swap=swap, transport=transport)
    for _ in range(5):
        assert egress(made.publish()) == 1.0


def test_a_late_joiner_reads_from_members_alone(fleet: Callable[..., Fleet]) -> None:
    made = fleet()
    made.join("s0")
    made.join("s1")
    made.publish()
    made.join("late")
    made.require("late", 1)
    report = made.publisher._line.report(1)
    assert report is not None and report.members["late"].relayed_bytes == SIZE


def test_a_member_alone_reads_from_the_publisher_and_serves_who_comes(fleet: Callable[..., Fleet]) -> None:
    made = fleet()
    made.join("first")
    assert egress(made.publish()) == 1.0
    made.join("late")
    made.require("late", 1)
    report = made.publisher._line.report(1)
    assert report is not None and report.members["late"].relayed_bytes == SIZE


def test_members_that_do_not_serve_get_everything(fleet: Callable[..., Fleet]) -> None:
    made = fleet()
    made.join("s0")
    made.join("s1")
    made.join("selfish", relay=False)
    state = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
    state["d"] = torch.empty_strided(
        (1024, 1024), (1, 1024)
    ).zero_()  # does not lie in a slot as it does on the wire
    made.join("transposed", state)
    for _ in range(3):
        assert egress(made.publish()) == 1.0


def test_members_that_map_the_publisher_s_slot_take_no_part(fleet: Callable[..., Fleet]) -> None:
    made = fleet(transports=("shm", "zmq"), slots=3)
    made.join("s0")
    made.join("s1")
    made.join("adopter", swap="adopt")
    report = made.publish()
    assert report.members["adopter"].relayed_bytes == 0 and report.members["adopter"].transport == "shm"


def test_members_that_want_other_tensors_read_only_from_their_like(fleet: Callable[..., Fleet]) -> None:
    made = fleet()
    ignored = ("e", "f")
    part = [key for key in SHAPES if key not in ignored]
    size = sum(4 * torch.Size(SHAPES[key]).numel() for key in part)
    for number in range(2):
        made.join(f"whole{number}")
    others = [{key: torch.zeros(SHAPES[key]) for key in part} for _ in range(2)]
    subscribers = [
        ws.Subscriber(made.publisher.address, state, name=f"part{n}", ignore=ignored, timeout_s=15)
        for n, state in enumerate(others)
    ]
    with subscribers[0], subscribers[1]:
        made.publisher.wait_for_members(4, 15)
        for name, tensor in content(1).items():
            made.trained[name].copy_(tensor)
        report = made.publisher.publish().wait("ready", 15)
        for subscriber, state in zip(subscribers, others, strict=True):
            assert subscriber.wait_for(1, 15) == 1
            assert all(torch.equal(state[key], content(1)[key]) for key in part)
        assert sum(report.members[f"part{n}"].relayed_bytes for n in range(2)) == size
        assert sum(report.members[f"whole{n}"].relayed_bytes for n in range(2)) == SIZE


@pytest.mark.parametrize("relay", ["never", "auto"])
def test_on_one_host_nothing_is_relayed_by_default(fleet: Callable[..., Fleet], relay: str) -> None:
    made = fleet(relay=relay)
    made.join("s0")
    made.join("s1")
    assert egress(made.publish()) == 2.0


def test_replicas_that_vote_relay_too(fleet: Callable[..., Fleet]) -> None:
    made = fleet(policy="together")
    for number in range(3):
        made.join(f"s{number}")
    for _ in range(4):
        assert egress(made.publish()) == 1.0


def test_replicas_of_two_ranks_read_each_rank_s_part_once_and_switch_together(
    peer: Callable[[], Peer],
) -> None:
    size = {"blocks": 8, "width": 512}
    publisher = peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", size=size, **RELAY)
    engines = [Engine(peer(), peer()) for _ in range(2)]
    for name, engine in zip("pq", engines, strict=True):
        for number, rank in enumerate(engine.ranks):
            rank.call(open_rank, address, number, size=size, replica=name, name=f"{name}.{number}")
    total = publisher.call(roles.size)
    for version in range(1, 6):
        publisher.call(roles.publish, 10 * version, members=4, wait="ready")
        for engine in engines:
            assert engine.serve_content(10 * version)[-1] == (version, 10 * version)
        if version > 1:
            assert sum(publisher.call(roles.relayed, version).values()) == total


def test_ranks_of_the_publisher_are_read_once_between_all_members() -> None:
    whole = content(1)["d"]
    served = [{"d": torch.zeros(1024, 1024)} for _ in range(3)]
    with ExitStack() as stack:
        first = stack.enter_context(ws.Publisher("tcp://127.0.0.1:0", rank=0, ranks=2, **RELAY))
        second = stack.enter_context(ws.Publisher(first.address, rank=1, ranks=2, **RELAY))
        halves = [
            [Shard("d", Box((512 * r, 0), (512 * (r + 1), 1024)), half, (1024, 1024))]
            for r, half in enumerate(whole.chunk(2))
        ]
        other = threading.Thread(target=second.register, args=(halves[1],))
        other.start()
        first.register(halves[0])
        other.join(15)
        servers = [stack.enter_context(ws.Subscriber(first.address, state, timeout_s=15)) for state in served]
        first.wait_for_members(3, 15)
        other = threading.Thread(target=second.publish)
        other.start()
        ticket = first.publish()
        other.join(15)
        ticket.wait("ready", 15)
        for server, state in zip(servers, served, strict=True):
            assert server.wait_for(1, 15) == 1 and torch.equal(state["d"], whole)
        assert sum(member.relayed_bytes for member in ticket.report.members.values()) == 2 * whole.nbytes


def test_with_keys_members_serve_under_their_own_and_strangers_get_nothing(
    fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    key_folders.new_keys(tmp_path)
    made = fleet(keys=tmp_path)
    for number in range(3):
        made.join(f"s{number}", keys=tmp_path)
    assert egress(made.publish()) == 1.0
    holder = made.servers["s0"][0]._holder
    assert holder is not None
    offer = dict(holder.offers["zmq"])
    known = key_folders.load_subscriber_keys(tmp_path)
    reader = ZmqReader(Environment(None, known, "127.0.0.1", "friend", 1, lambda name: None))
    reader.connect(offer, 5.0)
    reader.close()
    for stolen in (
        offer | {"token": "00" * 16},
        offer | {"key": known.publisher.decode()},
        offer | {"key": "short"},
    ):
        reader = ZmqReader(Environment(None, known, "127.0.0.1", "stranger", 1, lambda name: None))
        with pytest.raises(TransportError):
            reader.connect(stolen, 0.5)
        reader.close()


def test_an_unknown_relay_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="auto, always, never"):
        ws.Publisher("tcp://127.0.0.1:0", relay="sometimes")  # type: ignore[arg-type]  # that is the point


def test_versions_published_as_fast_as_can_be_are_never_mixed_up(peer: Callable[[], Peer]) -> None:
    publisher, servers = peer(), [peer() for _ in range(3)]
    size = {"blocks": 8, "width": 512}
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", size=size, **RELAY)
    for number, server in enumerate(servers):
        server.call(roles.open_subscriber, address, size=size, name=f"s{number}")
        server.call(roles.serve)
    publisher.call(roles.publish_many, range(10, 40), wait="staged")
    for server in servers:
        server.call(roles.await_content, 39)
        seen = server.call(roles.stop_serving)
        assert seen == sorted(seen) and all(content == version + 9 for version, content in seen)
