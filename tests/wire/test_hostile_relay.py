"""Members and offers that make no sense: the relay goes on without them, nobody reads a wrong byte, no version fails."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

import weightsync as ws
from tests import roles
from tests.processes import eventually
from tests.wire.scene import EPOCH, Scene, hello, whole
from weightsync.errors import DigestError, SyncTimeoutError, TransportError
from weightsync.subscriber import shares
from weightsync.subscriber.shares import Place, Shares
from weightsync.wire import messages as m
from weightsync.wire.fleet import Fleet
from weightsync.wire.keys import Keys
from weightsync.wire.layout import TensorSpec
from weightsync.wire.transport import Environment
from weightsync.wire.transports.nixl import NixlReader
from weightsync.wire.transports.shm import ShmReader, host_id
from weightsync.wire.transports.zmq import ZmqReader

# ---- what the coordinator is told

BIG = [TensorSpec(name, "float32", (1 << 19,)) for name in "abcdefgh"]
OFFER = {"zmq": {"port": "1", "token": "00" * 16}}
OFFSETS = np.arange(len(BIG), dtype="<u8").tobytes()


class Company(Scene):
    """Members that want the same, all honest but `evil`."""

    def __init__(self) -> None:
        super().__init__(whole(*BIG), relay="always")
        self.enlist(0)
        self.offer(0)
        self.held: dict[bytes, set[tuple[int, int]]] = {}
        for name in (b"s0", b"s1", b"evil"):
            self.join(name.decode(), whole(*BIG), hello(name.decode()))
            self.tell(name, m.Serve(EPOCH, OFFER, OFFSETS))
            self.held[name] = set()
        self.begin(1)
        self.seal(1)

    def obey(self) -> bool:
        """The honest do what they were told; whether there was anything."""
        some = False
        for name in (b"s0", b"s1"):
            numbers = {member.label: member.number for member in self.fleet.books.members.values()}
            for message in self.take(name):
                if not isinstance(message, m.Fetch) or (message.first, message.stop) in self.held[name]:
                    continue
                some = True
                share = (message.first, message.stop)
                if message.source in (-1, numbers["s0"], numbers["s1"]):
                    self.held[name].add(share)
                    self.tell(name, m.Fetched(EPOCH, 1, *share, 0, 1))
                else:
                    self.tell(name, m.Unfetched(EPOCH, 1, *share, message.source, "nonsense"))
        return some

    def is_done(self, name: bytes) -> bool:
        return sorted(n for first, stop in self.held[name] for n in range(first, stop)) == list(
            range(len(BIG))
        )


NUMBER = st.one_of(st.integers(-2, 9), st.sampled_from([-(2**63), 2**31, 2**32, 2**63, 2**64 - 1]))
OFFERS = st.sampled_from([OFFER, {}, {"zmq": {}}, {"": {"": ""}}])
NONSENSE = st.one_of(
    st.builds(m.Fetched, st.just(EPOCH), NUMBER, NUMBER, NUMBER, NUMBER, NUMBER),
    st.builds(m.Unfetched, st.just(EPOCH), NUMBER, NUMBER, NUMBER, NUMBER, st.text()),
    st.builds(m.Serve, st.just(EPOCH), OFFERS, st.sampled_from([OFFSETS, OFFSETS[:-1], b"", OFFSETS * 2])),
    st.builds(
        m.Verified, st.just(EPOCH), NUMBER, st.floats(), st.text(), st.booleans(), NUMBER, NUMBER, NUMBER
    ),
    st.builds(m.Pull, st.just(EPOCH), NUMBER),
    st.builds(m.Release, st.just(EPOCH), NUMBER),
    st.builds(m.Failed, st.just(EPOCH), NUMBER, st.text()),
    st.just(hello("evil")),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(NONSENSE, max_size=30))
def test_whatever_one_member_says_the_others_are_told_where_to_read_everything(said: list[Any]) -> None:
    scene = Company()
    for message in said:
        scene.tell(b"evil", message)
        scene.obey()
    for _ in range(60):
        if not scene.obey():
            scene.wait(0.5)
            for name in (b"s0", b"s1"):
                scene.tell(name, m.Heartbeat(EPOCH, None, "filling", "zmq"))
        if scene.is_done(b"s0") and scene.is_done(b"s1"):
            return
    raise AssertionError(scene.held)


def test_a_member_that_offers_itself_again_and_again_does_not_lose_what_others_asked_of_it() -> None:
    scene = Company()
    number = next(one.number for one in scene.fleet.books.members.values() if one.label == "evil")
    for _ in range(3):
        scene.tell(b"evil", m.Serve(EPOCH, OFFER, OFFSETS))
    assert number == next(one.number for one in scene.fleet.books.members.values() if one.label == "evil")


def test_a_standing_that_crossed_its_announce_does_not_start_the_shares_again() -> None:
    scene = Scene(whole(*BIG), relay="always")
    scene.enlist(0, policy="together")
    scene.offer(0)
    standing = []
    for name in (b"s0", b"s1"):
        scene.join(name.decode(), whole(*BIG), hello(name.decode()))
        session = scene.take_one(name, m.Welcome).session
        scene.tell(name, m.Serve(EPOCH, OFFER, OFFSETS))
        standing.append(m.Stand(EPOCH, session, None, None, [], [], 0, None, True))
        scene.tell(name, standing[-1])
    scene.begin(1)
    for name, stand in zip((b"s0", b"s1"), standing, strict=True):
        told = scene.take(name)
        assert [message.in_shares for message in told if isinstance(message, m.Announce)] == [True]
        assert any(isinstance(message, m.Fetch) for message in told)
        again = list(scene.tell(name, stand))
        assert [message.in_shares for message in again if isinstance(message, m.Announce)] == [True]
        assert not any(isinstance(message, m.Fetch) for message in again)


def test_who_read_from_a_member_is_told_that_it_is_gone() -> None:
    scene = Company()
    number = next(one.number for one in scene.fleet.books.members.values() if one.label == "evil")
    scene.tell(b"evil", m.Verified(EPOCH, 1, 0.1, "zmq", False, 0, 1))
    scene.obey()
    scene.take(b"s0")
    scene.tell(b"evil", m.Bye(EPOCH))
    assert m.PeerGone(EPOCH, number) in scene.take(b"s0")
    scene.tell(b"s1", m.Bye(EPOCH))
    assert m.PeerGone(EPOCH, number) not in scene.take(b"s0")


# ---- what a member is told of another

PORT = {"port": "1", "token": "00" * 16, "at": "127.0.0.1"}
SECRET = Keys(*[key * 40 for key in (b"a", b"b", b"c")])


@pytest.mark.parametrize("offer", [
    {}, PORT | {"port": "seventy"}, PORT | {"port": "70000"}, PORT | {"port": "-1"}, PORT | {"token": "zz"},
    PORT | {"at": ""}, PORT | {"at": "not a host"}, PORT | {"at": "a\0b"},
])  # fmt: skip
def test_a_zmq_offer_that_makes_no_sense_is_a_transport_error(offer: dict[str, str]) -> None:
    _require_refused(ZmqReader, offer, None)


@pytest.mark.parametrize("key", ["", "short", "k" * 39, "k" * 41, "\x7f" * 40, "é" * 40, "\0" * 40])
def test_a_zmq_offer_with_a_key_that_is_none_is_a_transport_error(key: str) -> None:
    _require_refused(ZmqReader, PORT | {"key": key}, SECRET)


@pytest.mark.parametrize("offer", [{}, {"socket": "x"}, {"socket": "x" * 200, "token": "00" * 16}])
def test_a_shm_offer_that_makes_no_sense_is_a_transport_error(offer: dict[str, str]) -> None:
    _require_refused(ShmReader, offer, None)
    _require_refused(ShmReader, offer | {"host": host_id()}, None)


@pytest.mark.parametrize("offer", [
    {}, {"agent": "!", "token": "", "places": ""}, {"agent": "", "token": "00", "places": "1:1,1:1,1"},
])  # fmt: skip
def test_a_nixl_offer_that_makes_no_sense_is_a_transport_error(offer: dict[str, str]) -> None:
    _require_refused(NixlReader, offer, None)


def _require_refused(kind: type[Any], offer: dict[str, str], keys: Keys | None) -> None:
    reader = kind(Environment(None, keys, "127.0.0.1", "i" * 32, 1, lambda instance: None))
    try:
        with pytest.raises(TransportError):
            reader.connect(offer, 0.2)
    finally:
        reader.close()


# ---- a member that lies, next to one that is real

MODEL = {name: torch.arange(1 << 19, dtype=torch.float32) for name in "abcd"}


class Liar:
    """A member by its control messages alone, which claims to hold whatever it is told to fetch."""

    def __init__(
        self, context: zmq.Context[Any], address: str, boxes: Any, serve: m.Serve, slot: int, generation: int
    ) -> None:
        self._socket = roles.dealer(context, address)
        self._slot, self._generation = slot, generation
        self._say(hello("liar", host="elsewhere"))
        epoch = self._hear(m.Welcome).epoch
        self._say(m.Wants(epoch, boxes))
        self._hear(m.Plan)
        serve.epoch = epoch
        self._say(serve)
        self._say(m.Pull(epoch, 0))

    def claim(self) -> None:
        """What it is told to read it has, and so says everybody who has nothing."""
        announce = self._hear(m.Announce)
        assert announce.in_shares
        while self._socket.poll(300):
            message = m.decode_to_member(self._socket.recv_multipart())
            if isinstance(message, m.Fetch):
                share = (message.version, message.first, message.stop)
                self._say(m.Fetched(message.epoch, *share, self._slot, self._generation))

    def close(self) -> None:
        self._socket.close()

    def _say(self, message: Any) -> None:
        self._socket.send_multipart(m.encode(message))

    def _hear(self, kind: type[Any]) -> Any:
        while self._socket.poll(5000):
            message = m.decode_to_member(self._socket.recv_multipart())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__}")


def _all_serve(fleet: Fleet) -> bool:
    members = fleet.books.members.values()
    return len(members) == 2 and all(one.serves and one.newer_than is not None for one in members)


@pytest.mark.parametrize("transport", ["auto", "zmq"])
@pytest.mark.parametrize(("spoil", "slot", "generation"), [
    ({"offers": {}}, 0, 1),
    ({"offers": {"shm": {}, "zmq": {"port": "x"}, "nixl": {}, "other": {}}}, 0, 1),
    ({"offers": {"zmq": PORT | {"port": "70000"}}}, 0, 1),
    ({"offsets": np.full(4, 2**63, "<u8").tobytes()}, 0, 1),
    ({"offsets": np.full(4, 2**40, "<u8").tobytes()}, 0, 1),
    ({}, 2**32, 1), ({}, 2**63, 1), ({}, 7, 1), ({}, 0, 2**63), ({}, 0, -5), ({}, 0, 1),
])  # fmt: skip
def test_a_member_that_offers_nonsense_costs_no_version(
    monkeypatch: pytest.MonkeyPatch, spoil: Any, slot: int, generation: int, transport: str
) -> None:
    monkeypatch.setattr(shares, "_STALL_S", 0.3)  # some are silent
    served = {name: torch.zeros_like(tensor) for name, tensor in MODEL.items()}
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        publisher = stack.enter_context(
            ws.Publisher("tcp://127.0.0.1:0", relay="always", transports=("zmq",))
        )
        publisher.register(dict(MODEL))
        subscriber = stack.enter_context(
            ws.Subscriber(publisher.address, served, transport=transport, timeout_s=10)
        )
        holder, receiver = subscriber._holder, subscriber._receiver
        assert holder is not None and receiver is not None and receiver.session is not None
        real = {"offers": holder.offers, "offsets": np.arange(4, dtype="<u8").tobytes()}
        liar = Liar(
            context,
            publisher.address,
            receiver.session.matches.boxes,
            m.Serve(0, **real | spoil),
            slot,
            generation,
        )
        stack.callback(liar.close)
        coordinator = publisher._coordinator
        assert coordinator is not None
        eventually(lambda: coordinator.look(_all_serve), "both can be read from")
        publisher.publish()
        liar.claim()
        subscriber.wait_for(1, 10)
        (run,) = coordinator.look(lambda fleet: list(fleet._serving.relay._runs.values()))
        assert [row.complaints for row in run.rows if row.member.label == "liar"] == [1]
        assert all(torch.equal(served[name], tensor) for name, tensor in MODEL.items())
        assert subscriber.stats.versions_failed == 0, subscriber.stats


# ---- orders that make no sense


class Reads:
    """A version of eight wants of one byte each, which lie in `memory`; `read` decides what each read brings."""

    def __init__(self, read: Callable[[int, ctypes.c_uint32], int]) -> None:
        self.memory = np.zeros(8, np.uint8)
        self.said: list[Any] = []
        self.pool = ThreadPoolExecutor(4, "weightsync-share")
        self.matches, self.received = SimpleNamespace(wants=np.arange(8)), 0
        self._read = read
        self.changed = threading.Condition()
        place = Place(0, 1, np.arange(8, dtype=np.uint64))
        self.shares = Shares(
            self, m.Announce(EPOCH, 1, 0, 1, 0, True), place,  # type: ignore[arg-type]  # as much of a session as it needs
            timeout_s=5.0, changed=self.changed, is_over=lambda: False, send=self.said.append,
            await_seal=lambda give_up: np.full(8, 7, np.uint64),
        )  # fmt: skip

    def order(self, first: int, stop: int, source: int = 0) -> None:
        peer = None if source < 0 else m.Peer(EPOCH, source, f"peer {source}", {}, b"")
        with self.changed:
            self.shares.order(m.Fetch(EPOCH, 1, first, stop, source, 0, 1), peer)

    def await_complaint(self) -> int:
        """Whom the first is about."""
        first = eventually(lambda: self.said and self.said[0], "something is said")
        assert isinstance(first, m.Unfetched)
        return first.source

    def wait(self) -> list[int]:
        self.shares.wait()
        self.pool.shutdown()
        return self.memory.tolist()

    def share(self, peer: m.Peer | None, first: int, stop: int) -> Any:
        wants = np.arange(first, stop)
        plan = SimpleNamespace(
            wants=wants, deltas=np.zeros(len(wants), np.int64), names=[str(n) for n in wants], size_bytes=len(wants)
        )  # fmt: skip
        return SimpleNamespace(plan=plan, parts=[], source=-1 if peer is None else peer.number)

    def read(
        self,
        share: Any,
        slot: int,
        generation: int,
        targets: Any,
        digests: Any,
        timeout_s: float,
        cancel: Any,
    ) -> None:
        value = self._read(share.source, cancel)
        self.memory[share.plan.wants] = value
        digests[:] = value

    def rows(self, first: int, stop: int) -> slice:
        return slice(first, stop)

    def of_wants(self, seal: Any) -> Any:
        return seal

    def drop(self, number: int) -> None:
        self.said.append(number)


def test_orders_for_what_does_not_exist_are_ignored() -> None:
    reads = Reads(lambda source, cancel: 7)
    for first, stop in ((-1, 2), (0, 9), (5, 5), (6, 2), (2**40, 2**41), (-(2**62), 2**62)):
        reads.order(first, stop)
    reads.order(0, 8)
    assert reads.wait() == [7] * 8 and len(reads.said) == 1


def test_orders_that_overlap_and_come_twice_fill_everything() -> None:
    reads = Reads(lambda source, cancel: 7)
    for first, stop in ((0, 5), (0, 5), (3, 8), (4, 6), (0, 8)):
        reads.order(first, stop)
    assert reads.wait() == [7] * 8


def test_orders_after_the_end_are_ignored() -> None:
    reads = Reads(lambda source, cancel: 7)
    reads.order(0, 8)
    reads.wait()
    reads.order(0, 8)
    assert len(reads.said) == 1


def test_a_read_that_was_given_up_does_not_write_over_its_successor() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def read(source: int, cancel: ctypes.c_uint32) -> int:
        if source == 1:
            begun.set()
            assert go_on.wait(10)
            return 666
        return 7

    reads = Reads(lambda source, cancel: read(source, cancel) % 256)
    reads.order(0, 8, source=1)
    assert begun.wait(10)
    reads.order(0, 8, source=2)
    threading.Timer(0.2, go_on.set).start()  # time in which the second could go first
    assert reads.wait() == [7] * 8


@pytest.mark.parametrize("error", [ValueError("what?"), MemoryError(), TransportError("gone")])
def test_any_trouble_with_a_peer_is_told_and_another_read_from(error: Exception) -> None:
    def read(source: int, cancel: ctypes.c_uint32) -> int:
        if source == 1:
            raise error
        return 7

    reads = Reads(read)
    reads.order(0, 8, source=1)
    assert reads.await_complaint() == 1
    reads.order(0, 8, source=-1)
    assert reads.wait() == [7] * 8


def test_wrong_bytes_of_a_peer_are_told_and_of_the_publisher_end_the_version() -> None:
    reads = Reads(lambda source, cancel: 6)
    reads.order(0, 8, source=1)
    assert reads.await_complaint() == 1
    reads.order(0, 8, source=-1)
    with pytest.raises(DigestError, match="do not match"):
        reads.wait()
    reads.pool.shutdown()


def test_a_version_whose_bytes_flow_is_not_given_up_however_slow() -> None:
    reads = Reads(lambda source, cancel: 7)
    reads.shares._timeout_s = 0.05
    arriving = threading.Event()

    def arrive() -> None:
        while not arriving.wait(0.01):
            reads.received += 1

    thread = threading.Thread(target=arrive)
    thread.start()
    threading.Timer(0.3, lambda: reads.order(0, 8)).start()
    assert reads.wait() == [7] * 8
    arriving.set()
    thread.join()


def test_a_version_of_which_nothing_arrives_is_given_up() -> None:
    reads = Reads(lambda source, cancel: 7)
    reads.shares._timeout_s = 0.05
    with pytest.raises(SyncTimeoutError, match="nothing arrived"):
        reads.wait()
    reads.pool.shutdown()
