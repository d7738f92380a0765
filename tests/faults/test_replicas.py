"""A rank that dies, stops or is cut off holds its replica at one version, never at two, and only until it is back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import replicas, roles
from tests.processes import Peer, eventually
from tests.replicas import Engine, Wire, form_group, grouped
from weightsync.errors import SyncTimeoutError

IMPATIENT_S = 1.0
SIZE = {"width": 128}
transports = pytest.mark.parametrize("transport", ["shm", "zmq"])


@pytest.fixture
def wire() -> Iterator[Callable[[str], Wire]]:
    with ExitStack() as stack:
        yield lambda address: stack.enter_context(Wire(address))


class Scene:
    """A publisher, and a replica of two ranks that serves version 1. Both can pause while they read. `wire`: makes one for
    rank 1 to reach the coordinator through."""

    def __init__(
        self,
        peer: Callable[[], Peer],
        transport: str = "shm",
        *,
        policy: str = "each",
        wire: Callable[[str], Wire] | None = None,
    ) -> None:
        self._peer, self._transport = peer, transport
        self.publisher = self._impatient()
        self.address = self.publisher.call(
            roles.open_publisher, "tcp://127.0.0.1:0", size=SIZE, policy=policy
        )
        self.wire = None if wire is None else wire(self.address)
        self.ranks = [self._rank(0), self._rank(1)]
        self.engine = Engine(*self.ranks)
        self.publisher.call(roles.publish, 10, members=2)
        if policy == "manual":
            self.publisher.call(replicas.promote)
        assert self.engine.serve_until(1) == [(1, 10)]

    def _impatient(self) -> Peer:
        one = self._peer()
        one.call(roles.be_impatient, IMPATIENT_S)
        return one

    def _rank(self, rank: int) -> Peer:
        one = self._impatient()
        one.call(roles.can_pause_reading, self._transport)
        address = self.wire.address if self.wire is not None and rank == 1 else self.address
        one.call(replicas.open_rank, address, rank, size=SIZE, transport=self._transport)
        return one

    def restart(self, rank: int) -> None:
        self.ranks[rank] = self.engine.ranks[rank] = self._rank(rank)

    def pause_one(self, rank: int) -> None:
        """Publish version 2; the rank stops half-way through it, the other one has voted."""
        self.ranks[rank].call(roles.arm)
        self.publisher.call(roles.publish, 20, wait="staged")
        self.ranks[rank].await_pause()
        other = self.ranks[1 - rank]
        eventually(lambda: other.call(roles.counts)[0] == 2, "the other rank has verified the version")


def before_it_has_verified(scene: Scene) -> None:
    scene.pause_one(1)
    scene.ranks[1].kill()


def after_it_has_voted(scene: Scene) -> None:
    scene.pause_one(0)
    scene.ranks[1].kill()
    scene.ranks[0].resume()


def after_the_decision(scene: Scene) -> None:
    before = max(scene.engine.proposals())
    scene.publisher.call(roles.publish, 20)
    scene.engine.await_decision(before)
    scene.ranks[1].kill()


@transports
@pytest.mark.parametrize("die", [before_it_has_verified, after_it_has_voted, after_the_decision])
def test_a_killed_rank_costs_time_and_nothing_else(
    peer: Callable[[], Peer], transport: str, die: Callable[[Scene], None]
) -> None:
    scene = Scene(peer, transport)
    die(scene)
    assert scene.ranks[0].call(roles.look) == (1, 10)
    scene.restart(1)
    assert scene.engine.serve_until(2)[-1] == (2, 20)
    for content in (30, 40, 50):
        scene.publisher.call(roles.publish, content, wait="staged")
    assert scene.engine.serve_until(5)[-1] == (5, 50)


@pytest.mark.parametrize("die", [before_it_has_verified, after_it_has_voted, after_the_decision])
def test_versions_published_while_a_rank_is_dead_do_not_wait_for_it(
    peer: Callable[[], Peer], die: Callable[[Scene], None]
) -> None:
    scene = Scene(peer)
    die(scene)
    for content in (30, 40, 50):
        scene.publisher.call(roles.publish, content, wait="staged")
    assert scene.ranks[0].call(roles.look) == (1, 10)
    scene.restart(1)
    assert scene.engine.serve_until(5)[-1] == (5, 50)


@pytest.mark.parametrize("policy", ["each", "together"])
def test_a_stopped_rank_is_waited_for_and_goes_on_with_the_others(
    peer: Callable[[], Peer], policy: str
) -> None:
    scene = Scene(peer, policy=policy)
    scene.ranks[1].stop()
    for content in (20, 30, 40):
        scene.publisher.call(roles.publish, content, wait="staged")
    eventually(lambda: len(scene.publisher.call(roles.members)) == 1, "the stopped rank counts as gone")
    assert scene.ranks[0].call(roles.look) == (1, 10)
    scene.ranks[1].cont()
    assert scene.engine.serve_until(4)[-1] == (4, 40)
    scene.publisher.call(roles.publish, 50)
    assert scene.engine.serve_until(5)[-1] == (5, 50)


def test_a_stopped_rank_that_was_replaced_stays_out(peer: Callable[[], Peer]) -> None:
    scene = Scene(peer)
    zombie = scene.ranks[1]
    zombie.stop()
    scene.restart(1)
    scene.publisher.call(roles.publish, 20, wait="staged")
    assert scene.engine.serve_until(2)[-1] == (2, 20)
    zombie.cont()
    eventually(lambda: zombie.call(replicas.refusal), "it is told why")
    assert "took its place" in zombie.call(replicas.refusal)
    for content in (30, 40):
        scene.publisher.call(roles.publish, content)
        assert scene.engine.serve_until(content // 10)[-1] == (content // 10, content)
    assert zombie.call(roles.look) == (1, 10)
    states = ["refused", "serving", "serving"]
    eventually(lambda: scene.publisher.call(replicas.states) == states, "it is shown as refused")


def test_a_rank_that_did_not_hear_of_the_decision_switches_with_the_others(
    peer: Callable[[], Peer], wire: Callable[[str], Wire]
) -> None:
    scene = Scene(peer, policy="manual", wire=wire)
    assert scene.wire is not None
    before = scene.engine.proposals()
    scene.publisher.call(roles.publish, 20)
    scene.wire.cut()
    scene.publisher.call(replicas.promote)
    scene.engine.await_decision(max(before))
    assert scene.engine.proposals()[1] == before[1]
    assert scene.engine.serve_until(2) == [(2, 20)]
    scene.wire.mend()
    scene.publisher.call(roles.publish, 30)
    scene.publisher.call(replicas.promote)
    assert scene.engine.serve_until(3)[-1] == (3, 30)


def test_a_rank_that_is_cut_off_before_it_voted_holds_the_others_until_it_is_back(
    peer: Callable[[], Peer], wire: Callable[[str], Wire]
) -> None:
    scene = Scene(peer, wire=wire)
    assert scene.wire is not None
    scene.pause_one(1)
    scene.wire.cut()
    scene.ranks[1].resume()
    eventually(lambda: len(scene.publisher.call(roles.members)) == 1, "the rank counts as gone")
    scene.publisher.call(roles.publish, 30, wait="staged")
    assert scene.engine.turn() == (1, 10)
    scene.wire.mend()
    assert scene.engine.serve_until(3)[-1] == (3, 30)


@pytest.mark.parametrize("is_decided", [False, True])
@pytest.mark.parametrize("is_heard", ["by both", "by one"])
def test_a_new_publisher_finds_the_ranks_at_one_version_and_takes_them_on(
    peer: Callable[[], Peer], wire: Callable[[str], Wire], is_decided: bool, is_heard: str
) -> None:
    scene = Scene(peer, policy="manual", wire=wire)
    assert scene.wire is not None
    before = max(scene.engine.proposals())
    scene.publisher.call(roles.publish, 20)
    if is_heard == "by one":
        scene.wire.cut()
    if is_decided:
        scene.publisher.call(replicas.promote)
        scene.engine.await_decision(before)
    scene.publisher.kill()
    assert scene.ranks[0].call(roles.look) == (1, 10)
    scene.wire.mend()
    successor = peer()
    successor.call(roles.open_publisher, scene.address, size=SIZE)
    successor.tell(roles.publish, 30, members=2)
    served = scene.engine.serve_content(30)
    successor.reply()
    assert served == [
        *([(1, 10)] if served[0] == (1, 10) else []),
        *([(2, 20)] if is_decided else []),
        (1, 30),
    ]
    successor.call(roles.publish, 40)
    assert scene.engine.serve_until(2)[-1] == (2, 40)


def test_a_group_that_lost_a_rank_says_so_and_its_processes_form_another(
    peer: Callable[[], Peer], tmp_path: Path
) -> None:
    publisher = peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    survivor, victim = grouped(peer, address, tmp_path / "first", replica="tp")
    for rank in (survivor, victim):
        rank.tell(replicas.serve_until, 10)
    publisher.call(roles.publish_many, range(10, 60, 10), "live")
    victim.kill()
    with pytest.raises(SyncTimeoutError, match="form a new group"):
        survivor.reply()
    survivor.call(replicas.leave_group)
    ranks = [survivor, peer()]
    form_group(ranks, address, tmp_path / "second", replica="tp")
    for rank in ranks:
        rank.tell(replicas.serve_until, 10)
    publisher.call(roles.publish_many, range(60, 110, 10))
    seen = [rank.reply() for rank in ranks]
    assert seen[0] == seen[1] and seen[0][-1] == (10, 100)


def test_a_group_waits_for_a_stopped_rank_and_goes_on_with_it(
    peer: Callable[[], Peer], tmp_path: Path
) -> None:
    publisher = peer()
    publisher.call(roles.be_impatient, IMPATIENT_S)
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    ranks = grouped(peer, address, tmp_path / "store")
    for rank in ranks:
        rank.tell(replicas.serve_until, 20)
    publisher.call(roles.publish_many, range(10, 60, 10))
    ranks[1].stop()
    publisher.call(roles.publish_many, range(60, 110, 10))
    eventually(lambda: len(publisher.call(roles.members)) == 1, "the stopped rank counts as gone")
    ranks[1].cont()
    publisher.call(roles.publish_many, range(110, 210, 10))
    seen = [rank.reply() for rank in ranks]
    assert seen[0] == seen[1] and seen[0][-1] == (20, 200)
