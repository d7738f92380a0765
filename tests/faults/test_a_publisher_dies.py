"""A publisher killed at any moment: the servers go on with what they have, and follow the next one by themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import roles
from tests.processes import Peer
from tests.transports import each_transport, offering


def a_pair(peer: Callable[[], Peer], transport: str, swap: str = "remap") -> tuple[Peer, Peer, str]:
    """A publisher, and a server that has its first version."""
    publisher, server = peer(), peer()
    publisher.call(roles.can_pause_staging)
    if swap != "adopt":
        server.call(roles.can_pause_reading, transport)
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", **offering(transport))
    server.call(roles.open_subscriber, address, transport=transport, swap=swap)
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    return publisher, server, address


def the_next_publisher_is_followed(
    peer: Callable[[], Peer], server: Peer, address: str, transport: str
) -> None:
    """It takes the same address at once, and its versions count from 1 again."""
    server.call(roles.serve)
    successor = peer()
    assert successor.call(roles.open_publisher, address, **offering(transport)) == address
    for number, content in ((1, 30), (2, 31)):
        assert successor.call(roles.publish, content, members=1, wait="live") == number
    assert server.call(roles.stop_serving)[-2:] == [(1, 30), (2, 31)]


@pytest.mark.parametrize(
    ("swap", "transport"), [("remap", "shm"), ("remap", "zmq"), ("copy", "shm"), ("flip", "zmq")]
)
def test_a_publisher_killed_while_staging_leaves_the_old_version_live(
    peer: Callable[[], Peer], transport: str, swap: str
) -> None:
    publisher, server, address = a_pair(peer, transport, swap)
    publisher.call(roles.arm)
    publisher.tell(roles.publish, 20)
    publisher.await_pause()
    publisher.kill()
    assert server.call(roles.look) == (1, 10)
    the_next_publisher_is_followed(peer, server, address, transport)


@each_transport
def test_a_publisher_killed_while_sealed_leaves_the_old_version_live(
    peer: Callable[[], Peer], transport: str
) -> None:
    publisher, server, address = a_pair(peer, transport)
    server.stop()  # it can't read the second version before the publisher is gone
    publisher.call(roles.publish, 20, wait="staged")
    publisher.kill()
    server.cont()
    assert server.call(roles.look) in (
        (1, 10),
        (2, 20),
    )  # whole, from memory that outlives its owner, or not at all
    the_next_publisher_is_followed(peer, server, address, transport)


@each_transport
@pytest.mark.parametrize("swap", ["remap", "copy"])
def test_a_publisher_killed_while_being_read_leaves_the_old_version_live(
    peer: Callable[[], Peer], transport: str, swap: str
) -> None:
    publisher, server, address = a_pair(peer, transport, swap)
    server.call(roles.arm)
    publisher.call(roles.publish, 20, wait="staged")
    server.await_pause()
    publisher.kill()
    server.resume()
    assert server.call(roles.look) in ((1, 10), (2, 20))
    the_next_publisher_is_followed(peer, server, address, transport)


def test_a_server_that_adopted_a_slot_keeps_it_when_the_publisher_dies(peer: Callable[[], Peer]) -> None:
    publisher, server, address = a_pair(peer, "shm", "adopt")
    publisher.kill()
    assert server.call(roles.look) == (1, 10)
    the_next_publisher_is_followed(peer, server, address, "shm")


@each_transport
def test_servers_follow_through_three_crashes_in_a_row(peer: Callable[[], Peer], transport: str) -> None:
    servers = [peer(), peer()]
    publisher = peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", **offering(transport))
    for number, server in enumerate(servers):
        server.call(roles.open_subscriber, address, transport=transport, name=f"server{number}")
        server.call(roles.serve)
    epochs = []
    for life in range(3):
        epochs.append(publisher.call(roles.epoch))
        publisher.call(roles.publish, 100 + life, members=2, wait="live")
        publisher.kill()
        publisher = peer()
        publisher.call(roles.open_publisher, address, **offering(transport))
    assert epochs == sorted(set(epochs))
    publisher.call(roles.publish, 200, members=2, wait="live")
    for server in servers:
        assert server.call(roles.stop_serving) == [(1, 100), (1, 101), (1, 102), (1, 200)]


def test_a_publisher_that_closes_and_one_that_follows_lose_nobody(peer: Callable[[], Peer]) -> None:
    publisher, server, address = a_pair(peer, "shm")
    publisher.call(roles.close_publisher)
    assert server.call(roles.look) == (1, 10)
    the_next_publisher_is_followed(peer, server, address, "shm")
