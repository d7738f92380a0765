"""Bytes of strangers on either port neither crash nor block anyone: publishing goes on meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

import weightsync as ws
from tests import roles
from tests.processes import Peer
from weightsync.errors import WeightSyncError
from weightsync.wire import fleet as fleet_state
from weightsync.wire import messages as m
from weightsync.wire.messages import HEADER

ROUNDS = 5
pack = msgspec.msgpack.encode


@pytest.fixture(params=["zmq"])
def fleet(
    request: pytest.FixtureRequest, peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ws.Publisher, str]]:
    """A publisher with a server that serves all the time; both must be as well as before when the test ends."""
    monkeypatch.setattr(fleet_state, "MEMBER_TIMEOUT_S", 2.0)
    server = peer()
    with ws.Publisher("tcp://127.0.0.1:0") as publisher:
        model = roles.model()
        publisher.register(model)
        server.call(roles.open_subscriber, publisher.address, transport=request.param, name="healthy")
        server.call(roles.serve)
        roles.fill(model, 1)
        publisher.publish(wait="live")
        yield publisher, publisher.address
        for content in range(2, 2 + ROUNDS):  # whatever the test published was content 1
            roles.fill(model, content)
            publisher.publish().wait("live", 15.0)
        seen = server.call(roles.stop_serving)
        assert seen[-1] == (publisher.version, 1 + ROUNDS)
        assert server.call(roles.counts)[2] == 0
        assert "healthy" in [member.name for member in publisher.status().members]


def port_of(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def data_port(address: str) -> tuple[int, bytes]:
    """Port and token of the zmq data path, which any member is told."""
    with zmq.Context() as context, roles.dealer(context, address) as socket_:
        hello = m.Hello("spy", "spy", "pull", "host", 1, "remap", 0)
        socket_.send_multipart(m.encode(hello))
        assert socket_.poll(5000)
        welcome = m.decode_to_member(socket_.recv_multipart())
        assert isinstance(welcome, m.Welcome)
        socket_.send_multipart(m.encode(m.Bye(welcome.epoch)))
        assert ws.fetch_status(address)  # the goodbye was heard before this was answered
        socket_.linger = 1000
    offer = welcome.offers[0]["zmq"]
    return int(offer["port"]), bytes.fromhex(offer["token"])


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
RAW: dict[str, bytes] = {
    "nothing at all": b"",
    "noise": os.urandom(4096),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a greeting": GREETING[:20],
    "a greeting and noise": GREETING + os.urandom(512),
    "a long frame that is announced and never comes": GREETING
    + READY
    + b"\x02"
    + struct.pack(">Q", 100 << 20),
    "a frame of 2^63 bytes": GREETING + READY + b"\x02" + struct.pack(">Q", 1 << 63),
    "commands for ever": GREETING + READY + b"\x04\x05\x04PING" * 500,
    "empty frames": GREETING + READY + b"\x00\x00" * 500,
}


@pytest.mark.parametrize("port", ["control", "data"])
def test_raw_bytes_are_survived(fleet: tuple[ws.Publisher, str], port: str) -> None:
    publisher, address = fleet
    host, number = port_of(address)
    number = number if port == "control" else data_port(address)[0]
    with contextlib.ExitStack() as open_ones:
        for payload in RAW.values():
            for _ in range(3):
                stranger = open_ones.enter_context(socket.create_connection((host, number), 5.0))
                with contextlib.suppress(OSError):  # it may hang up in the middle, as it should
                    stranger.sendall(payload)
        publisher.publish().wait("live", 15.0)  # while all of them are connected


def hello(**changes: object) -> bytes:
    good = {
        "type": "Hello",
        "name": "x",
        "instance": "x",
        "role": "server",
        "host": "h",
        "pid": 1,
        "swap": "remap",
    }
    return pack({**good, "last_epoch": 0, **changes})


BAD: dict[str, list[bytes]] = {
    "no frame": [b""],
    "noise": [os.urandom(300)],
    "noise behind a header": [HEADER, os.urandom(300)],
    "no payload": [HEADER],
    "an empty payload": [HEADER, b""],
    "three frames": [HEADER, hello(), b"x"],
    "a thousand frames": [HEADER] * 1000,
    "a truncated message": [HEADER, hello()[:-5]],
    "bytes behind a message": [HEADER, hello() + b"x"],
    "another schema": [b"WS\x00\x63", hello()],
    "a short header": [b"WS", hello()],
    "another magic": [b"SW\x00\x01", hello()],
    "an unknown tag": [HEADER, pack({"type": "Reboot", "epoch": 1})],
    "a tag that is a number": [HEADER, pack({"type": 7})],
    "a message of the other direction": [
        HEADER,
        pack({"type": "Abort", "epoch": 1, "version": 1, "reason": "x"}),
    ],
    "no tag": [HEADER, pack({"epoch": 1})],
    "an array": [HEADER, pack(["Hello"])],
    "an unknown field": [HEADER, hello(admin=True)],
    "a missing field": [HEADER, pack({"type": "Pull", "epoch": 1})],
    "a wrong type": [HEADER, hello(pid="one")],
    "a bad string": [HEADER, b"\x81\xa4type\xa5\xff\xfe\xfd\xfc\xfb"],
    "an integer beyond 64 bits": [
        HEADER,
        b"\x82\xa4type\xa3Bye\xa5epoch\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",
    ],
    "deep arrays": [HEADER, b"\x91" * 100_000],
    "deep maps": [HEADER, b"\x81\xa1a" * 100_000],
    "deep in a field": [HEADER, b"\x81\xa4type" + b"\x91" * 100_000],
    "a map of four billion": [HEADER, b"\xdf\xff\xff\xff\xff"],
    "a string of four gigabytes": [HEADER, b"\x81\xa4type\xdb\xff\xff\xff\xff"],
    "a pickle": [HEADER, b"cposix\nsystem\n(S'kill -9 $PPID'\ntR."],
    "huge numbers": [HEADER, pack({"type": "Pull", "epoch": 0, "newer_than": 2**63 - 1})],
}


def test_a_message_that_is_none_is_refused_and_changes_nothing(fleet: tuple[ws.Publisher, str]) -> None:
    publisher, address = fleet
    with zmq.Context() as context, roles.dealer(context, address) as stranger:
        for name, frames in BAD.items():
            stranger.send_multipart(frames)
            assert stranger.poll(5000), f"no answer to {name}"
            answer = m.decode_to_member(stranger.recv_multipart())
            assert isinstance(answer, m.Refused | m.Unknown), name
        assert len(publisher.status().members) == 1


def test_an_oversized_frame_ends_its_own_connection_only(fleet: tuple[ws.Publisher, str]) -> None:
    publisher, address = fleet
    with zmq.Context() as context, roles.dealer(context, address) as stranger:
        stranger.send_multipart([HEADER, bytes(100 << 20)])
        publisher.publish().wait("live", 15.0)
        assert not stranger.poll(500)


def test_messages_of_an_older_epoch_and_of_other_members_change_nothing(
    fleet: tuple[ws.Publisher, str],
) -> None:
    publisher, address = fleet
    epoch = publisher.epoch
    replayed: list[m.FromMember] = [
        m.Heartbeat(epoch - 1, 99, "serving", "shm"), m.Pull(epoch - 1, 0), m.Verified(epoch - 1, 1, 0.0, "shm", True),
        m.Live(epoch - 1, 99, 0.0), m.Release(epoch - 1, 1), m.Failed(epoch - 1, 1, "no"), m.Bye(epoch - 1),
        # of this epoch, but by one who never said hello:
        m.Pull(epoch, 0), m.Verified(epoch, 1, 0.0, "shm", True), m.Release(epoch, 1), m.Failed(epoch, 1, "no"),
    ]  # fmt: skip
    with zmq.Context() as context, roles.dealer(context, address) as stranger:
        for message in replayed:
            stranger.send_multipart(m.encode(message))
        publisher.publish().wait("live", 15.0)
        (healthy,) = publisher.status().members
        assert healthy.error is None
        assert healthy.live_version == publisher.version


def test_thousands_of_hellos_leave_room_for_those_who_serve(fleet: tuple[ws.Publisher, str]) -> None:
    publisher, address = fleet
    with zmq.Context() as context, roles.dealer(context, address) as stranger:
        stranger.sndhwm = 100_000
        for number in range(3000):
            stranger.send_multipart([HEADER, hello(instance=f"{number}", name=f"{number}")])
            stranger.send_multipart(m.encode(m.Pull(publisher.epoch, 0)))  # and takes a lease
        for _ in range(3):
            publisher.publish(timeout_s=15.0).wait("live", 15.0)


def test_hundreds_of_connections_that_pretend_to_be_members_are_forgotten(
    fleet: tuple[ws.Publisher, str],
) -> None:
    publisher, address = fleet
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        context.set(zmq.MAX_SOCKETS, 2000)
        for number in range(300):
            stranger = stack.enter_context(roles.dealer(context, address))
            stranger.send_multipart([HEADER, hello(instance=f"{number}", name="healthy")])
            stranger.send_multipart(m.encode(m.Pull(publisher.epoch, 0)))
        for _ in range(3):
            publisher.publish(timeout_s=15.0).wait("live", 15.0)


def test_strange_requests_on_the_data_port_get_nothing(fleet: tuple[ws.Publisher, str]) -> None:
    _, address = fleet
    port, token = data_port(address)
    request = struct.Struct("<16sQQIIQQ")
    huge = 2**64 - 1
    silent = [
        [b""], [os.urandom(56)], [os.urandom(55)], [b"a", b"b"], [request.pack(os.urandom(16), 1, 1, 0, 0, 0, 64)],
        [request.pack(token, 1, 1, 0, 0, 0, 64), b"more"], [b"x"] * 100,
        [request.pack(token, 9, 10**9, 0, 0, 0, 64)],  # of a use of the slot that may come yet
    ]  # fmt: skip
    answered = [
        request.pack(token, 1, 1, 99, 0, 0, 64), request.pack(token, 2, 0, 0, 0, 0, 64),
        request.pack(token, 3, 1, 0, 0, huge, huge), request.pack(token, 4, 1, 0, 0, 0, huge),
        request.pack(token, 5, 1, 0, 77, huge, 0), request.pack(token, 6, 1, 2**32 - 1, 0, 0, 0),
    ]  # fmt: skip
    with zmq.Context() as context, roles.dealer(context, f"tcp://127.0.0.1:{port}") as stranger:
        for frames in silent:
            stranger.send_multipart(frames)
        for frames_ in answered:
            stranger.send(frames_)
        for serial in range(1, 7):
            assert stranger.poll(5000), serial
            head, body = stranger.recv_multipart()
            got, status, _ = struct.unpack("<QII", head)
            assert (got, len(body)) == (serial, 0)
            assert status in (1, 2)
        assert not stranger.poll(100)


def test_a_flood_of_questions_does_not_keep_the_publisher_from_publishing(
    fleet: tuple[ws.Publisher, str],
) -> None:
    publisher, address = fleet
    over = threading.Event()

    def flood() -> None:
        with zmq.Context() as context, roles.dealer(context, address) as stranger:
            stranger.rcvhwm = 100
            while not over.is_set():
                with contextlib.suppress(zmq.Again):
                    stranger.send_multipart(m.encode(m.AskLayout()), zmq.NOBLOCK)
                    stranger.send_multipart([HEADER, os.urandom(64)], zmq.NOBLOCK)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for _ in range(10):
            publisher.publish(timeout_s=15.0).wait("live", 15.0)
    finally:
        over.set()
        thread.join(10.0)


def test_a_publisher_that_lies_is_refused_by_the_server() -> None:
    """Garbage from the other side: an impossible layout ends in an error with a name, never in a read beyond memory."""
    lies = [
        {"tensors": [["w", "complex9", [4]]], "aliases": {}},
        {"tensors": [["w", "float32", [-4]]], "aliases": {}},
        {"tensors": [["w", "float32", [4]], ["w", "float32", [4]]], "aliases": {}},
        {"tensors": [["w", "float32", [1] * 9]], "aliases": {}},
    ]
    for layout in lies:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as liar:
            port = liar.bind_to_random_port("tcp://127.0.0.1")
            over = threading.Event()

            def lie(
                liar: zmq.Socket[bytes] = liar, over: threading.Event = over, layout: object = layout
            ) -> None:
                welcome = {
                    "type": "Welcome",
                    "epoch": 5,
                    "publisher": "liar",
                    "catalogue": layout,
                    "offers": [],
                }
                while not over.is_set():
                    if liar.poll(10):
                        route = liar.recv_multipart()[0]
                        liar.send_multipart([route, HEADER, pack(welcome)])

            thread = threading.Thread(target=lie)
            thread.start()
            model = {"w": roles.torch.ones(4)}
            subscriber = ws.Subscriber(f"tcp://127.0.0.1:{port}", model, initial_version=0)
            with pytest.raises(WeightSyncError):
                subscriber.start(5.0)
            over.set()
            thread.join(10.0)
            liar.linger = 0
            assert model["w"].tolist() == [1, 1, 1, 1]
