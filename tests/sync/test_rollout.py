"""Which servers go to a version, and when: together, canaries first, or when somebody says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import replicas, roles
from tests.processes import Peer, eventually
from tests.replicas import driven
from weightsync.errors import UsageError, VersionError


def servers(
    peer: Callable[[], Peer], policy: str, count: int = 3, slots: int = 2, **options: object
) -> tuple[Peer, list[Peer]]:
    """A publisher, and servers that step all the time."""
    publisher, plain = peer(), [peer() for _ in range(count)]
    publisher.call(roles.can_flip_before_sealing)
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", policy=policy, slots=slots)
    for number, server in enumerate(plain):
        server.call(roles.can_pause_reading, "shm")
        server.call(roles.open_subscriber, address, name=f"server-{number}", **options)
    return publisher, plain


def looks(plain: list[Peer]) -> list[tuple[int, float]]:
    return [server.call(roles.look) for server in plain]


def await_all(plain: list[Peer], version: int) -> None:
    for server in plain:
        assert server.call(roles.await_version, version) == (version, 10 * version)


def ready(server: Peer, count: int) -> None:
    eventually(lambda: server.call(roles.counts)[0] == count, f"{count} versions are verified")


@pytest.mark.parametrize("swap", ["remap", "copy", "flip", "adopt"])
def test_together_nobody_goes_before_the_last_one_is_ready(peer: Callable[[], Peer], swap: str) -> None:
    publisher, plain = servers(peer, "together", slots=3, swap=swap)
    publisher.call(roles.publish, 10, members=3)
    await_all(plain, 1)
    if swap == "adopt":  # which reads nothing
        publisher.call(roles.publish, 20)
    else:
        plain[2].call(roles.arm)
        publisher.call(roles.publish, 20, wait="staged")
        plain[2].await_pause()
        for server in plain[:2]:
            ready(server, 2)
        assert looks(plain[:2]) == [(1, 10), (1, 10)]
        plain[2].resume()
    await_all(plain, 2)
    for server in plain:
        server.call(roles.serve)
    for content in range(30, 100, 10):
        publisher.call(roles.publish, content, wait="live")
    for server in plain:
        assert server.call(roles.stop_serving)[-1] == (9, 90)


def test_together_a_server_that_is_killed_holds_nobody_back(peer: Callable[[], Peer]) -> None:
    publisher, plain = servers(peer, "together")
    publisher.call(roles.publish, 10, members=3)
    await_all(plain, 1)
    plain[2].call(roles.arm)
    publisher.call(roles.publish, 20, wait="staged")
    plain[2].await_pause()
    for server in plain[:2]:
        ready(server, 2)
    assert looks(plain[:2]) == [(1, 10), (1, 10)]
    plain[2].kill()
    await_all(plain[:2], 2)


def test_together_nobody_goes_to_a_version_that_one_server_refused(peer: Callable[[], Peer]) -> None:
    publisher, plain = servers(peer, "together", count=2)
    picky = peer()
    picky.call(roles.flip_after_reading, at_version=2, times=2)
    picky.call(
        roles.open_subscriber, publisher.call(roles.address), transport="shm", verify="full", name="picky"
    )
    publisher.call(roles.publish, 10, members=3)
    await_all([*plain, picky], 1)
    for server in (*plain, picky):
        server.call(roles.serve)
    with pytest.raises(VersionError, match="do not match"):
        publisher.call(roles.publish, 20)
    publisher.call(roles.publish, 30, wait="live")
    for server in (*plain, picky):
        assert server.call(roles.stop_serving) == [(1, 10), (3, 30)]


def test_together_a_version_that_nobody_can_take_is_followed_by_the_next(peer: Callable[[], Peer]) -> None:
    publisher, plain = servers(peer, "together", count=2)
    publisher.call(roles.publish, 10, members=2)
    await_all(plain, 1)
    publisher.call(roles.flip_next, "3.weight", 6)
    with pytest.raises(VersionError, match=r"3\.weight"):
        publisher.call(roles.publish, 20)
    assert looks(plain) == [(1, 10), (1, 10)]
    publisher.call(roles.publish, 30)
    await_all(plain, 3)


def test_together_a_replica_and_a_plain_server_go_when_both_are_ready(peer: Callable[[], Peer]) -> None:
    publisher, (plain,) = servers(peer, "together", count=1)
    engine = driven(peer, publisher.call(roles.address))
    publisher.call(roles.publish, 10, members=3)
    assert engine.serve_until(1) == [(1, 10)]
    await_all([plain], 1)
    plain.call(roles.arm)
    before = max(engine.proposals())
    publisher.call(roles.publish, 20, wait="staged")
    plain.await_pause()
    for rank in engine.ranks:
        ready(rank, 2)
    assert engine.turn() == (1, 10)
    plain.resume()
    engine.await_decision(before)
    assert engine.serve_until(2) == [(2, 20)]
    await_all([plain], 2)


def test_together_a_newcomer_goes_where_the_others_are(peer: Callable[[], Peer]) -> None:
    publisher, plain = servers(peer, "together", count=2)
    publisher.call(roles.publish, 10, members=2)
    await_all(plain, 1)
    publisher.call(roles.publish, 20)
    await_all(plain, 2)
    late = peer()
    late.call(roles.open_subscriber, publisher.call(roles.address), name="late")
    await_all([late], 2)
    publisher.call(roles.publish, 30, members=3)
    await_all([*plain, late], 3)


def test_together_a_server_that_takes_no_step_holds_nobody_back(peer: Callable[[], Peer]) -> None:
    publisher, (busy, idle) = servers(peer, "together", count=2)
    busy.call(roles.serve)
    for content in range(10, 50, 10):
        publisher.call(roles.publish, content, members=2, wait="ready")
    eventually(lambda: publisher.call(roles.live_versions)["server-0"] == 4, "the busy server goes on")
    assert idle.call(roles.await_version, 4) == (4, 40)
    busy.call(roles.stop_serving)


def test_a_canary_goes_first_and_the_rest_when_promoted(peer: Callable[[], Peer]) -> None:
    publisher, plain = servers(peer, "canary=1")
    publisher.call(roles.publish, 10, members=3)
    publisher.call(replicas.promote)
    await_all(plain, 1)
    publisher.call(roles.publish, 20)
    await_all(plain[:1], 2)
    assert looks(plain) == [(2, 20), (1, 10), (1, 10)]
    publisher.call(replicas.promote, 2)
    await_all(plain, 2)
    publisher.call(roles.publish, 30)
    await_all(plain[:1], 3)
    publisher.call(roles.publish, 40, wait="staged")
    await_all(plain[:1], 4)
    publisher.call(replicas.promote, 4)
    await_all(plain, 4)


def test_by_hand_nobody_goes_before_the_promotion(peer: Callable[[], Peer]) -> None:
    publisher, plain = servers(peer, "manual")
    publisher.call(roles.publish, 10, members=3)
    publisher.call(replicas.promote)
    await_all(plain, 1)
    publisher.call(roles.publish, 20)
    assert looks(plain) == [(1, 10)] * 3
    for content in (30, 40):
        publisher.call(roles.publish, content, wait="staged")
    with pytest.raises(UsageError, match="no longer held"):
        publisher.call(replicas.promote, 2)
    assert looks(plain) == [(1, 10)] * 3
    publisher.call(replicas.promote, 4)
    await_all(plain, 4)
    with pytest.raises(UsageError, match="older than 4"):
        publisher.call(replicas.promote, 3)
