"""The ranks of a publisher as the coordinator sees them: who holds what, and who is missing."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.config import MEMBER_TIMEOUT_S
from weightsync.wire import messages as m

MAX_RANKS = 4096


@dataclass(slots=True)
class Rank:
    """One process of the publisher that said Enlist. `route` is where its messages go."""

    route: bytes
    enlist: m.Enlist
    last_seen: float
    offers: dict[str, dict[str, str]] | None = None

    @property
    def label(self) -> str:
        return f"rank {self.enlist.rank} ({self.enlist.host}:{self.enlist.pid})"


class Ranks:
    """Seats for all ranks; empty ones belong to processes that have not come, or have gone."""

    def __init__(self) -> None:
        self.seats: list[Rank | None] = []
        self._instances: dict[int, str] = {}
        self._replaced: set[str] = set()
        self._asked: dict[str, float] = {}

    def refusal(self, enlist: m.Enlist, now: float) -> str | None:
        """Why this process can't have the seat it asks for. One that has lost it to another never gets it back."""
        present = [rank for rank in self.seats if rank is not None]
        if not 0 <= enlist.rank < enlist.ranks <= MAX_RANKS:
            return f"rank {enlist.rank} of {enlist.ranks} is impossible"
        others = [rank for rank in present if rank.enlist.rank != enlist.rank]
        for rank in others:
            if rank.enlist.ranks != enlist.ranks or rank.enlist.slots != enlist.slots:
                return (
                    f"rank {enlist.rank} has ranks={enlist.ranks} and slots={enlist.slots}, {rank.label} has "
                    f"ranks={rank.enlist.ranks} and slots={rank.enlist.slots}"
                )
        if enlist.instance in self._replaced:
            return f"rank {enlist.rank} ({enlist.host}:{enlist.pid}) was replaced by another process"
        holder = self._rival(enlist)
        if holder is None or holder.last_seen < self._asked.setdefault(enlist.instance, now):
            return None
        return f"{holder.label} is alive; stop it, or pass takeover=True to replace it"

    def must_wait(self, enlist: m.Enlist, now: float) -> bool:
        """Whether another process has the seat that was not heard since this one asked: it beats, or is dead."""
        holder = self._rival(enlist)
        return holder is not None and now - holder.last_seen <= MEMBER_TIMEOUT_S

    def _rival(self, enlist: m.Enlist) -> Rank | None:
        holder = self.seats[enlist.rank] if enlist.rank < len(self.seats) else None
        is_free = holder is None or holder.enlist.instance == enlist.instance or enlist.takeover
        return None if is_free else holder

    def seat(self, route: bytes, enlist: m.Enlist, now: float) -> Rank | None:
        """Give the process its seat; returns whoever is pushed out of it. A process that comes back keeps its offers."""
        if len(self.seats) != enlist.ranks:
            self.seats = [None] * enlist.ranks
            self._instances = {}
        before = self.seats[enlist.rank]
        is_same = self._instances.get(enlist.rank) == enlist.instance
        offers = before.offers if before is not None and is_same else None
        self.seats[enlist.rank] = Rank(route, enlist, now, offers)
        if self.follows_another(enlist):
            self._replaced.add(self._instances[enlist.rank])
        self._instances[enlist.rank] = enlist.instance
        self._asked.pop(enlist.instance, None)
        return None if before is None or is_same else before

    def knows(self, enlist: m.Enlist) -> bool:
        """Whether this very process was the last in its seat: what its slots hold is still there."""
        return len(self.seats) == enlist.ranks and self._instances.get(enlist.rank) == enlist.instance

    def follows_another(self, enlist: m.Enlist) -> bool:
        """Whether the last process in its seat was another one, whose slots are gone."""
        return self._instances.get(enlist.rank, enlist.instance) != enlist.instance

    def find(self, route: bytes) -> Rank | None:
        return next((rank for rank in self.seats if rank is not None and rank.route == route), None)

    def remove(self, rank: Rank) -> None:
        self.seats[rank.enlist.rank] = None

    def present(self) -> list[Rank]:
        return [rank for rank in self.seats if rank is not None]

    def missing(self) -> list[str]:
        """Ranks that are not there, or whose slots are not, in words; empty when everything can go on."""
        if not self.seats:
            return ["every rank"]
        return [
            f"rank {number} of {len(self.seats)}"
            for number, rank in enumerate(self.seats)
            if rank is None or rank.offers is None
        ]

    def silent(self, now: float) -> list[Rank]:
        return [rank for rank in self.present() if now - rank.last_seen > MEMBER_TIMEOUT_S]
