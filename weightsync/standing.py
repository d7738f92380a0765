"""What a rank of a replica and the coordinator tell each other about versions under vote. Values only."""

from __future__ import annotations

from dataclasses import dataclass

_VERSION_BITS = 64


def key_of(epoch: int, version: int) -> int:
    """One number for a version of an epoch, in the order of both; here versions are such numbers."""
    return epoch << _VERSION_BITS | version


def of_key(key: int) -> tuple[int, int]:
    """Epoch and version."""
    return key >> _VERSION_BITS, key & (1 << _VERSION_BITS) - 1


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """One attempt to move a whole replica to `version`. A higher number is a later attempt, whatever the version; 0 is
    the version that a rank began with."""

    number: int
    version: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one rank stands. It is the whole truth each time, so a lost or a doubled one does no harm.

    `session`: as admitted by the coordinator; what belongs to another session is ignored on both sides. `live`: what
    serves. `decided`: the newest ballot known to be committed. `votes`: ballots whose versions are verified here and kept
    until they are cancelled or a later one is live. `complete`: versions that need no reading, `live` among them.
    `granted`: the ballot of the newest grant taken up. `refused`: the newest version refused. `has_room`: another
    version could be read now.
    """

    session: int
    live: Ballot | None
    decided: Ballot | None
    votes: frozenset[Ballot]
    complete: frozenset[int]
    granted: int
    refused: int | None
    has_room: bool
