"""Members that read from each other, and one of them dies, stops, lies or leaves: the others get every version, right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import replicas, roles
from tests.processes import Peer, eventually
from weightsync.errors import TransportError

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


def a_late_joiner(
    peer: Callable[[], Peer], *, address: str | None = None, **options: object
) -> tuple[Peer, Peer, Peer, str]:
    """A publisher, a server that has its first version, and one in the middle of reading that from it, at `address`."""
    publisher, holder, late = peer(), peer(), peer()
    bound = publisher.call(
        roles.open_publisher, address or "tcp://127.0.0.1:0", size=SIZE, **RELAY, **options
    )
    publisher.call(roles.be_impatient, 1.0)
    holder.call(roles.open_subscriber, bound, size=SIZE, name="holder", transport="zmq")
    publisher.call(roles.publish, 10, members=1)
    assert holder.call(roles.await_version, 1) == (1, 10)
    late.call(roles.can_pause_reading, "zmq")
    late.call(roles.arm)
    late.call(roles.open_subscriber, bound, size=SIZE, name="late", transport="zmq")
    late.await_pause()
    return publisher, holder, late, bound


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


def test_the_only_holder_is_killed_and_the_publisher_gives_the_rest(peer: Callable[[], Peer]) -> None:
    publisher, holder, late, _ = a_late_joiner(peer)
    holder.kill()
    late.resume()
    assert late.call(roles.await_content, 10) == (1, 10)
    assert late.call(roles.counts) == (1, 1, 0)
    assert publisher.call(roles.relayed, 1)["late"] < publisher.call(roles.size)


def test_the_only_holder_stops_and_the_publisher_gives_the_rest(peer: Callable[[], Peer]) -> None:
    publisher, holder, late, _ = a_late_joiner(peer)
    holder.stop()
    late.resume()
    assert late.call(roles.await_content, 10) == (1, 10)
    assert late.call(roles.counts) == (1, 1, 0)
    assert publisher.call(roles.relayed, 1)["late"] < publisher.call(roles.size)
    holder.cont()
    publisher.call(roles.publish, 20, members=2, wait="staged")
    for server in (holder, late):
        assert server.call(roles.await_content, 20) == (2, 20)


def test_the_only_holder_refills_its_slot_and_the_publisher_gives_the_rest(peer: Callable[[], Peer]) -> None:
    publisher, holder, late, _ = a_late_joiner(peer, slots=3)
    for version in (2, 3):  # the second of them goes where the first version was
        publisher.call(roles.publish, 10 * version, wait="staged")
        assert holder.call(roles.await_content, 10 * version) == (version, 10 * version)
    late.resume()
    assert late.call(roles.await_content, 30) == (3, 30)
    assert late.call(roles.counts)[::2] == (2, 0)
    assert publisher.call(roles.relayed, 1)["late"] < publisher.call(roles.size)


def test_the_only_holder_lies_and_the_publisher_gives_everything(peer: Callable[[], Peer]) -> None:
    publisher, holder, late, _ = a_late_joiner(peer)
    holder.call(roles.serve_wrong_bytes)
    late.resume()
    assert late.call(roles.await_content, 10) == (1, 10)
    assert late.call(roles.counts) == (1, 1, 0)
    assert publisher.call(roles.relayed, 1)["late"] < publisher.call(roles.size)
    last = peer()
    last.call(roles.open_subscriber, publisher.call(roles.address), size=SIZE, name="last", transport="zmq")
    assert last.call(roles.await_content, 10) == (1, 10)


def test_a_holder_that_starts_again_in_the_middle_is_read_from_again(peer: Callable[[], Peer]) -> None:
    publisher, holder, late, _ = a_late_joiner(peer)
    holder.call(roles.rejoin)
    late.resume()
    assert late.call(roles.await_content, 10) == (1, 10)
    assert late.call(roles.counts)[2] == 0
    publisher.call(roles.publish, 20, members=2, wait="ready")
    for server in (holder, late):
        assert server.call(roles.await_content, 20) == (2, 20)


def test_a_reader_that_starts_again_in_the_middle_reads_again(peer: Callable[[], Peer]) -> None:
    publisher, holder, late, _ = a_late_joiner(peer)
    late.call(roles.rejoin)
    late.resume()
    assert late.call(roles.await_content, 10) == (1, 10)
    assert late.call(roles.counts)[2] == 0
    publisher.call(roles.publish, 20, members=2, wait="ready")
    for server in (holder, late):
        assert server.call(roles.await_content, 20) == (2, 20)


def test_a_member_that_loses_the_coordinator_keeps_the_old_version_and_catches_up(
    peer: Callable[[], Peer],
) -> None:
    publisher, (other,), address = a_fleet(peer, 1)
    with replicas.Wire(address) as wire:
        reader = peer()
        reader.call(roles.can_pause_reading, "zmq")
        reader.call(roles.be_impatient, 1.0)
        reader.call(roles.open_subscriber, wire.address, size=SIZE, name="reader", transport="zmq")
        assert reader.call(roles.await_version, 1) == (1, 10)
        half_way(publisher, reader)
        wire.cut()
        reader.resume()
        assert other.call(roles.await_content, 20) == (2, 20)
        reader.call(roles.await_silence)
        assert reader.call(roles.look) == (1, 10)
        wire.mend()
        assert reader.call(roles.await_content, 20) == (2, 20)
        publisher.call(roles.publish, 30, members=2, wait="ready")
        assert reader.call(roles.await_content, 30) == (3, 30)


@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_fifty_versions_and_twenty_lives_leave_nothing_behind(
    peer: Callable[[], Peer], transport: str
) -> None:
    publisher, keepers, guest = peer(), [peer(), peer()], peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", size=SIZE, **RELAY)
    for number, keeper in enumerate(keepers):
        keeper.call(roles.open_subscriber, address, size=SIZE, name=f"k{number}", transport=transport)
    everybody = {"publisher": publisher, "k0": keepers[0], "k1": keepers[1]}
    early: dict[str, dict[str, int]] = {}
    content = 0
    for life in range(20):
        guest.call(roles.open_subscriber, address, size=SIZE, name="guest", transport=transport)
        if content:
            assert guest.call(roles.await_content, content)[1] == content
        for _ in range(3 if life % 2 else 2):
            content += 1
            publisher.call(roles.publish, content, members=3, wait="ready")
            for server in (guest, *keepers):
                assert server.call(roles.await_content, content)[1] == content
        guest.call(roles.close_subscriber)
        if life == 4:
            early = {name: one.call(roles.footprint) for name, one in everybody.items()}
    for name, one in everybody.items():
        eventually(lambda one=one, name=name: _is_no_more(one.call(roles.footprint), early[name]), name, 5.0)


def _is_no_more(late: dict[str, int], early: dict[str, int]) -> bool:
    """Each life of the guest would leave some."""
    return (
        late["threads"] - late["pool"] <= early["threads"] - early["pool"]
        and late["pool"] <= 8
        and late["files"] <= early["files"] + 12
        and late["maps"] <= early["maps"] + 30
        and late["resident"] <= early["resident"] + (16 << 20)
    )


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
        if life:
            assert guest.call(roles.await_content, 9 + life)[1] == 9 + life
        publisher.call(roles.publish, 10 + life, members=2, wait="ready")
        assert guest.call(roles.await_content, 10 + life)[1] == 10 + life
        assert keeper.call(roles.await_content, 10 + life)[1] == 10 + life
        guest.call(roles.close_subscriber)
        late = {name: one.call(roles.footprint) for name, one in (("guest", guest), ("keeper", keeper))}
        early = early or late
    for name in early:
        others = [one[name]["threads"] - one[name]["pool"] for one in (early, late)]
        assert others[1] <= others[0] + 2 and late[name]["pool"] <= 8, (early, late)
        assert late[name]["files"] <= early[name]["files"] + 8, (early, late)


def test_a_server_joins_where_nixl_is_not_installed(peer: Callable[[], Peer]) -> None:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", size=SIZE, **RELAY)
    server.call(roles.forget_package, "nixl")
    server.call(roles.open_subscriber, address, size=SIZE)
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)


def test_a_data_host_that_is_not_here_is_named_and_leaves_nothing_open(peer: Callable[[], Peer]) -> None:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", size=SIZE, **RELAY)
    server.call(roles.make_model, size=SIZE)
    before = server.call(roles.footprint)
    with pytest.raises(TransportError, match=r"data_host='203\.0\.113\.7'"):
        server.call(roles.subscribe, address, data_host="203.0.113.7")
    eventually(lambda: server.call(roles.footprint)["files"] <= before["files"] + 1, "all is closed", 5.0)
    server.call(roles.subscribe, address)


def test_a_reader_closes_although_its_peer_leaves_at_that_moment(peer: Callable[[], Peer]) -> None:
    reader = peer()
    reader.tell(roles.close_while_the_peer_leaves)
    reader.reply(timeout_s=10.0)
