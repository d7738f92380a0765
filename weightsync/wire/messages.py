"""Every message of the control plane: strict, length-capped msgpack structs, no pickle.

A message travels as two frames: the header (`WS` and the schema number) and the payload. `docs/wire_format.md`
describes them for other languages. Order of a normal life:

    publisher rank                        coordinator                         member
    1. Enlist (layout)  ─────────────▶
    2.                  ◀─────────────    Stage (which cells, where)
    3. Offers           ─────────────▶                       ◀─────────────   Hello
    4.                                    Welcome (catalogue, data paths) ──▶
    5.                                                       ◀─────────────   Wants (boxes)
    6.                                    Plan (cells that bring them)   ───▶
    7.                                                       ◀─────────────   Pull(newer_than), kept until there is one
    8. Begin(version)   ─────────────▶
    9.                  ◀─────────────    Answer (slot)      Announce (slot: leased to the member) ─▶
    10. Sealed          ─────────────▶    when all ranks have:        Seal (digests), or Abort ────▶
    11.                                                      ◀─────────────   Verified, Live

A lease ends with Verified (or with Release, when the slot itself is live). A Plan holds for the Announces after it.
"""

from __future__ import annotations

import msgspec

from weightsync.config import WIRE_SCHEMA
from weightsync.errors import ProtocolError
from weightsync.types import FleetStatus, MemberReport
from weightsync.wire.layout import Boxes, Catalogue, Layout

HEADER = b"WS" + WIRE_SCHEMA.to_bytes(2, "big")


