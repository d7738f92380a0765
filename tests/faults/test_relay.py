"""Members that read from each other, and one of them dies, stops, lies or leaves: the others get every version, right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import roles
from tests.processes import Peer

SIZE = {"blocks": 8, "width": 512}
RELAY = {"relay": "always", "transports": ("zmq",)}


def a_fleet(peer: Callable[[], Peer], count: int = 3) -> tuple[Peer, list[Peer], str]:
    """A publisher and servers that have its first version, all on their way to the next."""
    publisher, servers = peer(), [peer() for _ in range(count)]
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", size=SIZE, **RELAY)
    for number, server in enumerate(servers):
        server.call(roles.can_pause_reading, "zmq")
        server.call(roles.open_subscriber, address, size=SIZE, name=f"s{number}", transport="zmq")
    publisher.call(roles.publish, 10, members=count)
    for server in servers:
        assert server.call(roles.await_version, 1) == (1, 10)
    return publisher, servers, address


def half_way(publisher: Peer, server: Peer) -> None:
    """The second version is staged, and `server` in the middle of a share of it."""
    server.call(roles.arm)
    publisher.call(roles.publish, 20, wait="staged")
    server.await_pause()


def test_a_holder_killed_in_the_middle_is_replaced_and_the_version_does_not_fail(
    peer: Callable[[], Peer],
) -> None:
    publisher, (reader, holder, other), _ = a_fleet(peer)
    half_way(publisher, reader)
    holder.kill()
    reader.resume()
    assert reader.call(roles.await_content, 20) == (2, 20)
    assert other.call(roles.await_content, 20) == (2, 20)
    assert reader.call(roles.counts)[2] == 0
    publisher.call(roles.publish, 30, wait="ready")
    assert reader.call(roles.await_content, 30) == (3, 30)


def test_a_holder_that_is_stopped_is_replaced_and_follows_when_it_goes_on(peer: Callable[[], Peer]) -> None:
    publisher, (reader, holder, other), _ = a_fleet(peer)
    half_way(publisher, reader)
    holder.stop()
    reader.resume()
    assert reader.call(roles.await_content, 20) == (2, 20)
    assert other.call(roles.await_content, 20) == (2, 20)
    holder.cont()
    assert holder.call(roles.await_content, 20) == (2, 20)


def test_a_reader_killed_with_a_share_that_nobody_else_has_costs_only_time(peer: Callable[[], Peer]) -> None:
    publisher, (victim, first, second), _ = a_fleet(peer)
    half_way(publisher, victim)
    victim.kill()
    for server in (first, second):
        assert server.call(roles.await_content, 20) == (2, 20)


def test_a_reader_stopped_with_a_share_that_nobody_else_has_holds_up_nobody(peer: Callable[[], Peer]) -> None:
    publisher, (victim, first, second), _ = a_fleet(peer)
    half_way(publisher, victim)
    victim.stop()
    for server in (first, second):
        assert server.call(roles.await_content, 20) == (2, 20)
    victim.cont()
    victim.resume()
    assert victim.call(roles.await_content, 20) == (2, 20)


def test_wrong_bytes_of_a_holder_reach_nobody(peer: Callable[[], Peer]) -> None:
    publisher, (liar, first, second), _ = a_fleet(peer)
    liar.call(roles.serve_wrong_bytes)
    for content in (20, 30, 40):
        publisher.call(roles.publish, content, wait="ready")
        for server in (liar, first, second):
            assert server.call(roles.await_content, content)[1] == content
    assert first.call(roles.counts)[2] == second.call(roles.counts)[2] == 0


def test_a_holder_that_leaves_orderly_is_replaced(peer: Callable[[], Peer]) -> None:
    publisher, (reader, holder, _), _ = a_fleet(peer)
    half_way(publisher, reader)
    holder.call(roles.close_subscriber)
    reader.resume()
    assert reader.call(roles.await_content, 20) == (2, 20)


def test_a_publisher_killed_in_the_middle_leaves_the_old_version_live(peer: Callable[[], Peer]) -> None:
    publisher, servers, address = a_fleet(peer)
    half_way(publisher, servers[0])
    publisher.kill()
    servers[0].resume()
    seen = [server.call(roles.look) for server in servers]
    assert set(seen) <= {(1, 10), (2, 20)}
    successor = peer()
    successor.call(roles.open_publisher, address, size=SIZE, **RELAY)
    successor.call(roles.publish, 30, members=3, wait="ready")
    for server in servers:
        assert server.call(roles.await_content, 30) == (1, 30)


def test_a_server_that_closes_in_the_middle_does_so_at_once(peer: Callable[[], Peer]) -> None:
    publisher, (reader, first, _), _ = a_fleet(peer)
    half_way(publisher, reader)
    reader.tell(roles.close_subscriber)
    reader.resume()
    reader.reply(timeout_s=5.0)
    assert first.call(roles.await_content, 20) == (2, 20)


@pytest.mark.parametrize("swap", ["remap", "copy"])
def test_members_that_come_and_go_leave_nothing_behind(peer: Callable[[], Peer], swap: str) -> None:
    publisher, keeper = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", size=SIZE, **RELAY)
    keeper.call(roles.open_subscriber, address, size=SIZE, swap=swap)
    guest = peer()
    early: dict[str, dict[str, int]] = {}
    late: dict[str, dict[str, int]] = {}
    for life in range(4):
        guest.call(roles.open_subscriber, address, size=SIZE, swap=swap)
        publisher.call(roles.publish, 10 + life, members=2, wait="ready")
        assert guest.call(roles.await_content, 10 + life)[1] == 10 + life
        assert keeper.call(roles.await_content, 10 + life)[1] == 10 + life
        guest.call(roles.close_subscriber)
        late = {name: one.call(roles.footprint) for name, one in (("guest", guest), ("keeper", keeper))}
        early = early or late
    for name in early:
        assert late[name]["threads"] <= early[name]["threads"] + 2, (early, late)
        assert late[name]["files"] <= early[name]["files"] + 8, (early, late)
