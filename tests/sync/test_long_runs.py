"""Two hundred versions in a row take no more memory, descriptors or threads than twenty."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import roles
from tests.processes import Peer

WAYS = [("remap", "shm"), ("copy", "shm"), ("flip", "zmq"), ("adopt", "shm")]


@pytest.mark.parametrize(("swap", "transport"), WAYS)
def test_two_hundred_publishes_are_flat_on_both_sides(
    peer: Callable[[], Peer], swap: str, transport: str
) -> None:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    server.call(roles.open_subscriber, address, swap=swap, transport=transport)
    server.call(roles.serve)
    publisher.call(roles.publish, 0, members=1, wait="live")
    publisher.call(roles.publish_many, range(1, 40), wait="live")
    before = [one.call(roles.footprint) for one in (publisher, server)]
    publisher.call(roles.publish_many, range(40, 240), wait="live")
    after = [one.call(roles.footprint) for one in (publisher, server)]
    assert server.call(roles.stop_serving) == [(n + 1, n) for n in range(240)]
    for old, new in zip(before, after, strict=True):
        assert new["threads"] == old["threads"]
        assert new["files"] == old["files"]
        assert new["maps"] <= old["maps"] + 8
        assert new["resident"] <= old["resident"] + (4 << 20)


def test_a_server_that_comes_and_goes_leaves_nothing_at_the_publisher(peer: Callable[[], Peer]) -> None:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    footprints = []
    for life in range(8):
        server.call(roles.open_subscriber, address, transport="shm" if life % 2 else "zmq")
        publisher.call(roles.publish, life, wait="staged", members=1)
        assert server.call(roles.await_content, life) == (life + 1, life)
        server.call(roles.close_subscriber)
        publisher.call(roles.await_nobody)
        footprints.append([one.call(roles.footprint) for one in (publisher, server)])
    for early, late in zip(footprints[3], footprints[-1], strict=True):
        assert late["threads"] == early["threads"]
        assert late["files"] == early["files"]