class _Message(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


VersionOf = tuple[int, int]
BallotOf = tuple[int, int, int]


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """What is known of one version; times in seconds since its first rank began."""

    stage_s: float | None
    ready_s: float | None
    live_s: float | None
    members: dict[str, MemberReport]


class Hello(_Message):
    """A member presents itself. `instance` tells a reconnect from a second process; `last_epoch` fences zombies.
    `holds`: versions of that epoch whose slots serve there, or may any moment, all others are let go; None: slots never
    serve there, they are only read. `rank` of `ranks` of a `replica`: those switch together; None: one of its own."""

    name: str
    instance: str
    role: str
    host: str
    pid: int
    swap: str
    last_epoch: int
    holds: list[int] | None = None
    replica: str | None = None
    rank: int = 0
    ranks: int = 1


class Heartbeat(_Message):
    epoch: int
    live_version: int | None
    state: str
    transport: str


class Pull(_Message):
    """A standing wish for the newest version above `newer_than`."""

    epoch: int
    newer_than: int


class Verified(_Message):
    """The version's digests match. `holds_lease`: the slot itself will serve, so the lease goes on. `slot`, `generation`:
    where others can read it, see Serve (-1: nowhere). `relayed_bytes`: how much came from other members."""

    epoch: int
    version: int
    read_s: float
    transport: str
    holds_lease: bool
    slot: int = -1
    generation: int = 0
    relayed_bytes: int = 0


class Live(_Message):
    epoch: int
    version: int
    pause_s: float


class Serve(_Message):
    """The member's own slots can be read by others that want the same boxes: `offers` as of a rank, `offsets` u64: where in
    a slot each wanted box lies, dense."""

    epoch: int
    offers: dict[str, dict[str, str]]
    offsets: bytes


class Fetched(_Message):
    """The wants from `first` to `stop` are verified, in this slot of the member's own."""

    epoch: int
    version: int
    first: int
    stop: int
    slot: int
    generation: int


class Unfetched(_Message):
    """The share could not be had from peer `source`: it died, or its slot holds something else by now."""

    epoch: int
    version: int
    first: int
    stop: int
    source: int
    error: str


class Release(_Message):
    """The member no longer reads or serves from this version's slot."""

    epoch: int
    version: int


class Failed(_Message):
    """The member refused the version; its lease is over."""

    epoch: int
    version: int
    error: str


class Bye(_Message):
    epoch: int


class Stand(_Message):
    """Where a rank of a replica stands, the whole truth each time; see `weightsync.standing.Standing`. A version is
    (epoch, version), a ballot (number, epoch, version)."""

    epoch: int
    session: int
    live: BallotOf | None
    decided: BallotOf | None
    votes: list[BallotOf]
    complete: list[VersionOf]
    granted: int
    refused: VersionOf | None
    has_room: bool


class AskStatus(_Message):
    pass


class AskLayout(_Message):
    pass


class TakeOver(_Message):
    """A new publisher wants the address; the old one must stop publishing and free it."""

    publisher: str
    epoch: int


class Wants(_Message):
    """The boxes of the catalogue's tensors that the member wants, one for each place it will write."""

    epoch: int
    boxes: Boxes


class Enlist(_Message):
    """Rank `rank` of `ranks` of a publisher presents itself and what it holds. `version`: the newest it has published.
    `last_epoch`: the one it follows, which a coordinator of its own process takes up; 0: none yet. `takeover`: another
    process that holds this rank is replaced, even if it lives. `held`: for each slot its version (0: none) and generation.
    `readers`: instances of members that may have mapped the slots."""

    rank: int
    ranks: int
    instance: str
    name: str
    host: str
    pid: int
    last_epoch: int
    version: int
    slots: int
    layout: Layout
    takeover: bool
    policy: str = "each"
    relay: str = "auto"
    held: list[tuple[int, int]] = []
    readers: list[str] = []


class Offers(_Message):
    """The rank's slots are there. `offers` maps each data transport's name to what its reader needs to connect."""

    epoch: int
    offers: dict[str, dict[str, str]]


class Beat(_Message):
    """A rank lives."""

    epoch: int


class Begin(_Message):
    """A rank wants to stage `version`; answered when a slot is free (`when_full`: wait, skip or evict)."""

    epoch: int
    request: int
    version: int
    when_full: str
    max_lag: int | None
    timeout_s: float


class Sealed(_Message):
    """The rank's part of `version` is complete. `digests`: one little-endian u64 for each of its cells."""

    epoch: int
    version: int
    digests: bytes


class Extended(_Message):
    """Cells that were asked for later are in the slot of `version` too; `digests` is of all its cells."""

    epoch: int
    version: int
    digests: bytes


class Aborted(_Message):
    """The rank could not stage `version`."""

    epoch: int
    version: int
    reason: str


class MemberGone(_Message):
    """The process behind a member's `instance` has ended, as the rank's data path saw."""

    epoch: int
    instance: str


class AwaitMembers(_Message):
    epoch: int
    request: int
    count: int
    timeout_s: float


class AwaitStage(_Message):
    """Answered when every member that was there when `version` began is `ready` or `live` with it."""

    epoch: int
    request: int
    version: int
    stage: str
    timeout_s: float


class AskReport(_Message):
    epoch: int
    request: int
    version: int


class Promote(_Message):
    """With the policies canary and manual: every replica may go to this version."""

    epoch: int
    request: int
    version: int


class Rollback(_Message):
    """The version is bad; the fleet goes back."""

    epoch: int
    request: int
    version: int


class Welcome(_Message):
    """`offers`: for each rank, from each data transport's name to what its reader needs to connect. `session`: under
    which the member's votes are counted; 0: it needs none, and makes live what it has verified. `may_serve`: others could
    read from this member, see Serve."""

    epoch: int
    publisher: str
    catalogue: Catalogue
    offers: list[dict[str, dict[str, str]]]
    session: int = 0
    may_serve: bool = False


class Plan(_Message):
    """What to read, for every Announce after this: `boxes` in the order of the digests of a Seal, with the columns
    `ranks` u32, `wants` u32 (number of the wanted box) and `offsets` u64 (byte in that rank's slot), little-endian."""

    epoch: int
    boxes: Boxes
    ranks: bytes
    wants: bytes
    offsets: bytes


class NoPlan(_Message):
    """What the member wants can't be had."""

    epoch: int
    reason: str


class Stage(_Message):
    """What the rank stages from now on: `boxes` in slot order with the columns `offsets` u64 and `parents` u32 (number of
    the rank's shard that holds the box). Only ever grows at its end while a version is held."""

    epoch: int
    boxes: Boxes
    offsets: bytes
    parents: bytes


class Extend(_Message):
    """Fill the cells that came after `version` was sealed, out of its own slot. `origins` u32: for the cells from
    `first` on, the number of the cell that holds each."""

    epoch: int
    version: int
    slot: int
    generation: int
    first: int
    origins: bytes


class Enlisted(_Message):
    """`version`: the newest this epoch knows."""

    epoch: int
    version: int


class Answer(_Message):
    """To the request of this number: a result, or the name of an error class of `weightsync.errors` and its text."""

    epoch: int
    request: int
    slot: int = -1
    generation: int = 0
    report: Report | None = None
    error: tuple[str, str] | None = None


class Announce(_Message):
    """The slot now being staged (or sealed already) holds `version`; it is leased to the receiver of this message.
    `ballot`: what it may vote for once it is verified; 0: no vote is needed. `in_shares`: do not read it as a whole, each
    Fetch says what to read from where."""

    epoch: int
    version: int
    slot: int
    generation: int
    ballot: int = 0
    in_shares: bool = False


class Peer(_Message):
    """Another member that wants the same boxes, and can be read from: see Serve."""

    epoch: int
    number: int
    name: str
    offers: dict[str, dict[str, str]]
    offsets: bytes


class PeerGone(_Message):
    """Nobody can read from the peer of this number any more."""

    epoch: int
    number: int


class Fetch(_Message):
    """Read the wants from `first` to `stop` of the announced version from peer `source`, out of this slot of its; -1: from
    the publisher. A later one for the same share replaces it."""

    epoch: int
    version: int
    first: int
    stop: int
    source: int
    slot: int
    generation: int


class Grant(_Message):
    """The member, which holds the version already, may vote for the ballot."""

    epoch: int
    session: int
    ballot: BallotOf


class Commit(_Message):
    """All ranks of the replica voted for the ballot: the next step boundary may switch."""

    epoch: int
    session: int
    ballot: BallotOf


class Cancel(_Message):
    """The ballot will never be committed."""

    epoch: int
    session: int
    ballot: BallotOf


class Admit(_Message):
    """The member's votes count under another session from now on."""

    epoch: int
    session: int


class Undo(_Message):
    """The version is bad: a member that serves it goes back to the one before, and nobody makes it live any more."""

    epoch: int
    version: int


class Seal(_Message):
    """`digests`: one little-endian u64 for each move of the member's plan, in its order."""

    epoch: int
    version: int
    digests: bytes


class Abort(_Message):
    """The version will not exist, or the slot was taken back; the lease is over."""

    epoch: int
    version: int
    reason: str


class Pong(_Message):
    epoch: int
    version: int


class Unknown(_Message):
    """The publisher does not know this member (it restarted, say): say Hello again."""

    epoch: int


class Refused(_Message):
    epoch: int
    reason: str


class Farewell(_Message):
    """The publisher leaves; members keep serving and wait for the next epoch."""

    epoch: int
    reason: str


class Status(_Message):
    status: FleetStatus


FromRank = (
    Enlist
    | Offers
    | Beat
    | Begin
    | Sealed
    | Extended
    | Aborted
    | MemberGone
    | AwaitMembers
    | AwaitStage
    | AskReport
    | Promote
    | Rollback
)
Question = Begin | AwaitMembers | AwaitStage | AskReport | Promote | Rollback
"""What a rank is answered."""
FromMember = (
    Hello | Heartbeat | Stand | Wants | Pull | Serve | Fetched | Unfetched | Verified | Live | Release | Failed | Bye
    | AskStatus | AskLayout | TakeOver
    | FromRank
)  # fmt: skip
Known = (
    Heartbeat | Stand | Wants | Pull | Serve | Fetched | Unfetched | Verified | Live | Release | Failed | Bye | Offers | Beat
    | Begin | Sealed | Extended
    | Aborted | MemberGone | AwaitMembers | AwaitStage | AskReport | Promote | Rollback
)  # fmt: skip
"""From those who have introduced themselves."""
ToRank = Enlisted | Stage | Extend | Answer
ToMember = (
    Welcome
    | Plan
    | NoPlan
    | Announce
    | Peer
    | PeerGone
    | Fetch
    | Seal
    | Abort
    | Grant
    | Commit
    | Cancel
    | Admit
    | Undo
    | Pong
    | Unknown
    | Refused
    | Farewell
    | Status
    | ToRank
)

_encoder = msgspec.msgpack.Encoder()
_from_member: msgspec.msgpack.Decoder[FromMember] = msgspec.msgpack.Decoder(FromMember)
_to_member: msgspec.msgpack.Decoder[ToMember] = msgspec.msgpack.Decoder(ToMember)


def encode(message: FromMember | ToMember) -> list[bytes]:
    """The two frames of a message."""
    return [HEADER, _encoder.encode(message)]


def _payload(frames: list[bytes]) -> bytes:
    if len(frames) != 2:
        raise ProtocolError(f"expected 2 frames, got {len(frames)}")
    header, payload = frames
    if header[:2] != b"WS" or len(header) != 4:
        raise ProtocolError(f"not a weightsync message: header {header[:16]!r}")
    if header != HEADER:
        schema = int.from_bytes(header[2:], "big")
        raise ProtocolError(
            f"peer speaks wire schema {schema}, this is {WIRE_SCHEMA}; install the same release on both"
        )
    return payload


def decode_from_member(frames: list[bytes]) -> FromMember:
    """What a member sent. Raises ProtocolError."""
    try:
        return _from_member.decode(_payload(frames))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error


def decode_to_member(frames: list[bytes]) -> ToMember:
    """What the coordinator sent. Raises ProtocolError."""
    try:
        return _to_member.decode(_payload(frames))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
