"""A reader that takes its time: what `publish()` does about it is the caller's choice, and never costs correctness."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests import roles
from tests.processes import Peer, eventually
from tests.transports import each_transport, offering
from weightsync.errors import SyncTimeoutError


def slow_pair(peer: Callable[[], Peer], transport: str, **options: object) -> tuple[Peer, Peer]:
    """A publisher whose reader is half-way through version 2, and stays there."""
    publisher, reader = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", **options, **offering(transport))
    reader.call(roles.can_pause_reading, transport)
    reader.call(roles.open_subscriber, address, transport=transport, name="slow-one")
    publisher.call(roles.publish, 10, members=1)
    assert reader.call(roles.await_version, 1) == (1, 10)
    reader.call(roles.arm)
    publisher.call(roles.publish, 20, wait="staged")
    reader.await_pause()
    return publisher, reader


@each_transport
def test_wait_times_out_and_names_who_holds_the_slots(peer: Callable[[], Peer], transport: str) -> None:
    publisher, reader = slow_pair(peer, transport, when_full="wait")
    publisher.call(roles.publish, 30, wait="staged")  # the other slot
    before = time.monotonic()
    with pytest.raises(SyncTimeoutError, match=r"slow-one \(reading version 2\)"):
        publisher.call(roles.publish, 40, wait="staged", timeout_s=0.5)
    assert 0.4 < time.monotonic() - before < 5
    assert reader.call(roles.look) == (1, 10)
    reader.resume()
    assert reader.call(roles.await_content, 30) == (3, 30)
    assert publisher.call(roles.publish, 50) == 4  # the number of the one that timed out is free
    assert reader.call(roles.await_content, 50) == (4, 50)


@each_transport
def test_skip_sends_nothing_and_says_so(peer: Callable[[], Peer], transport: str) -> None:
    publisher, reader = slow_pair(peer, transport, when_full="skip")
    publisher.call(roles.publish, 30, wait="staged")
    publisher.call(roles.publish, 40, wait="staged")
    assert publisher.call(roles.is_skipped)
    assert reader.call(roles.look) == (1, 10)
    reader.resume()
    assert reader.call(roles.await_content, 30) == (3, 30)
    publisher.call(roles.publish, 50)
    assert not publisher.call(roles.is_skipped)
    assert reader.call(roles.await_content, 50)[1] == 50


@each_transport
def test_evict_takes_the_slot_and_the_reader_starts_again_on_the_newest(
    peer: Callable[[], Peer], transport: str
) -> None:
    publisher, reader = slow_pair(peer, transport, when_full="evict")
    for content in (30, 40, 50, 60):
        before = time.monotonic()
        publisher.call(roles.publish, content, wait="staged")
        assert time.monotonic() - before < 5, "eviction waits for nobody"
    assert reader.call(roles.look) == (1, 10)
    reader.call(roles.serve)
    reader.resume()
    eventually(lambda: publisher.call(roles.members)[0][1] == 6, "the reader serves the newest version")
    seen = reader.call(roles.stop_serving)
    assert seen[-1] == (6, 60)
    assert set(seen) <= {(1, 10), (2, 20), (6, 60)}  # what was on its way already may still arrive, whole
    assert reader.call(roles.counts)[2] == 0, "an eviction is not a failure of a version"


@each_transport
def test_eviction_in_full_flight_never_shows_torn_bytes(peer: Callable[[], Peer], transport: str) -> None:
    size = {"blocks": 8, "width": 128}
    publisher, reader = peer(), peer()
    address = publisher.call(
        roles.open_publisher, "tcp://127.0.0.1:0", when_full="evict", size=size, **offering(transport)
    )
    reader.call(roles.open_subscriber, address, transport=transport, size=size)
    reader.call(roles.serve)
    publisher.call(roles.publish, 1, members=1, wait="live")
    publisher.call(roles.publish_many, range(2, 60))
    publisher.call(roles.publish, 60, wait="live")
    seen = reader.call(roles.stop_serving)
    assert seen[-1] == (60, 60)
    assert all(version == content for version, content in seen)


def test_max_lag_waits_for_the_slowest_server_and_names_it(peer: Callable[[], Peer]) -> None:
    publisher, reader = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", max_lag=1)
    reader.call(roles.open_subscriber, address, name="slow-one")
    publisher.call(roles.publish, 10, members=1)
    with pytest.raises(SyncTimeoutError, match=r"max_lag=1.*slow-one"):
        publisher.call(
            roles.publish, 20, timeout_s=0.5
        )  # verified, but nobody took the step that makes it live
    assert reader.call(roles.await_version, 1) == (1, 10)
    publisher.call(roles.publish, 20, timeout_s=10.0)
    assert reader.call(roles.await_version, 2) == (2, 20)


def test_an_adopting_reader_is_not_evicted(peer: Callable[[], Peer]) -> None:
    publisher, reader = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", when_full="evict", slots=3)
    reader.call(roles.open_subscriber, address, swap="adopt")
    publisher.call(roles.publish, 10, members=1)
    assert reader.call(roles.await_version, 1) == (1, 10)
    publisher.call(roles.publish_many, range(20, 40), wait="staged")
    assert reader.call(roles.look)[1] in (10, 20)
    reader.call(roles.serve)
    publisher.call(roles.publish, 99, wait="live")
    assert reader.call(roles.stop_serving)[-1][1] == 99
