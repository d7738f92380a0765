"""Every order of events that a bounded search and many long random runs can reach, on the code that runs in production.

Checked in every state: no step is served with two versions, a rank serves only what it verified, nothing is committed
without every vote, and no rank is told to switch to what it dropped. Checked from samples: once faults end, all ranks reach
the newest version that they may have.
"""

from __future__ import annotations

import pytest

from tests.versioning.replica_model import Search, Setting, Violation, rounds_to_goal, search, steps, walk
from weightsync.errors import NotReadyError, UsageError
from weightsync.standing import Ballot, Standing
from weightsync.versioning.commit import RankCommit
from weightsync.wire.replicas import Cancel, Commit, Grant, Order, Replica

ALL_FAULTS = (
    "lose", "double", "crash", "coordinator", "refuse", "withdraw", "reject", "rollback", "partition", "activation",
)  # fmt: skip


def each(times: int, *faults: str) -> tuple[tuple[str, int], ...]:
    return tuple((fault, times) for fault in faults)


def require_progress(found: Search) -> None:
    for world, path in found.sample:
        assert rounds_to_goal(world, 1) is not None, "stuck after\n" + "\n".join(steps(path))


@pytest.mark.parametrize("drive", ["agreement", "engine"])
@pytest.mark.parametrize("slots", [2, 3])
def test_every_order_of_events_with_one_lost_message(drive: str, slots: int) -> None:
    found = search(Setting(drive=drive, slots=slots, versions=2, faults=each(1, "lose"), total=1), 20_000)  # type: ignore[arg-type]  # a Literal, from parametrize
    assert found.is_complete and found.states > 3_000
    require_progress(found)


@pytest.mark.parametrize(
    ("setting", "limit"),
    [
        (Setting(versions=2, faults=each(1, "crash", "lose")), 12_000),
        (Setting(drive="engine", versions=2, faults=each(1, "crash", "refuse")), 12_000),
        (Setting(faults=each(1, "coordinator", "reject")), 12_000),
        (Setting(ranks=3, versions=2, faults=each(1, "crash"), total=1), 6_000),
    ],
    ids=["crash", "engine", "coordinator", "three-ranks"],
)
def test_the_first_tens_of_thousands_of_states_with_faults(setting: Setting, limit: int) -> None:
    found = search(setting, limit, every=100)
    assert found.states >= limit
    require_progress(found)


@pytest.mark.parametrize(
    ("ranks", "drive", "slots", "runs"),
    [
        (2, "agreement", 2, 1000),
        (2, "engine", 2, 500),
        (2, "engine", 3, 300),
        (3, "agreement", 3, 300),
        (1, "engine", 2, 100),
    ],
)
def test_long_runs_with_every_fault(ranks: int, drive: str, slots: int, runs: int) -> None:
    setting = Setting(ranks=ranks, drive=drive, slots=slots, faults=each(2, *ALL_FAULTS), total=5)  # type: ignore[arg-type]  # a Literal, from parametrize
    states = 0
    reached = {"live": 0, "rolled back": 0}
    for seed in range(runs):
        names: list[str] = []
        for world, names in walk(setting, seed, 150):  # noqa: B007
            states += 1
        assert rounds_to_goal(world, seed) is not None, "stuck after\n" + "\n".join(names)
        reached["live"] += any(rank is not None and rank.live is not None for rank in world.ranks)
        reached["rolled back"] += bool(world.bad)
    assert states > 40 * runs and reached["live"] > 0.9 * runs and reached["rolled back"] > 0.1 * runs


class CommitsEarly(Replica):
    """Commits when one vote is still missing."""

    def _is_elected(self, ballot: Ballot) -> bool:
        votes = sum(ballot in standing.votes for standing in self._standings().values())
        return not self.missing and votes >= self.size - 1


class CancelsCommitted(Replica):
    """Takes a commit back when a rank leaves."""

    def left(self, rank: int) -> list[Order]:
        orders = super().left(rank)
        if self.decided is None:
            return orders
        return [*orders, *(Cancel(r, known.session, self.decided) for r, known in self._ranks.items())]


class CancelsUnheard(Replica):
    """Cancels what it does not know, before it has heard every rank."""

    @property
    def missing(self) -> list[int]:
        return []


class TakesStaleCommits(RankCommit):
    """Follows a coordinator that is no more."""

    def on_commit(self, session: int, ballot: Ballot) -> bool:
        return super().on_commit(self.session, ballot)


class DropsVotes(RankCommit):
    """Refills a slot that it voted for."""

    def may_drop(self, version: int) -> bool:
        return self.live is None or self.live.version != version


