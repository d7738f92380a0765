"""A peer that stops costs others nothing, and is served again when it goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import roles
from tests.processes import Peer, eventually
from tests.transports import each_transport, offering
from weightsync.errors import SyncTimeoutError

IMPATIENT_S = 2.0


def impatient(peer: Callable[[], Peer]) -> Peer:
    one = peer()
    one.call(roles.be_impatient, IMPATIENT_S)
    return one


@each_transport
@pytest.mark.parametrize("swap", ["remap", "copy"])
def test_a_publisher_stopped_while_staging_is_given_up_and_followed_again(
    peer: Callable[[], Peer], transport: str, swap: str
) -> None:
    publisher, server = impatient(peer), impatient(peer)
    publisher.call(roles.can_pause_staging)
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", **offering(transport))
    server.call(roles.open_subscriber, address, transport=transport, swap=swap)
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    server.call(roles.serve)
    publisher.call(roles.arm)
    publisher.tell(roles.publish, 20, wait="staged")
    publisher.await_pause()
    publisher.stop()
    server.call(roles.await_silence)
    publisher.cont()
    publisher.resume()
    publisher.reply()
    assert publisher.call(roles.publish, 30, wait="live", members=1) == 3
    seen = server.call(roles.stop_serving)
    assert seen[0] == (1, 10)
    assert seen[-1] == (3, 30)
    assert set(seen) <= {(1, 10), (2, 20), (3, 30)}


@each_transport
def test_a_stopped_server_holds_up_nobody_and_catches_up(peer: Callable[[], Peer], transport: str) -> None:
    publisher, healthy, victim = impatient(peer), impatient(peer), impatient(peer)
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", **offering(transport))
    healthy.call(roles.open_subscriber, address, transport=transport, name="healthy")
    victim.call(roles.open_subscriber, address, transport=transport, name="victim")
    for server in (healthy, victim):
        server.call(roles.serve)
    publisher.call(roles.publish, 10, members=2, wait="live")
    victim.stop()
    for content in (
        20,
        30,
        40,
        50,
    ):  # two slots, one of which the stopped server holds until it counts as gone
        publisher.call(roles.publish, content, wait="live")
    assert publisher.call(roles.members) == [("healthy", 5)]
    victim.cont()
    publisher.call(roles.publish, 60, members=2, wait="live")
    assert healthy.call(roles.stop_serving) == [(n, 10 * n) for n in range(1, 7)]
    seen = victim.call(roles.stop_serving)
    assert seen[0] == (1, 10)
    assert seen[-1] == (6, 60)
    assert seen == sorted(seen)


def test_a_stopped_server_keeps_the_slot_that_it_adopted(peer: Callable[[], Peer]) -> None:
    publisher, server = impatient(peer), impatient(peer)
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", slots=3)
    server.call(roles.open_subscriber, address, swap="adopt")
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    server.stop()
    eventually(lambda: not publisher.call(roles.members), "the stopped server counts as gone")
    for content in (20, 30, 40, 50):
        publisher.call(roles.publish, content, wait="staged")  # around the slot that serves over there
    server.cont()
    assert server.call(roles.look)[1] in (10, 40, 50)
    server.call(roles.serve)
    for content in (60, 70, 80, 90):  # every slot comes back, or these would run out of slots
        publisher.call(roles.publish, content, members=1, wait="live", timeout_s=10.0)
    assert server.call(roles.stop_serving)[-1] == (9, 90)
    assert len(publisher.call(roles.holders)) == 1, "one slot serves over there, none is held for nothing"


def test_a_server_stopped_before_the_seal_does_not_adopt_a_slot_that_was_reused(
    peer: Callable[[], Peer],
) -> None:
    publisher, server = impatient(peer), impatient(peer)
    publisher.call(roles.can_pause_staging)
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", slots=3)
    server.call(roles.open_subscriber, address, swap="adopt")
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    publisher.call(roles.arm)
    publisher.tell(roles.publish, 20, wait="staged")
    publisher.await_pause()
    eventually(lambda: server.call(roles.is_filling), "the server waits for the seal")
    server.stop()
    publisher.resume()
    publisher.reply()
    eventually(lambda: not publisher.call(roles.members), "the stopped server counts as gone")
    for content in (30, 40, 50, 60):
        try:
            publisher.call(roles.publish, content, wait="staged", timeout_s=0.5)
        except SyncTimeoutError:
            break  # refusing to overwrite what the server may adopt is just as right
    server.cont()
    server.call(roles.serve)
    publisher.call(roles.publish, 70, members=1, wait="live", timeout_s=10.0)
    assert server.call(roles.stop_serving)[-1][1] == 70
    assert len(publisher.call(roles.holders)) == 1


def test_a_slow_start_of_the_publisher_ends_in_one_quiet_session(peer: Callable[[], Peer]) -> None:
    """The server says hello many times before the publisher hears the first; one welcome must settle it."""
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    publisher.stop()
    server.tell(roles.open_subscriber, address)
    assert not server.poll(2.0)
    publisher.cont()
    assert server.reply() == "shm"
    server.call(roles.serve)
    for content in (10, 20, 30):
        publisher.call(roles.publish, content, members=1, wait="live", timeout_s=10.0)
    before = server.call(roles.sessions)
    publisher.call(roles.publish, 40, wait="live", timeout_s=10.0)
    assert server.call(roles.sessions) == before
    assert server.call(roles.stop_serving)[-1] == (4, 40)


@each_transport
def test_a_server_that_stalls_between_two_beats_is_no_longer_waited_for_but_not_forgotten(
    peer: Callable[[], Peer], transport: str
) -> None:
    publisher, server = impatient(peer), impatient(peer)
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", **offering(transport))
    server.call(roles.open_subscriber, address, transport=transport)
    server.call(roles.serve)
    publisher.call(roles.publish, 10, members=1, wait="live")
    for round_ in range(2):
        server.stop()
        eventually(lambda: not publisher.call(roles.members), "the stopped server counts as gone")
        server.cont()
        publisher.call(roles.publish, 20 + round_, members=1, wait="live", timeout_s=10.0)
    assert [content for _, content in server.call(roles.stop_serving)] == [10, 20, 21]
