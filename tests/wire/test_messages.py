"""The wire: golden bytes, and everything that must be refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ProtocolError
from weightsync.types import Box
from weightsync.wire import messages as m
from weightsync.wire.layout import TensorSpec, lay_out

GOLDEN = {
    "pull": (m.Pull(7, 3), "83a474797065a450756c6ca565706f636807aa6e657765725f7468616e03"),
    "announce": (
        m.Announce(7, 4, 1, 9),
        "85a474797065a8416e6e6f756e6365a565706f636807a776657273696f6e04a4736c6f7401aa67656e65726174696f6e09",
    ),
    "seal": (
        m.Seal(7, 4, b"\x01\x02"),
        "84a474797065a45365616ca565706f636807a776657273696f6e04a764696765737473c4020102",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_on_the_wire_do_not_change_by_accident(name):
    message, expected = GOLDEN[name]
    header, payload = m.encode(message)
    assert header == b"WS\x00\x01"
    assert payload.hex() == expected


def test_a_layout_survives_the_wire():
    layout = lay_out([TensorSpec("w", "bfloat16", (2, 3))], [(0, Box((0, 0), (2, 3)))], {"tied": "w"})
    welcome = m.Welcome(1, "p", layout, {"shm": {"socket": "x"}})
    assert m.decode_to_member(m.encode(welcome)) == welcome


def test_the_schema_number_is_part_of_every_message():
    with pytest.raises(ProtocolError, match="schema 2, this is 1"):
        m.decode_from_member([b"WS\x00\x02", m.encode(m.AskStatus())[1]])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [m.HEADER],
        [m.HEADER, b""],
        [m.HEADER, b"\xc1"],
        [m.HEADER, m.encode(m.Pull(1, 2))[1][:-1]],
        [m.HEADER, m.encode(m.Pull(1, 2))[1] + b"\x00"],
        [m.HEADER, msgspec.msgpack.encode({"type": "Pull", "epoch": "1", "newer_than": 2})],
        [m.HEADER, msgspec.msgpack.encode({"type": "Pull", "epoch": 1, "newer_than": 2, "more": 3})],
        [m.HEADER, msgspec.msgpack.encode({"type": "Nonsense"})],
        [m.HEADER, b"\x91" * 100_000],
        [b"GET / HTTP/1.1", b""],
        [m.HEADER, m.encode(m.AskStatus())[1], b"third"],
    ],
)
def test_what_is_not_a_message_is_a_protocol_error(frames):
    with pytest.raises(ProtocolError):
        m.decode_from_member(frames)


@given(st.lists(st.binary(max_size=200), max_size=3))
def test_random_frames_never_do_worse_than_a_protocol_error(frames):
    for decode in (m.decode_from_member, m.decode_to_member):
        with pytest.raises(ProtocolError):
            decode(frames)
        with pytest.raises(ProtocolError):
            decode([m.HEADER, *frames])