@pytest.mark.parametrize(
    ("setting", "faults"),
    [
        (Setting(replica=CommitsEarly), ("lose",)),
        (Setting(replica=CancelsCommitted), ("lose", "partition", "crash")),
        (Setting(replica=CancelsUnheard), ("lose", "coordinator", "partition")),
        (Setting(commit=TakesStaleCommits), ("coordinator", "reject", "withdraw")),
        (Setting(commit=DropsVotes), ("lose",)),
    ],
    ids=lambda value: (
        next(
            (kind.__name__ for kind in (value.replica, value.commit) if kind not in (Replica, RankCommit)), ""
        )
        if isinstance(value, Setting)
        else ""
    ),
)
def test_a_wrong_rule_is_found(setting: Setting, faults: tuple[str, ...]) -> None:
    wrong = Setting(replica=setting.replica, commit=setting.commit, faults=each(2, *faults), total=4)
    with pytest.raises(Violation):
        for seed in range(3000):
            for _ in walk(wrong, seed, 120):
                pass


class NeverRepeats(Replica):
    """Sends each order once."""

    def _repair(self, rank: int, standing: Standing) -> list[Grant | Commit | Cancel]:
        return []


def test_a_lost_order_that_is_never_repeated_is_found() -> None:
    setting = Setting(replica=NeverRepeats, faults=each(2, "lose"))
    stuck = 0
    for seed in range(50):
        for world, _ in walk(setting, seed, 120):  # noqa: B007
            pass
        stuck += rounds_to_goal(world, seed) is None
    assert stuck


# ---- single rules


def pair(first: int = 100) -> tuple[Replica, list[RankCommit]]:
    """A replica of two ranks that serve nothing yet, and its version 1."""
    replica, ranks = Replica("r", 2, first_number=first), [RankCommit(), RankCommit()]
    replica.available(1)
    for r, rank in enumerate(ranks):
        [admit] = replica.joined(r, f"process {r}")
        rank.enter(admit.session)
    say(replica, ranks)
    return replica, ranks


def say(replica: Replica, ranks: list[RankCommit]) -> None:
    """Exchange standings and orders, reading at once what is granted, until nothing is new."""
    orders = [
        order for r, rank in enumerate(ranks) for order in replica.reported(r, rank.standing(has_room=True))
    ]
    while orders:
        order = orders.pop(0)
        rank = ranks[order.rank]
        match order:
            case Grant(session=session, ballot=ballot):
                if rank.on_grant(session, ballot):
                    rank.verified(ballot.version)
            case Commit(session=session, ballot=ballot):
                rank.on_commit(session, ballot)
            case Cancel(session=session, ballot=ballot):
                rank.on_cancel(session, ballot)
        orders += replica.reported(order.rank, rank.standing(has_room=True))


def switch(ranks: list[RankCommit]) -> None:
    number = max(rank.proposal for rank in ranks)
    for rank in ranks:
        if rank.order(number) is not None:
            rank.switched(number)


def go(replica: Replica, ranks: list[RankCommit], version: int) -> None:
    replica.available(version)
    say(replica, ranks)
    assert replica.ready == version
    for order in replica.permit(version):
        assert isinstance(order, Commit)
        ranks[order.rank].on_commit(order.session, order.ballot)
    switch(ranks)
    say(replica, ranks)
    assert [rank.live and rank.live.version for rank in ranks] == [version, version]


def test_nothing_is_committed_without_permission() -> None:
    replica, ranks = pair()
    assert replica.ready == 1 and replica.decided is None
    assert replica.permit(2) == [] and ranks[0].ready is None
    go(replica, ranks, 1)


def test_a_rolled_back_version_gives_way_to_the_one_before_and_never_returns() -> None:
    replica, ranks = pair()
    go(replica, ranks, 1)
    go(replica, ranks, 2)
    replica.rollback(2)
    say(replica, ranks)
    switch(ranks)
    say(replica, ranks)
    assert [rank.live and rank.live.version for rank in ranks] == [1, 1]
    replica.available(2)
    assert replica.target is None
    go(replica, ranks, 3)


def test_a_rollback_waits_for_a_missing_rank() -> None:
    replica, ranks = pair()
    go(replica, ranks, 1)
    go(replica, ranks, 2)
    replica.left(1)
    assert replica.rollback(2) == [] and replica.missing == [1]
    [admit] = replica.joined(1, "process 1")
    ranks[1].enter(admit.session)
    say(replica, ranks)
    switch(ranks)
    assert [rank.live and rank.live.version for rank in ranks] == [1, 1]


def test_a_restarted_rank_gets_what_the_others_serve_without_permission() -> None:
    replica, ranks = pair()
    go(replica, ranks, 1)
    ranks[1] = RankCommit()
    admit = replica.joined(1, "another process")[-1]
    ranks[1].enter(admit.session)
    say(replica, ranks)
    switch(ranks)
    assert [rank.live and rank.live.version for rank in ranks] == [1, 1]


def test_a_version_that_was_voted_for_is_kept() -> None:
    _, ranks = pair()
    with pytest.raises(UsageError, match="can't be dropped"):
        ranks[0].dropped(1)
    [vote] = ranks[0].standing(has_room=True).votes
    assert ranks[0].on_cancel(ranks[0].session, vote)
    ranks[0].dropped(1)


def test_a_rank_that_lacks_what_its_peers_switch_to_serves_no_step() -> None:
    rank = RankCommit(live=1)
    rank.require_clean()
    assert rank.order(7) is None
    with pytest.raises(NotReadyError, match="restart it"):
        rank.require_clean()
