"""The wire: golden bytes, and everything that must be refused."""

import re
import typing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ProtocolError
from weightsync.types import Box, MemberReport
from weightsync.wire import messages as m
from weightsync.wire.layout import Boxes, Catalogue, Layout, TensorSpec

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire_format.md"
BOXES = Boxes.of([(0, Box((0, 1), (2, 3)))], 2)
LAYOUT = Layout((TensorSpec("w", "int8", (2, 3)),), {}, BOXES)
GOLDEN = {
    "pull": (m.Pull(7, 3), "83a474797065a450756c6ca565706f636807aa6e657765725f7468616e03"),
    "announce": (
        m.Announce(7, 4, 1, 9),
        "87a474797065a8416e6e6f756e6365a565706f636807a776657273696f6e04a4736c6f7401aa67656e65726174696f6e09"
        "a662616c6c6f7400a9696e5f736861726573c2",
    ),
    "seal": (
        m.Seal(7, 4, b"\x01\x02"),
        "84a474797065a45365616ca565706f636807a776657273696f6e04a764696765737473c4020102",
    ),
    "wants": (
        m.Wants(7, BOXES),
        "83a474797065a557616e7473a565706f636807a5626f7865739402c40400000000c410000000000000000001000000"
        "00000000c41002000000000000000300000000000000",
    ),
    "plan": (
        m.Plan(7, BOXES, b"\0\0\0\0", b"\1\0\0\0", b"\0\0\0\0\0\0\0\1"),
        "86a474797065a4506c616ea565706f636807a5626f7865739402c40400000000c410000000000000000001000000"
        "00000000c41002000000000000000300000000000000a572616e6b73c40400000000a577616e7473c40401000000"
        "a76f666673657473c4080000000000000001",
    ),
    "enlist": (
        m.Enlist(0, 2, "i", "p", "h", 1, 0, 0, 2, LAYOUT, False, held=[(3, 9), (0, 0)], readers=["r"]),
        "de0010a474797065a6456e6c697374a472616e6b00a572616e6b7302a8696e7374616e6365a169a46e616d65a170a4686f7374"
        "a168a370696401aa6c6173745f65706f636800a776657273696f6e00a5736c6f747302a66c61796f757483a774656e736f"
        "72739193a177a4696e7438920203a7616c696173657380a5626f7865739402c40400000000c410000000000000000001"
        "00000000000000c41002000000000000000300000000000000a874616b656f766572c2a6706f6c696379a465616368a572656c6179a46175746f"
        "a468656c6492920309920000a77265616465727391a172",
    ),
    "begin": (
        m.Begin(7, 2, 4, "skip", None, 1.5),
        "87a474797065a5426567696ea565706f636807a77265717565737402a776657273696f6e04a97768656e5f66756c6c"
        "a4736b6970a76d61785f6c6167c0a974696d656f75745f73cb3ff8000000000000",
    ),
    "answer": (
        m.Answer(7, 2, 1, 9),
        "87a474797065a6416e73776572a565706f636807a77265717565737402a4736c6f7401aa67656e65726174696f6e09"
        "a67265706f7274c0a56572726f72c0",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_on_the_wire_do_not_change_by_accident(name):
    message, expected = GOLDEN[name]
    header, payload = m.encode(message)
    assert header == b"WS\x00\x02"
    assert payload.hex() == expected


@pytest.mark.parametrize(
    "message",
    [
        m.Welcome(1, "p", Catalogue(LAYOUT.tensors, {"tied": "w"}), [{"shm": {"socket": "x"}}, {}]),
        m.Stage(1, BOXES, bytes(8), bytes(4)),
        m.Extend(1, 2, 0, 3, 1, bytes(4)),
        m.Answer(1, 2, report=m.Report(0.5, None, None, {"a": MemberReport("shm")})),
        m.Answer(1, 2, error=("UsageError", "no")),
    ],
)
def test_what_a_coordinator_says_survives_the_wire(message):
    assert m.decode_to_member(m.encode(message)) == message


def test_the_schema_number_is_part_of_every_message():
    with pytest.raises(ProtocolError, match="schema 1, this is 2"):
        m.decode_from_member([b"WS\x00\x01", m.encode(m.AskStatus())[1]])


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


def test_every_message_and_its_fields_are_described():
    """`docs/wire_format.md` has a row for each, its fields in order; those with a default are marked."""
    rows = re.findall(r"^\| ([A-Z][A-Za-z, ]+) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    described = {}
    for names, text in rows:
        text = re.sub(r"\([^)]*\)", "", text)
        text = re.split(r"[:;]", text)[0]
        fields = [] if text == "none" else [field.strip() for field in text.split(",")]
        described.update(dict.fromkeys(names.split(", "), fields))
    said = {
        kind.__name__: [
            field.name if field.required else f"{field.name}?" for field in msgspec.structs.fields(kind)
        ]
        for kind in typing.get_args(m.FromMember) + typing.get_args(m.ToMember)
    }
    assert described == said
