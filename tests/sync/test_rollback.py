"""A version that turned out bad is taken back everywhere, and never comes again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import replicas, roles
from tests.processes import Peer, eventually
from tests.replicas import driven
from weightsync.errors import UsageError

swaps = pytest.mark.parametrize("swap", ["remap", "copy", "flip", "adopt"])


def a_fleet(
    peer: Callable[[], Peer], count: int = 2, published: dict[str, object] | None = None, **options: object
) -> tuple[Peer, list[Peer]]:
    """A publisher, and servers that take steps only when told to."""
    publisher, servers = peer(), [peer() for _ in range(count)]
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", **(published or {}))
    for number, server in enumerate(servers):
        server.call(roles.can_pause_reading, "shm")
        server.call(roles.open_subscriber, address, name=f"server-{number}", **options)
    return publisher, servers


def publish(publisher: Peer, servers: list[Peer], *contents: int) -> None:
    """Versions that all servers make live, one after the other."""
    for content in contents:
        version = publisher.call(roles.publish, content, members=len(servers))
        for server in servers:
            assert server.call(roles.await_version, version) == (version, content)


def looks(servers: list[Peer]) -> list[tuple[int, float]]:
    return [server.call(roles.look) for server in servers]


def await_content(servers: list[Peer], version: int, content: int) -> None:
    for server in servers:
        assert server.call(roles.await_content, content) == (version, content)


@swaps
def test_servers_go_back_and_on_with_the_next_version(peer: Callable[[], Peer], swap: str) -> None:
    slots = 4 if swap == "copy" else 3
    publisher, servers = a_fleet(peer, swap=swap, slots=slots, published={"slots": 4})
    publish(publisher, servers, 10, 20)
    publisher.call(replicas.roll_back)
    await_content(servers, 1, 10)
    eventually(lambda: {live for _, live in publisher.call(roles.members)} == {1}, "the fleet knows")
    publish(publisher, servers, 30, 40)
    publisher.call(replicas.roll_back, 4)
    await_content(servers, 3, 30)


@swaps
def test_a_server_that_holds_nothing_older_gets_it_again_or_goes_on_with_the_next(
    peer: Callable[[], Peer], swap: str
) -> None:
    publisher, servers = a_fleet(peer, swap=swap)
    publish(publisher, servers, 10)
    publisher.call(replicas.roll_back)
    assert looks(servers) == [(1, 10), (1, 10)]
    publish(publisher, servers, 20)
    publisher.call(replicas.roll_back)
    assert looks(servers) == [(2, 20), (2, 20)], "nobody has a good version"
    publish(publisher, servers, 30, 40)
    publisher.call(replicas.roll_back)
    await_content(servers, 3, 30)
    publish(publisher, servers, 50)


def test_a_version_that_is_not_live_yet_never_will_be(peer: Callable[[], Peer]) -> None:
    publisher, servers = a_fleet(peer)
    publish(publisher, servers, 10)
    publisher.call(roles.publish, 20)
    publisher.call(replicas.roll_back)
    await_content(servers, 1, 10)
    publish(publisher, servers, 30)


@pytest.mark.parametrize("swap", ["remap", "copy", "flip"])
def test_a_version_that_is_being_read_never_goes_live(peer: Callable[[], Peer], swap: str) -> None:
    publisher, (server,) = a_fleet(peer, count=1, swap=swap)
    publish(publisher, [server], 10)
    server.call(roles.serve)
    server.call(roles.arm)
    publisher.call(roles.publish, 20, wait="staged")
    server.await_pause()
    publisher.call(replicas.roll_back)
    server.resume()
    publisher.call(roles.publish, 30, wait="live")
    assert server.call(roles.stop_serving) == [(1, 10), (3, 30)]


def test_a_version_that_serves_nowhere_can_be_rolled_back(peer: Callable[[], Peer]) -> None:
    publisher, servers = a_fleet(peer)
    publish(publisher, servers, 10, 20)
    publisher.call(replicas.roll_back, 1)
    assert looks(servers) == [(2, 20), (2, 20)]
    with pytest.raises(UsageError, match="unknown"):
        publisher.call(replicas.roll_back, 7)
    publish(publisher, servers, 30)


def test_a_server_with_a_newer_version_at_hand_goes_there(peer: Callable[[], Peer]) -> None:
    publisher, servers = a_fleet(peer, slots=3)
    publish(publisher, servers, 10, 20)
    publisher.call(roles.publish, 30)
    publisher.call(replicas.roll_back, 2)
    await_content(servers, 3, 30)


def test_a_newcomer_gets_the_version_before(peer: Callable[[], Peer]) -> None:
    publisher, servers = a_fleet(peer)
    publish(publisher, servers, 10, 20)
    publisher.call(replicas.roll_back)
    newcomer = peer()
    newcomer.call(roles.open_subscriber, publisher.call(roles.address))
    assert newcomer.call(roles.await_version, 1) == (1, 10)
    publish(publisher, [*servers, newcomer], 30)


def test_the_servers_lag_does_not_count_what_was_rolled_back(peer: Callable[[], Peer]) -> None:
    publisher, servers = a_fleet(peer, slots=3, published={"max_lag": 1})
    publish(publisher, servers, 10, 20)
    publisher.call(replicas.roll_back)
    await_content(servers, 1, 10)
    publish(publisher, servers, 30)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("swap", ["remap", "copy", "flip"])
def test_both_ranks_of_a_replica_go_back_at_one_boundary(
    peer: Callable[[], Peer], slots: int, swap: str
) -> None:
    publisher = peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    engine = driven(peer, address, slots=slots, swap=swap)
    for content in (10, 20):
        publisher.call(roles.publish, content, members=2)
        assert engine.serve_until(content // 10)[-1] == (content // 10, content)
    publisher.call(replicas.roll_back)
    assert engine.serve_content(10)[-1] == (1, 10)
    publisher.call(roles.publish, 30)
    assert engine.serve_until(3) == [(1, 10), (3, 30)] or engine.turn() == (3, 30)


def test_a_replica_that_voted_for_it_does_not_go_there(peer: Callable[[], Peer]) -> None:
    publisher = peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", policy="manual")
    engine = driven(peer, address)
    publisher.call(roles.publish, 10, members=2)
    publisher.call(replicas.promote)
    assert engine.serve_until(1) == [(1, 10)]
    publisher.call(roles.publish, 20)
    publisher.call(replicas.roll_back)
    with pytest.raises(UsageError, match="rolled back"):
        publisher.call(replicas.promote)
    assert engine.turn() == (1, 10)
    publisher.call(roles.publish, 30)
    publisher.call(replicas.promote)
    assert engine.serve_until(3)[-1] == (3, 30)


@pytest.mark.parametrize("policy", ["together", "canary=1", "manual"])
@swaps
def test_servers_that_vote_go_back_and_so_does_who_joins_then(
    peer: Callable[[], Peer], policy: str, swap: str
) -> None:
    publisher, servers = a_fleet(peer, swap=swap, slots=3, published={"policy": policy, "slots": 4})
    for content in (10, 20):
        publisher.call(roles.publish, content, members=2)
        if policy != "together":
            publisher.call(replicas.promote)
        for server in servers:
            assert server.call(roles.await_version, content // 10)[1] == content
    publisher.call(replicas.roll_back)
    await_content(servers, 1, 10)
    newcomer = peer()
    newcomer.call(roles.open_subscriber, publisher.call(roles.address), name="zoe", swap=swap)
    assert newcomer.call(roles.await_version, 1) == (1, 10)
    publisher.call(roles.publish, 30, members=3)
    if policy != "together":
        publisher.call(replicas.promote)
    for server in (*servers, newcomer):
        assert server.call(roles.await_version, 3) == (3, 30)
