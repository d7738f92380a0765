"""The rank's side of a replica commit: what it voted for and must keep, and what it may switch to."""

from __future__ import annotations

from weightsync.errors import NotReadyError, UsageError
from weightsync.standing import Ballot, Standing


class RankCommit:
    """Not locked; its owner is. `live`: a version that this rank serves from the start.

    Order of calls: `enter` for each welcome; `on_grant`, `on_commit`, `on_cancel` for the coordinator's orders; `verified` or
    `refuse` after a read; `dropped` before a slot is refilled. At a step boundary all ranks take the highest of their
    `proposal`s, then each calls `order` with it, makes the version it returns live, and calls `switched`; or `poison`,
    if that failed.
    """

    def __init__(self, live: int | None = None) -> None:
        self.session = 0
        self.live = None if live is None else Ballot(0, live)
        self.decided: Ballot | None = None
        self.poisoned: str | None = None
        self._complete = set() if live is None else {live}
        self._votes: set[Ballot] = set()
        self._granted: Ballot | None = None
        self._refused: int | None = None

    # ---- with the coordinator

    def enter(self, session: int) -> None:
        """The coordinator admitted this rank: orders of any other session are void from here on."""
        if session != self.session:
            self.session, self._granted = session, None

    def standing(self, *, has_room: bool) -> Standing:
        """To send after `enter`, after every change and with every heartbeat. `has_room`: a slot is free, or holds what may
        be dropped, and nothing is being read."""
        granted = 0 if self._granted is None else self._granted.number
        return Standing(
            self.session, self.live, self.decided, frozenset(self._votes), frozenset(self._complete),
            granted, self._refused, has_room,
        )  # fmt: skip

    def on_grant(self, session: int, ballot: Ballot) -> bool:
        """Whether the version must be read now; one that is complete is voted for at once. Not to be called while there is
        no room for a version that is not complete."""
        if session != self.session:
            return False
        self._granted = ballot
        if ballot.version in self._complete:
            self._votes.add(ballot)
            return False
        return True

    def on_commit(self, session: int, ballot: Ballot) -> bool:
        """Every rank of the replica voted: the next step boundary may switch. False for what is void or known."""
        is_news = session == self.session and ballot in self._votes and ballot.number > self.proposal
        if is_news:
            self.decided = ballot
        return is_news

    def on_cancel(self, session: int, ballot: Ballot) -> bool:
        """Whether the version may be dropped now (it needn't be: a complete version is voted for without reading it)."""
        if session != self.session or ballot.number <= self.proposal:
            return False
        self._votes.discard(ballot)
        if self._granted == ballot:
            self._granted = None
        return self.may_drop(ballot.version)

    # ---- with the slots

    def verified(self, version: int) -> bool:
        """The version is complete; whether it was voted for (its grant still stands)."""
        self._complete.add(version)
        if self._granted is None or self._granted.version != version:
            return False
        self._votes.add(self._granted)
        return True

    def refuse(self, version: int) -> None:
        """The version's bytes are wrong."""
        self._refused = version

    @property
    def complete(self) -> frozenset[int]:
        """Versions that need no reading."""
        return frozenset(self._complete)

    def may_drop(self, version: int) -> bool:
        """Whether the slot of this version may be refilled: it is not live, and the replica can't switch to it."""
        is_live = self.live is not None and self.live.version == version
        return not is_live and all(ballot.version != version for ballot in self._votes)

    def dropped(self, version: int) -> None:
        """The version's slot is refilled from here on. Raises UsageError if it must be kept."""
        if not self.may_drop(version):
            raise UsageError(f"version {version} is live here or voted for, and can't be dropped")
        self._complete.discard(version)

    def give_up(self) -> None:
        """Not to follow the decision that is not live yet. Only for a rank that is the whole of its replica."""
        self._votes = {vote for vote in self._votes if vote != self.decided}
        self.decided = self.live

    # ---- at a step boundary

    @property
    def proposal(self) -> int:
        """The newest ballot known to be committed; 0 before the first."""
        return 0 if self.decided is None else self.decided.number

    @property
    def ready(self) -> Ballot | None:
        """The newest committed ballot, if it is not live yet."""
        live = -1 if self.live is None else self.live.number
        return self.decided if self.decided is not None and self.decided.number > live else None

    def order(self, number: int) -> int | None:
        """The replica switches to this ballot at this boundary: the version to make live now, None if there is nothing to do.

        A rank that serves another version and does not hold this one is poisoned; one that serves nothing yet stays out.
        """
        if self.live is not None and number <= self.live.number:
            return None
        ballot = next((vote for vote in self._votes if vote.number == number), None)
        if ballot is None:
            if self.live is not None and number:
                self.poison(f"its replica switched to ballot {number}, which this rank never voted for")
            return None
        if number > self.proposal:
            self.decided = ballot
        if self.live is not None and self.live.version == ballot.version:
            self._settle(ballot)
            return None
        return ballot.version

    def switched(self, number: int) -> None:
        """The version of this ballot is live; votes of earlier ones are void. Raises UsageError if `order` did not say so."""
        ballot = next((vote for vote in self._votes if vote.number == number), None)
        if ballot is None or number > self.proposal:
            raise UsageError(f"ballot {number} was not ordered")
        self._settle(ballot)

    def poison(self, reason: str) -> None:
        """This rank serves no step any more: its peers may serve another version. Only a restart helps."""
        self.poisoned = self.poisoned or reason

    def require_clean(self) -> None:
        """Before every step. Raises NotReadyError once poisoned."""
        if self.poisoned is not None:
            raise NotReadyError(
                f"{self.poisoned}; its peers may serve another version, so it serves none; restart it"
            )

    def _settle(self, ballot: Ballot) -> None:
        self.live = ballot
        self._votes = {vote for vote in self._votes if vote.number >= ballot.number}
