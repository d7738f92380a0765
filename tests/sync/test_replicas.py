"""Ranks of a server switch at one step boundary, whatever comes and however fast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import replicas, roles
from tests.processes import Peer
from tests.replicas import Seen, driven, grouped
from weightsync.errors import NotReadyError, VersionError

SLOW = [(version, 10.0 * version) for version in range(61, 71)]
"""What `publish_seventy` waits for."""


def publish_seventy(publisher: Peer) -> None:
    """Sixty versions as fast as can be, and ten that every server makes live."""
    publisher.call(roles.publish, 10, members=2)
    publisher.call(roles.publish_many, range(20, 610, 10))
    publisher.tell(roles.publish_many, range(610, 710, 10), "live")


def each_once(steps: list[Seen]) -> list[Seen]:
    """Versions in the order in which they were served; every step's content must be that of its version."""
    assert all(content == 10 * version for version, content in steps)
    assert steps == sorted(steps)
    return sorted(set(steps))


@pytest.mark.parametrize("swap", ["remap", "copy", "flip"])
def test_ranks_of_a_group_see_the_same_version_at_every_step(
    peer: Callable[[], Peer], tmp_path: Path, swap: str
) -> None:
    publisher = peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    ranks = grouped(peer, address, tmp_path / "store", swap=swap)
    for rank in ranks:
        rank.tell(replicas.serve_until, 70)
    publish_seventy(publisher)
    publisher.reply()
    seen = [rank.reply() for rank in ranks]
    assert seen[0] == seen[1]
    assert each_once(seen[0])[-10:] == SLOW


def test_a_rank_that_can_not_follow_says_so_and_serves_no_step(peer: Callable[[], Peer]) -> None:
    publisher = peer()
    engine = driven(peer, publisher.call(roles.open_publisher, "tcp://127.0.0.1:0"))
    publisher.call(roles.publish, 10, members=2)
    engine.serve_until(1)
    with pytest.raises(VersionError, match="never voted for"):
        engine.ranks[0].call(replicas.turn, max(engine.proposals()) + 1)
    with pytest.raises(NotReadyError, match="restart it"):
        engine.ranks[0].call(roles.look)
    assert engine.ranks[1].call(roles.look) == (1, 10)


@pytest.mark.parametrize("swap", ["remap", "copy", "flip"])
@pytest.mark.parametrize("slots", [2, 3])
def test_ranks_driven_by_an_engine_see_the_same_version_at_every_step(
    peer: Callable[[], Peer], swap: str, slots: int
) -> None:
    publisher = peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    engine = driven(peer, address, swap=swap, slots=slots)
    publish_seventy(publisher)
    seen = engine.serve_until(70)
    publisher.reply()
    assert each_once(seen)[-10:] == SLOW
