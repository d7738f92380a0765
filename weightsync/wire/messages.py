"""Every message of the control plane: strict, length-capped msgpack structs, no pickle.

A message travels as two frames: the header (`WS` and the schema number) and the payload. `docs/wire_format.md`
describes them for other languages. Order of a normal life:

    member                                publisher
    1. Hello            ─────────────▶
    2.                  ◀─────────────    Welcome (epoch, layout, data paths)
    3. Pull(newer_than) ─────────────▶    kept until there is something newer
    4.                  ◀─────────────    Announce (slot, generation): the slot is leased to the member
    5.                  ◀─────────────    Seal (digests), or Abort
    6. Verified, Live   ─────────────▶    leases end with Verified (or with Release, when the slot itself is live)
"""

from __future__ import annotations

import msgspec

from weightsync.config import WIRE_SCHEMA
from weightsync.errors import ProtocolError
from weightsync.types import FleetStatus
from weightsync.wire.layout import Layout

HEADER = b"WS" + WIRE_SCHEMA.to_bytes(2, "big")


class _Message(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class Hello(_Message):
    """A member presents itself. `instance` tells a reconnect from a second process; `last_epoch` fences zombies.
    `holds`: versions of that epoch whose slots serve there, or may any moment, all others are let go; None: slots never
    serve there, they are only read."""

    name: str
    instance: str
    role: str
    host: str
    pid: int
    swap: str
    last_epoch: int
    holds: list[int] | None = None


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
    """The version's digests match. `holds_lease`: the slot itself will serve, so the lease goes on."""

    epoch: int
    version: int
    read_s: float
    transport: str
    holds_lease: bool


class Live(_Message):
    epoch: int
    version: int
    pause_s: float


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


class AskStatus(_Message):
    pass


class AskLayout(_Message):
    pass


class TakeOver(_Message):
    """A new publisher wants the address; the old one must stop publishing and free it."""

    publisher: str
    epoch: int


class Welcome(_Message):
    """`offers` maps each data transport's name to what its reader needs to connect."""

    epoch: int
    publisher: str
    layout: Layout
    offers: dict[str, dict[str, str]]


class Announce(_Message):
    """The slot now being staged (or sealed already) holds `version`; it is leased to the receiver of this message."""

    epoch: int
    version: int
    slot: int
    generation: int


class Seal(_Message):
    """`digests`: one little-endian u64 for each shard of the layout, in layout order."""

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


FromMember = (
    Hello | Heartbeat | Pull | Verified | Live | Release | Failed | Bye | AskStatus | AskLayout | TakeOver
)
ToMember = Welcome | Announce | Seal | Abort | Pong | Unknown | Refused | Farewell | Status

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
