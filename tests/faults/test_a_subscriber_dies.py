"""A server killed while it reads costs its own lease, and nobody else anything."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests import roles
from tests.processes import Peer, eventually
from tests.transports import each_transport, offering
from weightsync.config import MEMBER_TIMEOUT_S


def three(peer: Callable[[], Peer], transport: str, **options: object) -> tuple[Peer, Peer, Peer]:
    """A publisher, a server that serves all the time, and one that pauses half-way through its next read."""
    publisher, healthy, victim = peer(), peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", **options, **offering(transport))
    healthy.call(roles.open_subscriber, address, transport=transport, name="healthy")
    victim.call(roles.can_pause_reading, transport)
    victim.call(roles.open_subscriber, address, transport=transport, name="victim")
    healthy.call(roles.serve)
    publisher.call(roles.publish, 10, members=2)
    assert victim.call(roles.await_version, 1) == (1, 10)
    victim.call(roles.arm)
    publisher.call(roles.publish, 20, wait="staged")
    victim.await_pause()
    return publisher, healthy, victim


@each_transport
def test_a_server_killed_while_reading_frees_its_slot(peer: Callable[[], Peer], transport: str) -> None:
    publisher, healthy, victim = three(peer, transport)
    victim.kill()
    killed = time.monotonic()
    for content in (
        30,
        40,
        50,
    ):  # with two slots, the second of these needs the slot that the victim was reading
        publisher.call(roles.publish, content, wait=None, timeout_s=20.0)
    if transport == "shm":
        assert time.monotonic() - killed < MEMBER_TIMEOUT_S / 2, (
            "the end of a process on this host is seen at once"
        )
    publisher.call(roles.publish, 60, wait="live")
    assert healthy.call(roles.stop_serving)[-1] == (6, 60)
    eventually(
        lambda: publisher.call(roles.members) == [("healthy", 6)], "only the healthy server is a member"
    )


def test_a_killed_server_is_named_while_others_wait_for_nothing(peer: Callable[[], Peer]) -> None:
    publisher, healthy, victim = three(peer, "shm")
    publisher.tell(roles.await_stage, "ready")
    victim.kill()
    report = publisher.reply()
    assert report["healthy"] is None
    assert report["victim"] == "its process ended"
    healthy.call(roles.stop_serving)


def test_a_server_that_dies_with_an_adopted_slot_gives_it_back(peer: Callable[[], Peer]) -> None:
    publisher, victim = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    victim.call(roles.open_subscriber, address, swap="adopt")
    publisher.call(roles.publish, 10, members=1)
    assert victim.call(roles.await_version, 1) == (1, 10)
    publisher.call(roles.publish, 20, wait="staged")
    victim.kill()
    for content in (30, 40, 50):
        publisher.call(roles.publish, content, wait=None, timeout_s=MEMBER_TIMEOUT_S / 2)


def test_a_server_that_was_stopped_and_forgotten_gives_its_slot_back_when_it_dies(
    peer: Callable[[], Peer],
) -> None:
    publisher, victim = peer(), peer()
    publisher.call(roles.be_impatient, 1.5)
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    victim.call(roles.open_subscriber, address, swap="adopt")
    publisher.call(roles.publish, 10, members=1)
    assert victim.call(roles.await_version, 1) == (1, 10)
    victim.stop()
    eventually(lambda: not publisher.call(roles.members), "the stopped server counts as gone")
    assert publisher.call(roles.holders) == ["a silent member (pinned version 1)"]
    victim.kill()
    eventually(lambda: not publisher.call(roles.holders), "its slot is free", 5.0)


def test_one_that_comes_back_gets_the_newest_version(peer: Callable[[], Peer]) -> None:
    publisher, healthy, victim = three(peer, "shm")
    victim.kill()
    publisher.call(roles.publish, 30)
    again = peer()
    again.call(roles.open_subscriber, publisher.call(roles.address), name="again")
    assert again.call(roles.await_version, 3) == (3, 30)
    healthy.call(roles.stop_serving)
