"""Who reads which share from whom: simulated members on equal links, with deaths, stops, lies and late joiners."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.scene import EPOCH, hello
from weightsync.errors import ConfigError
from weightsync.types import Box
from weightsync.wire import messages as m
from weightsync.wire.layout import Boxes
from weightsync.wire.members import Member
from weightsync.wire.relay import Relay, check_mode, cut_shares

WANTS = Boxes.of([(0, Box((0,), (1,)))], 1)
SIZES = np.full(64, 1 << 20)
PUBLISHER = -1


@dataclass
class Reader:
    """A member that does as it is told. `is_stopped`: it takes orders and does nothing."""

    member: Member
    held: set[tuple[int, int]] = field(default_factory=set)
    reading: dict[tuple[int, int], int] = field(default_factory=dict)
    is_stopped: bool = False
    is_wrong: bool = False


class Swarm:
    """A coordinator's relay and members whose every read takes one second for each wants-byte of its share, from a source
    that shares its second among those who read from it. Time is simulated."""

    def __init__(self, sizes: np.ndarray = SIZES) -> None:
        self.relay = Relay()
        self.relay.mode = "always"
        self.sizes = sizes
        self.readers: dict[bytes, Reader] = {}
        self.by_number: dict[int, bytes] = {}
        self.now = 0.0
        self.from_publisher: list[tuple[int, int]] = []
        self._events: list[tuple[float, int, bytes, tuple[int, int], int]] = []
        self._ticket = itertools.count()

    def join(self, name: str, *, host: str = "", serves: bool = True, enroll: bool = True) -> Reader:
        route = name.encode()
        member = Member(hello(name), name, 0.0, may_serve=True)
        member.hello.host = host or name
        if serves:
            self.relay.serve(member, m.Serve(EPOCH, {"zmq": {"port": "1"}}, bytes(8)))
            self.by_number[member.number] = route
        self.readers[route] = Reader(member)
        if enroll:
            self.enroll(name)
        return self.readers[route]

    def enroll(self, name: str) -> bool:
        company = sum(r.member.serves is not None for r in self.readers.values()) - 1
        return self.relay.enroll(
            1, WANTS, self.sizes, self.readers[name.encode()].member, name.encode(), company
        )

    def leave(self, name: str) -> None:
        del self.readers[name.encode()]
        self.relay.leave(name)

    def turn(self) -> None:
        for route, message in self.relay.decide(EPOCH, self.now):
            reader = self.readers[route]
            if isinstance(message, m.Peer):
                assert message.number in self.by_number
                continue
            share = (message.first, message.stop)
            assert share not in reader.held, "nobody is told to read what it has"
            reader.reading[share] = message.source
            if message.source == PUBLISHER:
                self.from_publisher.append(share)
            if not reader.is_stopped:
                seconds = self.sizes[message.first : message.stop].sum() / (8 << 20)
                heapq.heappush(
                    self._events, (self.now + seconds, next(self._ticket), route, share, message.source)
                )

    def run(self, until: float = 1000.0) -> None:
        """Let everybody read on until nothing is going on."""
        self.turn()
        ticks = 0
        while ticks < 40:
            if self._events and self._events[0][0] <= self.now + 0.5:
                at, _, route, share, source = heapq.heappop(self._events)
                self.now = max(self.now, at)
                self._arrive(route, share, source)
                ticks = 0
            else:
                self.now += 0.5
                ticks += not self._events
            if self.now > until:
                return
            self.turn()

    def _arrive(self, route: bytes, share: tuple[int, int], source: int) -> None:
        reader = self.readers.get(route)
        if reader is None or reader.reading.get(share) != source:
            return  # gone, or told otherwise meanwhile
        del reader.reading[share]
        giver = self.readers.get(self.by_number.get(source, b""))
        if source != PUBLISHER and (
            giver is None or giver.is_stopped or giver.is_wrong or share not in giver.held
        ):
            message = m.Unfetched(EPOCH, 1, *share, source, "it did not come")
            self.relay.unfetched(WANTS, reader.member, message)
            return
        reader.held.add(share)
        self.relay.fetched(WANTS, reader.member, m.Fetched(EPOCH, 1, *share, 0, 5), self.now)
        if sum(stop - first for first, stop in reader.held) == len(self.sizes):
            self.relay.verified(
                WANTS, self.sizes, reader.member, route, m.Verified(EPOCH, 1, 0.1, "zmq", False, 0, 5), 1
            )

    def is_whole(self, name: str) -> bool:
        covered = sorted(self.readers[name.encode()].held)
        return [n for first, stop in covered for n in range(first, stop)] == list(range(len(self.sizes)))


def swarm(count: int) -> Swarm:
    made = Swarm()
    for number in range(count):
        made.join(f"s{number}", enroll=False)
    for number in range(count):
        assert made.enroll(f"s{number}")
    return made


@pytest.mark.parametrize("count", [2, 3, 8, 24])
def test_each_share_leaves_the_publisher_once_and_reaches_everybody(count):
    made = swarm(count)
    made.run()
    assert all(made.is_whole(f"s{n}") for n in range(count))
    assert len(made.from_publisher) == len(set(made.from_publisher))


def test_nobody_relays_alone():
    made = Swarm()
    made.join("s0", enroll=False)
    assert not made.enroll("s0")


def test_members_that_can_not_serve_are_fed_by_those_that_can():
    made = swarm(3)
    made.join("silent", serves=False)
    made.run()
    assert made.is_whole("silent")
    assert len(made.from_publisher) == len(set(made.from_publisher))


def test_a_late_joiner_takes_nothing_from_the_publisher():
    made = swarm(4)
    made.run()
    before = len(made.from_publisher)
    made.join("late")
    made.run()
    assert made.is_whole("late") and len(made.from_publisher) == before


def test_the_nearest_holder_is_asked_first():
    made = Swarm()
    for name in ("far0", "far1", "near"):
        made.join(name, host="rack" if name == "near" else name, enroll=False)
    for name in ("far0", "far1", "near"):
        made.enroll(name)
    made.run()
    late = made.join("late", host="rack")
    made.turn()
    near = made.readers[b"near"].member.number
    assert set(late.reading.values()) == {near}


def test_a_holder_that_reads_the_version_alone_serves_late_joiners():
    made = Swarm()
    first = made.join("s0", enroll=False)
    verified = m.Verified(EPOCH, 1, 0.1, "zmq", False, 2, 9)
    made.relay.verified(WANTS, made.sizes, first.member, b"s0", verified, 0)
    late = made.join("late")
    asked = [message for _, message in made.relay.decide(EPOCH, 0.0) if isinstance(message, m.Fetch)]
    assert asked and {(a.source, a.slot, a.generation) for a in asked} == {(first.member.number, 2, 9)}
    assert late.member.introduced == {first.member.number}


def test_what_a_dead_member_was_fetching_is_fetched_by_another():
    made = swarm(4)
    made.turn()
    made.leave("s0")
    made.run()
    assert all(made.is_whole(f"s{n}") for n in (1, 2, 3))


def test_the_last_member_left_gets_the_rest_from_the_publisher():
    made = swarm(4)
    made.run(until=1.0)
    for number in (1, 2, 3):
        made.leave(f"s{number}")
    made.run()
    assert made.is_whole("s0")


def test_a_stopped_member_does_not_hold_up_the_others():
    made = swarm(4)
    made.readers[b"s2"].is_stopped = True
    made.run()
    assert all(made.is_whole(f"s{n}") for n in (0, 1, 3))


def test_a_member_that_gives_wrong_bytes_is_avoided():
    made = swarm(4)
    made.readers[b"s1"].is_wrong = True
    made.run()
    assert all(made.is_whole(f"s{n}") for n in range(4))


def test_a_member_that_is_refused_by_two_is_asked_by_nobody():
    made = swarm(6)
    made.run()
    made.readers[b"s0"].is_wrong = True
    bad = made.readers[b"s0"].member.number
    for name in ("late0", "late1"):
        for other in ("s1", "s2", "s3", "s4", "s5"):  # nobody else is left to ask
            if other.encode() in made.readers:
                made.leave(other)
        made.join(name)
        made.run()
        assert made.is_whole(name)
        made.relay.leave(name)  # it can't serve the next
    last = made.join("late2")
    made.turn()
    assert bad not in last.reading.values()


def test_a_member_that_starts_again_is_served_anew():
    made = swarm(3)
    made.run(until=1.0)
    made.leave("s0")
    made.join("s0")
    made.run()
    assert all(made.is_whole(f"s{n}") for n in range(3))


def test_a_version_whose_slot_is_gone_is_read_by_nobody():
    made = swarm(3)
    made.relay.keep({2})
    assert list(made.relay.decide(EPOCH, 0.0)) == []


def test_a_member_that_gave_a_version_up_is_told_nothing_more():
    made = swarm(3)
    made.turn()
    made.relay.stop(made.readers[b"s0"].member, 1)
    assert all(route != b"s0" for route, _ in made.relay.decide(EPOCH, 0.0))


@pytest.mark.parametrize("message", [
    m.Fetched(EPOCH, 1, 0, 63, 0, 5), m.Fetched(EPOCH, 1, 5, 2, 0, 5), m.Fetched(EPOCH, 9, 0, 1, 0, 5),
    m.Fetched(EPOCH, 1, -5, 1 << 60, 1 << 60, 0),
])  # fmt: skip
def test_a_share_that_does_not_exist_is_not_held(message):
    made = swarm(3)
    made.relay.fetched(WANTS, made.readers[b"s0"].member, message, 0.0)
    made.run()
    assert all(made.is_whole(f"s{n}") for n in range(3))


def test_a_complaint_about_a_stranger_changes_nothing():
    made = swarm(3)
    made.turn()
    made.relay.unfetched(WANTS, made.readers[b"s0"].member, m.Unfetched(EPOCH, 1, 0, 1, 99, "no"))
    made.relay.unfetched(None, made.readers[b"s0"].member, m.Unfetched(EPOCH, 1, 0, 1, 99, "no"))
    made.run()
    assert all(made.is_whole(f"s{n}") for n in range(3))


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_who_may_serve_depends_on_the_mode_and_the_host(mode):
    relay = Relay()
    relay.mode = check_mode(mode)
    near, far = (Member(hello(name), name, 0.0) for name in ("near", "far"))
    near.hello.host, far.hello.host = "trainer", "elsewhere"
    adopter = Member(hello("adopter", holds=[]), "adopter", 0.0)
    adopter.hello.host = "elsewhere"
    expected = {"auto": (False, True), "always": (True, True), "never": (False, False)}[mode]
    assert (relay.may_serve(near, {"trainer"}), relay.may_serve(far, {"trainer"})) == expected
    assert not relay.may_serve(adopter, {"trainer"})


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="auto, always, never"):
        check_mode("sometimes")


@given(st.lists(st.integers(0, 64 << 20), min_size=0, max_size=200), st.integers(1, 300))
def test_shares_cover_every_want_once_and_in_order(sizes, members):
    shares = cut_shares(np.array(sizes, np.int64), members)
    assert [n for first, stop in shares for n in range(first, stop)] == list(range(len(sizes)))
    assert len(shares) <= 256


def test_shares_are_about_equal():
    shares = cut_shares(np.full(1000, 1 << 20), 8)
    assert len(shares) == 32 and {stop - first for first, stop in shares} <= {31, 32}


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.data())
def test_whatever_happens_those_that_stay_get_everything(count, data):
    made = swarm(count)
    for step in range(data.draw(st.integers(0, 6))):
        made.run(until=made.now + data.draw(st.floats(0.1, 3.0)))
        alive = sorted(made.readers)
        victim = data.draw(st.sampled_from(alive)).decode()
        match data.draw(st.sampled_from(["kill", "stop", "lie", "join", "again"])):
            case "kill" if len(alive) > 1:
                made.leave(victim)
            case "stop":
                made.readers[victim.encode()].is_stopped = True
            case "lie":
                made.readers[victim.encode()].is_wrong = True
            case "join":
                made.join(f"late{step}", enroll=False)
                if not made.enroll(f"late{step}"):
                    del made.readers[f"late{step}".encode()]
            case "again" if len(alive) > 1:
                made.leave(victim)
                made.join(victim, enroll=False)
                if not made.enroll(victim):
                    del made.readers[victim.encode()]
    made.run()
    for route, reader in made.readers.items():
        assert reader.is_stopped or made.is_whole(route.decode())
