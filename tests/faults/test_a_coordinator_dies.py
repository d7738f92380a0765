"""A coordinator of its own process, killed at any moment and started again: the fleet carries on where it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import weightsync as ws
from tests import coordination, roles, sharded
from tests.processes import Peer, eventually
from weightsync.errors import AddressInUseError, FencedError, SyncTimeoutError, VersionError

EXTERNAL = {"coordinator": "external"}
Make = Callable[[], Peer]


def a_coordinator(peer: Make, address: str = "tcp://127.0.0.1:0", **options: object) -> tuple[Peer, str]:
    held = peer()
    return held, held.call(coordination.open_coordinator, address, **options)


def a_fleet(peer: Make, swap: str = "remap", **options: object) -> tuple[Peer, Peer, Peer, str]:
    """A coordinator, a publisher, and a server that has its first version."""
    coordinator, address = a_coordinator(peer)
    publisher, server = peer(), peer()
    publisher.call(roles.open_publisher, address, **EXTERNAL, **options)
    server.call(roles.open_subscriber, address, swap=swap)
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    return coordinator, publisher, server, address


@pytest.mark.parametrize("swap", ["remap", "copy", "flip", "adopt"])
def test_versions_go_on_in_the_same_epoch_when_it_starts_again(peer: Make, swap: str) -> None:
    coordinator, publisher, server, address = a_fleet(peer, swap)
    server.call(roles.serve)
    epoch = publisher.call(roles.epoch)
    for version in (2, 4):
        coordinator.kill()
        coordinator, _ = a_coordinator(peer, address)
        for number in (version, version + 1):
            assert publisher.call(roles.publish, 10 * number, members=1, wait="live") == number
    assert server.call(roles.stop_serving) == [(1, 10), (2, 20), (3, 30), (4, 40), (5, 50)]
    assert server.call(roles.live_epoch) == publisher.call(roles.epoch) == epoch


def test_what_is_live_is_known_again_before_anything_is_published(peer: Make) -> None:
    coordinator, _, server, address = a_fleet(peer)
    coordinator.kill()
    assert server.call(roles.look) == (1, 10)
    coordinator, _ = a_coordinator(peer, address)
    eventually(
        lambda: [member.lag for member in ws.fetch_status(address).members] == [0],
        "the server is back with version 1",
    )
    assert server.call(roles.await_version, 1) == (1, 10)
    assert ws.fetch_status(address).version == 1


def test_a_slot_that_serves_at_a_stopped_server_is_not_overwritten(peer: Make) -> None:
    coordinator, publisher, server, address = a_fleet(peer, "adopt")
    server.stop()
    coordinator.kill()
    coordinator, _ = a_coordinator(peer, address)
    for number in (2, 3, 4):
        publisher.call(roles.publish, 10 * number, wait="staged")  # into the other slot
    server.cont()
    assert server.call(roles.look) in ((1, 10), (4, 40))
    server.call(roles.serve)
    for number in (5, 6, 7):
        publisher.call(roles.publish, 10 * number, members=1, wait="live")
    assert server.call(roles.stop_serving)[-1] == (7, 70)


def test_a_server_that_dies_with_its_slot_meanwhile_gives_it_back(peer: Make) -> None:
    coordinator, publisher, server, address = a_fleet(peer, "adopt")
    server.stop()
    coordinator.kill()
    coordinator, _ = a_coordinator(peer, address)
    publisher.call(roles.publish, 20, wait="staged")
    server.kill()
    for content in (30, 40, 50):
        publisher.call(roles.publish, content, wait="staged", timeout_s=2.0)


def test_a_server_that_adopted_a_slot_follows_a_publisher_that_starts_again(peer: Make) -> None:
    coordinator, publisher, server, address = a_fleet(peer, "adopt")
    coordinator.call(sharded.be_impatient)
    server.call(roles.serve)
    publisher.kill()
    publisher = peer()
    publisher.call(roles.open_publisher, address, **EXTERNAL)
    for version in (2, 3, 4):
        assert publisher.call(roles.publish, 10 * version, members=1, wait="live") == version
    assert server.call(roles.stop_serving) == [(1, 10), (2, 20), (3, 30), (4, 40)]


def test_a_publisher_killed_and_started_again_takes_its_seat_as_soon_as_the_dead_one_is_missed(
    peer: Make,
) -> None:
    coordinator, publisher, server, address = a_fleet(peer)
    coordinator.call(sharded.be_impatient)
    publisher.kill()
    assert server.call(roles.await_version, 1) == (1, 10)
    successor = peer()
    started = time.monotonic()
    successor.call(roles.open_publisher, address, **EXTERNAL)
    assert time.monotonic() - started < 3.0
    assert successor.call(roles.publish, 20, members=1) == 2
    assert server.call(roles.await_version, 2) == (2, 20)


def test_a_second_publisher_is_told_who_has_the_seat(peer: Make) -> None:
    _, publisher, _, address = a_fleet(peer)
    second = peer()
    with pytest.raises(AddressInUseError, match=r"rank 0 .* is alive; stop it, or pass takeover=True"):
        second.call(roles.open_publisher, address, **EXTERNAL)
    publisher.call(roles.publish, 20, members=1)


def test_a_publisher_that_was_replaced_never_comes_back(peer: Make) -> None:
    _, publisher, server, address = a_fleet(peer, takeover=True)
    publisher.stop()
    second = peer()
    second.call(roles.open_publisher, address, takeover=True, **EXTERNAL)
    assert second.call(roles.publish, 20, members=1) == 2
    publisher.cont()
    with pytest.raises(FencedError, match="replaced by another process"):
        publisher.call(roles.publish, 66)
        publisher.call(roles.publish, 66)
    second.call(roles.publish, 30, members=1)
    assert server.call(roles.look)[1] == 30


# ---- the publisher is gone, or several ranks are


def test_when_the_publisher_is_gone_for_good_servers_serve_and_the_status_says_who_is_missing(
    peer: Make,
) -> None:
    coordinator, publisher, server, address = a_fleet(peer)
    coordinator.call(sharded.be_impatient)
    publisher.kill()
    eventually(lambda: ws.fetch_status(address).missing_ranks == ["rank 0 of 1"], "rank 0 is missed", 5.0)
    status = ws.fetch_status(address)
    assert status.version == 1 and [member.live_version for member in status.members] == [1]
    assert server.call(roles.look) == (1, 10)


def two_ranks(peer: Make) -> tuple[Peer, list[Peer], Peer, str]:
    """A coordinator, two ranks, and a server with other cuts that serves their first version."""
    coordinator, address = a_coordinator(peer)
    coordinator.call(sharded.be_impatient)
    ranks, server = [peer(), peer()], peer()
    for number, rank in enumerate(ranks):
        rank.call(sharded.open_rank, address, number, 2, "rows", **EXTERNAL)
    together(ranks, sharded.register_rank)
    server.call(sharded.open_servers, address, "columns", range(1), 1)
    assert together(ranks, sharded.publish_rank, 1, members=1) == [1, 1]
    server.call(sharded.await_content, 1, 1)
    return coordinator, ranks, server, address


def together(
    ranks: list[Peer], action: Callable[..., object], *args: object, **options: object
) -> list[object]:
    for rank in ranks:
        rank.tell(action, *args, **options)
    return [rank.reply() for rank in ranks]


def test_several_ranks_go_on_with_the_next_coordinator(peer: Make) -> None:
    coordinator, ranks, server, address = two_ranks(peer)
    coordinator.kill()
    a_coordinator(peer, address)
    for version in (2, 3):
        assert together(ranks, sharded.publish_rank, version, members=1) == [version, version]
        server.call(sharded.await_content, version, version)


def test_a_process_group_publishes_through_it(peer: Make, tmp_path: Path) -> None:
    coordinator, address = a_coordinator(peer)
    ranks, server = [peer(), peer()], peer()
    for number, rank in enumerate(ranks):
        rank.tell(coordination.open_in_group, address, number, 2, str(tmp_path / "store"))
    for rank in ranks:
        rank.reply()
    server.call(sharded.open_servers, address, "columns", range(1), 1)
    coordinator.kill()
    a_coordinator(peer, address)
    assert together(ranks, sharded.publish_rank, 1, members=1) == [1, 1]
    server.call(sharded.await_content, 1, 1)


@pytest.mark.parametrize("who", ["rank", "rank and coordinator"])
def test_a_rank_killed_and_started_again_goes_on_where_the_others_are(peer: Make, who: str) -> None:
    coordinator, ranks, server, address = two_ranks(peer)
    together(ranks, sharded.publish_rank, 2)
    server.call(sharded.await_content, 2, 2)
    ranks[1].kill()
    if who == "rank and coordinator":
        coordinator.kill()
        a_coordinator(peer, address)
    assert server.call(sharded.look, 2) == [2]
    ranks[1] = peer()
    ranks[1].call(sharded.open_rank, address, 1, 2, "rows", **EXTERNAL)
    ranks[1].call(sharded.register_rank)
    assert together(ranks, sharded.publish_rank, 3, members=1) == [3, 3]
    server.call(sharded.await_content, 3, 3)


def test_a_version_that_one_rank_had_staged_is_lost_for_all_and_the_next_one_is_not(peer: Make) -> None:
    coordinator, ranks, server, address = two_ranks(peer)
    ranks[0].call(sharded.publish_rank, 2)
    coordinator.kill()
    a_coordinator(peer, address)
    with pytest.raises(VersionError, match="version 2 was lost"):
        ranks[1].call(sharded.publish_rank, 2)
    with pytest.raises(VersionError, match="version 2: the coordinator started again"):
        ranks[0].call(sharded.await_ticket, "live")
    assert server.call(sharded.look, 1) == [1]
    assert together(ranks, sharded.publish_rank, 3, members=1) == [3, 3]
    server.call(sharded.await_content, 3, 3)


def test_orders_of_the_trainer_reach_the_fleet_through_the_next_coordinator_too(peer: Make) -> None:
    coordinator, address = a_coordinator(peer)
    publisher, server = peer(), peer()
    publisher.call(roles.open_publisher, address, policy="manual", slots=3, **EXTERNAL)
    server.call(roles.open_subscriber, address, slots=3)
    server.call(roles.serve)
    for version in (1, 2):
        publisher.call(roles.publish, 10 * version, members=1)
        publisher.call(coordination.promote)
        publisher.call(roles.await_stage, "live")
    coordinator.kill()
    a_coordinator(peer, address)
    publisher.call(roles.publish, 30, members=1)
    publisher.call(coordination.promote)
    assert publisher.call(roles.await_stage, "live") == {publisher.call(roles.members)[0][0]: None}
    publisher.call(coordination.roll_back)
    eventually(lambda: publisher.call(roles.members)[0][1] == 2, "the server goes back to version 2", 10.0)
    assert server.call(roles.stop_serving) == [(1, 10), (2, 20), (3, 30), (2, 20)]


def test_the_newest_version_can_be_rolled_back_through_a_coordinator_that_started_after_it(
    peer: Make,
) -> None:
    coordinator, publisher, server, address = a_fleet(peer)
    server.call(roles.serve)
    publisher.call(roles.publish, 20, wait="live")
    coordinator.kill()
    a_coordinator(peer, address)
    eventually(lambda: publisher.call(roles.members), "the server is back")
    publisher.call(coordination.roll_back)
    eventually(lambda: publisher.call(roles.members)[0][1] == 1, "the server goes back to version 1", 10.0)
    publisher.call(roles.publish, 30, members=1, wait="live")
    assert server.call(roles.stop_serving) == [(1, 10), (2, 20), (1, 10), (3, 30)]


def test_one_that_joins_after_the_restart_gets_the_next_version(peer: Make) -> None:
    coordinator, publisher, server, address = a_fleet(peer)
    coordinator.kill()
    a_coordinator(peer, address)
    late = peer()
    late.call(roles.open_subscriber, address)
    publisher.call(roles.publish, 20, members=2)
    for one in (server, late):
        assert one.call(roles.await_version, 2) == (2, 20)


# ---- in flight


def test_a_publish_that_waits_for_a_slot_succeeds_with_the_next_coordinator(peer: Make) -> None:
    coordinator, publisher, server, address = a_fleet(peer)
    server.call(roles.can_pause_reading, "shm")
    late = peer()
    late.call(roles.can_pause_reading, "shm")
    late.call(roles.open_subscriber, address, transport="shm")
    late.call(roles.await_version, 1)
    late.call(roles.arm)
    publisher.call(roles.publish, 20, wait="staged")
    late.await_pause()
    publisher.call(roles.publish, 30, wait="staged")
    publisher.tell(roles.publish, 40, wait="ready", timeout_s=10.0)
    assert not publisher.poll(0.2), "both slots are taken"
    coordinator.kill()
    coordinator, _ = a_coordinator(peer, address)
    late.resume()
    assert publisher.reply() == 4
    for one in (server, late):
        assert one.call(roles.await_version, 4) == (4, 40)


def test_a_version_that_is_staged_when_it_dies_is_lost_by_name_and_the_next_one_is_not(peer: Make) -> None:
    coordinator, address = a_coordinator(peer)
    publisher, server = peer(), peer()
    publisher.call(roles.can_pause_staging)
    publisher.call(roles.open_publisher, address, **EXTERNAL)
    server.call(roles.open_subscriber, address)
    publisher.call(roles.publish, 10, members=1)
    publisher.call(roles.arm)
    publisher.tell(roles.publish, 20)
    publisher.await_pause()
    coordinator.kill()
    coordinator, _ = a_coordinator(peer, address)
    eventually(lambda: not ws.fetch_status(address).missing_ranks, "the publisher is back")
    publisher.resume()
    with pytest.raises(VersionError, match="version 2: the coordinator started again"):
        publisher.reply()
    assert server.call(roles.look) == (1, 10)
    assert publisher.call(roles.publish, 30) == 3
    assert server.call(roles.await_version, 3) == (3, 30)


def test_a_wait_for_a_version_that_nobody_knows_any_more_ends_with_an_error(peer: Make) -> None:
    coordinator, publisher, server, address = a_fleet(peer)
    server.stop()
    publisher.call(roles.publish, 20, wait="staged")
    publisher.tell(roles.await_stage, "live")
    assert not publisher.poll(0.1)
    coordinator.kill()
    coordinator, _ = a_coordinator(peer, address)
    with pytest.raises(VersionError, match="version 2: the coordinator started again"):
        publisher.reply()
    server.cont()
    assert publisher.call(roles.publish, 30, members=1) == 3


def test_without_a_coordinator_a_publish_ends_by_its_deadline_and_the_next_one_succeeds(peer: Make) -> None:
    coordinator, publisher, server, address = a_fleet(peer)
    publisher.call(coordination.lose_patience)
    coordinator.kill()
    started = time.monotonic()
    with pytest.raises(SyncTimeoutError, match=f"{address}: the coordinator did not answer"):
        publisher.call(coordination.publish_by, 0.3)
    assert time.monotonic() - started < 2.0
    assert server.call(roles.look) == (1, 10)
    coordinator, _ = a_coordinator(peer, address)
    assert publisher.call(roles.publish, 20, members=1) == 2
    assert server.call(roles.await_version, 2) == (2, 20)


def test_a_publisher_without_a_coordinator_waits_for_one(peer: Make, address: str) -> None:
    publisher, server = peer(), peer()
    with pytest.raises(SyncTimeoutError, match=rf"{address}: no coordinator answered within 0.5 s"):
        publisher.call(roles.bind_publisher, address, **EXTERNAL)
        publisher.call(coordination.register, 0.5)
    publisher.tell(roles.register)
    server.tell(roles.open_subscriber, address)
    a_coordinator(peer, address)
    publisher.reply()
    server.reply()
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
