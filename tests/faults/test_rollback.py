"""A server that was away while a version was rolled back does not bring it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests import replicas, roles
from tests.processes import Peer, eventually
from tests.replicas import Engine, Wire


@pytest.fixture
def cut_off(peer: Callable[[], Peer]) -> Iterator[CutOff]:
    scene = CutOff(peer)
    yield scene
    scene.wire.close()


class CutOff:
    """A publisher, and a wire through which servers reach its coordinator."""

    def __init__(self, peer: Callable[[], Peer]) -> None:
        self.publisher, self._peer = peer(), peer
        self.publisher.call(roles.be_impatient, 1.0)
        self.address = self.publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", slots=3)
        self.wire = Wire(self.address)

    def server(self, **options: object) -> Peer:
        server = self._peer()
        server.call(roles.be_impatient, 1.0)
        server.call(roles.open_subscriber, self.wire.address, **options)
        return server

    def publish(self, *contents: int, members: int = 1) -> None:
        for content in contents:
            self.publisher.call(roles.publish, content, members=members)

    def roll_back_unheard(self, server: Peer) -> None:
        """Cut the wire, roll the newest version back, and mend it; the server has joined again."""
        self.wire.cut()
        eventually(lambda: not self.publisher.call(roles.members), "the server counts as gone")
        before = server.call(roles.sessions)  # now: on a slow machine it may have joined anew before the cut
        self.publisher.call(replicas.roll_back)
        self.wire.mend()
        eventually(
            lambda: server.call(roles.sessions) not in (before, id(None)), "the server has joined again"
        )


@pytest.mark.parametrize("swap", ["remap", "copy", "flip", "adopt"])
def test_it_goes_back_when_it_is_told(cut_off: CutOff, swap: str) -> None:
    server = cut_off.server(swap=swap, slots=4)
    for version in (1, 2):
        cut_off.publish(10 * version)
        assert server.call(roles.await_version, version) == (version, 10 * version)
    cut_off.roll_back_unheard(server)
    assert server.call(roles.await_content, 10) == (1, 10)
    cut_off.publish(30)
    assert server.call(roles.await_version, 3) == (3, 30)


@pytest.mark.parametrize("swap", ["remap", "copy", "flip", "adopt"])
def test_it_does_not_go_to_what_waited_for_a_step(cut_off: CutOff, swap: str) -> None:
    server = cut_off.server(swap=swap)
    cut_off.publish(10)
    assert server.call(roles.await_version, 1) == (1, 10)
    cut_off.publish(20)
    cut_off.roll_back_unheard(server)
    assert server.call(roles.look) == (1, 10)
    cut_off.publish(30)
    assert server.call(roles.await_version, 3) == (3, 30)


@pytest.mark.parametrize("slots", [2, 3])
def test_a_replica_goes_back_when_its_rank_is_there_again(
    cut_off: CutOff, peer: Callable[[], Peer], slots: int
) -> None:
    engine = Engine(peer(), peer())
    engine.ranks[0].call(replicas.open_rank, cut_off.address, 0, slots=slots)
    engine.ranks[1].call(replicas.open_rank, cut_off.wire.address, 1, slots=slots)
    for version in (1, 2):
        cut_off.publish(10 * version, members=2)
        assert engine.serve_until(version)[-1] == (version, 10 * version)
    cut_off.wire.cut()
    eventually(lambda: len(cut_off.publisher.call(roles.members)) == 1, "the rank counts as gone")
    cut_off.publisher.call(replicas.roll_back)
    assert engine.turn() == (2, 20)
    cut_off.wire.mend()
    assert engine.serve_content(10)[-1] == (1, 10)
    cut_off.publish(30, members=2)
    assert engine.serve_until(3)[-1] == (3, 30)
