"""A wrong byte between the trainer's tensors and the server's never goes live; the next version does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import roles
from tests.processes import Peer
from weightsync.errors import VersionError

WAYS = [
    ("remap", "shm", "fused"), ("remap", "zmq", "fused"), ("copy", "shm", "fused"), ("copy", "zmq", "fused"),
    ("flip", "shm", "fused"), ("flip", "zmq", "fused"), ("remap", "shm", "full"), ("adopt", "shm", "full"),
]  # fmt: skip


def a_pair(peer: Callable[[], Peer], swap: str, transport: str, verify: str) -> tuple[Peer, Peer]:
    publisher, server = peer(), peer()
    publisher.call(roles.can_flip_before_sealing)
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    server.call(roles.open_subscriber, address, transport=transport, swap=swap, verify=verify)
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    return publisher, server


@pytest.mark.parametrize(("swap", "transport", "verify"), WAYS)
def test_a_bit_flipped_in_the_publishers_slot_is_refused_by_name(
    peer: Callable[[], Peer], swap: str, transport: str, verify: str
) -> None:
    publisher, server = a_pair(peer, swap, transport, verify)
    publisher.call(roles.flip_next, "3.weight", 6)
    with pytest.raises(VersionError, match=r"1 tensors do not match their digests: 3\.weight"):
        publisher.call(roles.publish, 20)
    assert server.call(roles.look) == (1, 10)
    assert "3.weight" in server.call(roles.last_error)
    publisher.call(roles.publish, 30)
    assert server.call(roles.await_version, 3) == (3, 30)


@pytest.mark.parametrize("swap", ["remap", "copy", "flip"])
def test_a_bit_flipped_in_the_back_buffer_is_found_when_everything_is_read_again(
    peer: Callable[[], Peer], swap: str
) -> None:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    server.call(roles.flip_after_reading, at_version=2, times=2)  # both attempts
    server.call(roles.open_subscriber, address, transport="shm", swap=swap, verify="full")
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    with pytest.raises(VersionError, match="do not match"):
        publisher.call(roles.publish, 20)
    assert server.call(roles.look) == (1, 10)
    publisher.call(roles.publish, 30)
    assert server.call(roles.await_version, 3) == (3, 30)


def test_a_bit_that_flips_once_is_repaired_by_reading_again(peer: Callable[[], Peer]) -> None:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    server.call(roles.flip_after_reading, at_version=2, times=1)
    server.call(roles.open_subscriber, address, transport="shm", verify="full")
    for number, content in ((1, 10), (2, 20)):
        publisher.call(roles.publish, content, members=1)
        assert server.call(roles.await_version, number) == (number, content)


def test_a_live_weight_that_changes_under_a_pass_is_found_by_check(peer: Callable[[], Peer]) -> None:
    _, server = a_pair(peer, "remap", "shm", "fused")
    server.call(roles.touch_live, "3.weight")
    with pytest.raises(AssertionError, match=r"3\.weight"):
        server.call(roles.look)


def test_wrong_digests_are_refused_and_the_next_version_is_not(peer: Callable[[], Peer]) -> None:
    publisher, server = a_pair(peer, "remap", "shm", "fused")
    for spoil in ("short", "long", "zero"):
        publisher.call(roles.spoil_next_seal, spoil)
        with pytest.raises(VersionError):
            publisher.call(roles.publish, 20)
        assert server.call(roles.look)[1] != 20
        publisher.call(roles.publish, 30)
        assert server.call(roles.await_content, 30)[1] == 30
