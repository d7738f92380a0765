"""An epoch is one life of the publisher: whoever followed a newer one never goes back to an older."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import roles
from tests.processes import Peer
from weightsync.errors import AddressInUseError, FencedError, UsageError


def followed(
    peer: Callable[[], Peer], epoch: int, address: str = "tcp://127.0.0.1:0"
) -> tuple[Peer, Peer, str]:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, address, epoch=epoch)
    server.call(roles.open_subscriber, address)
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    return publisher, server, address


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_zombie_of_an_older_epoch_is_refused_and_fences_itself(
    peer: Callable[[], Peer], transport: str
) -> None:
    publisher, server, address = followed(peer, epoch=200)
    publisher.kill()
    zombie = peer()
    zombie.call(roles.bind_publisher, address, epoch=100)
    with pytest.raises(FencedError, match="epoch 200, newer than 100"):
        zombie.call(roles.register)  # or as soon as it has, or when it waits for members
        zombie.call(roles.publish, 66, members=1)
    with pytest.raises((FencedError, UsageError)):
        zombie.call(roles.publish_as_is)
    assert server.call(roles.look) == (1, 10)
    successor = peer()  # a fenced publisher has freed the address
    successor.call(roles.open_publisher, address, epoch=300)
    successor.call(roles.publish, 30, members=1)
    assert server.call(roles.await_content, 30) == (1, 30)
    assert server.call(roles.live_epoch) == 300


def test_a_zombie_that_already_has_members_is_fenced_by_one_that_knows_better(
    peer: Callable[[], Peer],
) -> None:
    publisher, server, address = followed(peer, epoch=200)
    publisher.kill()
    server.stop()
    zombie, newcomer = peer(), peer()
    zombie.call(roles.open_publisher, address, epoch=100)
    newcomer.call(roles.open_subscriber, address)
    zombie.call(roles.publish, 66, members=1)
    assert newcomer.call(roles.await_version, 1) == (1, 66)  # it can't know
    server.cont()
    zombie.call(roles.await_fence)
    assert server.call(roles.look) == (1, 10)
    assert newcomer.call(roles.look) == (1, 66)
    successor = peer()
    successor.call(roles.open_publisher, address, epoch=300)
    successor.call(roles.publish, 30, members=2)
    for one in (server, newcomer):
        assert one.call(roles.await_content, 30) == (1, 30)


def test_versions_that_start_again_are_newer_than_any_of_the_life_before(peer: Callable[[], Peer]) -> None:
    publisher, server, address = followed(peer, epoch=200)
    publisher.call(roles.publish, 11, version=1000)
    assert server.call(roles.await_version, 1000) == (1000, 11)
    publisher.kill()
    successor = peer()
    successor.call(roles.open_publisher, address, epoch=201)
    successor.call(roles.publish, 30, members=1)
    assert server.call(roles.await_version, 1) == (1, 30)


def test_a_pending_version_of_a_dead_epoch_does_not_come_after_the_new_one(peer: Callable[[], Peer]) -> None:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    server.call(roles.open_subscriber, address, slots=3)
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    publisher.call(roles.publish, 20, version=50)  # verified, pending, and the publisher dies
    publisher.kill()
    successor = peer()
    successor.call(roles.open_publisher, address)
    successor.call(roles.publish, 30, wait="staged", members=1)
    assert server.call(roles.await_content, 30) == (1, 30)
    assert server.call(roles.look) == (1, 30)


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "abstract"])
def test_a_second_publisher_is_told_who_is_there_and_may_take_over(
    peer: Callable[[], Peer], scheme: str, tmp_path: object
) -> None:
    wanted = {"tcp": "tcp://127.0.0.1:0", "ipc": f"ipc://{tmp_path}/s", "abstract": f"ipc://@ws-{tmp_path}"}[
        scheme
    ]
    first, server, second = peer(), peer(), peer()
    address = first.call(roles.open_publisher, wanted, name="the-first")
    server.call(roles.open_subscriber, address)
    first.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    with pytest.raises(AddressInUseError, match=r"the-first.*takeover=True"):
        second.call(roles.open_publisher, address)
    first.call(roles.publish, 11)  # the attempt cost the first one nothing
    assert server.call(roles.await_version, 2) == (2, 11)
    second.call(roles.open_publisher, address, takeover=True, name="the-second")
    with pytest.raises(FencedError, match="the-second"):
        first.call(roles.publish, 66)
    assert server.call(roles.look) == (2, 11)
    for number, content in ((1, 30), (2, 31)):
        second.call(roles.publish, content, members=1)
        assert server.call(roles.await_content, content) == (number, content)
    assert second.call(roles.epoch) > first.call(roles.epoch)


def test_take_overs_in_a_row_lose_neither_the_address_nor_the_servers(
    peer: Callable[[], Peer], tmp_path: object
) -> None:
    address = f"ipc://{tmp_path}/s"
    server = peer()
    before = peer()
    before.call(roles.open_publisher, address)
    server.call(roles.open_subscriber, address)
    for life in range(4):
        after = peer()
        after.call(roles.open_publisher, address, takeover=True)
        after.call(roles.publish, life, members=1)
        assert server.call(roles.await_content, life) == (1, life)
        with pytest.raises(FencedError):
            before.call(roles.publish, 66)
        before = after


def test_a_stopped_publisher_is_not_taken_for_a_dead_one(peer: Callable[[], Peer]) -> None:
    first, second = peer(), peer()
    address = first.call(roles.open_publisher, "tcp://127.0.0.1:0")
    first.stop()
    with pytest.raises(AddressInUseError, match="does not answer"):
        second.call(roles.open_publisher, address, takeover=True)
    first.cont()
    first.call(roles.publish, 10)
