"""With keys, who has none or another gets nothing; who may read may not publish."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
import zmq.utils.z85

import weightsync as ws
from tests import roles
from tests.processes import Peer
from weightsync.errors import AddressInUseError, ConfigError, SyncTimeoutError
from weightsync.wire import messages as m
from weightsync.wire.keys import Keys, add_subscriber, load_publisher_keys, load_subscriber_keys, new_keys
from weightsync.wire.messages import HEADER


@pytest.fixture
def keys(tmp_path: Path) -> str:
    new_keys(tmp_path / "keys")
    return str(tmp_path / "keys")


@pytest.fixture
def other_keys(tmp_path: Path, keys: str) -> str:
    """A folder of a stranger, who knows the publisher's public key, as anyone may."""
    folder = tmp_path / "other"
    new_keys(folder)
    (folder / "publisher.key").write_text((Path(keys) / "publisher.key").read_text())
    return str(folder)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_the_right_keys_work_for_control_and_data(
    peer: Callable[[], Peer], keys: str, transport: str
) -> None:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", keys=keys)
    assert server.call(roles.open_subscriber, address, keys=keys, transport=transport) == transport
    for number, content in ((1, 10), (2, 20)):
        publisher.call(roles.publish, content, members=1)
        assert server.call(roles.await_version, number) == (number, content)
    assert ws.fetch_status(address, keys=keys).version == 2
    publisher.kill()
    successor = peer()
    successor.call(roles.open_publisher, address, keys=keys)
    successor.call(roles.publish, 30, wait="staged", members=1)
    assert server.call(roles.await_content, 30) == (1, 30)


def test_an_address_that_others_can_reach_is_allowed_with_keys(keys: str) -> None:
    with ws.Publisher("tcp://0.0.0.0:0", keys=keys) as publisher:
        port = publisher.address.rpartition(":")[2]
        publisher.register({"w": roles.torch.ones(3)})
        publisher.publish()
        assert ws.pull(f"tcp://127.0.0.1:{port}", keys=keys, transport="zmq", timeout_s=10.0)[0] == 1


def gets_nothing(address: str, keys: Keys | None) -> None:
    questions: list[m.FromMember] = [
        m.AskStatus(), m.AskLayout(), m.Hello("x", "x", "server", "h", 1, "remap", 0), m.TakeOver("x", 2**60),
        m.Hello("x", "x", "server", "h", 1, "remap", 2**60),
    ]  # fmt: skip
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if keys is not None:
            keys.protect_client(socket)
        socket.connect(address)
        for question in questions:
            socket.send_multipart(m.encode(question))
        socket.send_multipart([HEADER, b"noise"])
        assert not socket.poll(1000), socket.recv_multipart()


def test_strangers_get_nothing_not_even_a_layout(
    peer: Callable[[], Peer], keys: str, other_keys: str
) -> None:
    server = peer()
    with ws.Publisher("tcp://127.0.0.1:0", keys=keys) as publisher:
        model = roles.model()
        publisher.register(model)
        server.call(roles.open_subscriber, publisher.address, keys=keys)
        server.call(roles.serve)
        gets_nothing(publisher.address, None)
        gets_nothing(publisher.address, load_subscriber_keys(other_keys))
        for folder in (None, other_keys):
            with pytest.raises(SyncTimeoutError, match="key"):
                ws.Subscriber(publisher.address, roles.model(), keys=folder).start(1.0)
            with pytest.raises(SyncTimeoutError, match="key"):
                ws.fetch_layout(publisher.address, keys=folder, timeout_s=0.5)
        roles.fill(model, 10)
        publisher.publish().wait(
            "live", 10.0
        )  # none of this cost the publisher its epoch, or the server anything
        assert len(publisher.status().members) == 1
        assert server.call(roles.stop_serving)[-1] == (1, 10)


def test_the_data_port_gives_nothing_without_the_right_key(keys: str, other_keys: str) -> None:
    with ws.Publisher("tcp://127.0.0.1:0", keys=keys, transports=["zmq"]) as publisher:
        publisher.register({"w": roles.torch.ones(3)})
        (exporter,) = publisher._exporters
        offer = exporter.export()
        request = roles.probe_request(bytes.fromhex(offer["token"]))  # even with the token
        for folder in (None, other_keys, keys):
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                if folder is not None:
                    load_subscriber_keys(folder).protect_client(socket)
                socket.connect(f"tcp://127.0.0.1:{offer['port']}")
                socket.send(request)
                assert bool(socket.poll(3000 if folder == keys else 500)) == (folder == keys)


def test_a_subscribers_key_can_not_take_over(keys: str) -> None:
    with ws.Publisher("tcp://127.0.0.1:0", keys=keys) as publisher:
        publisher.register({"w": roles.torch.ones(3)})
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            load_subscriber_keys(keys).protect_client(socket)
            socket.connect(publisher.address)
            socket.send_multipart(m.encode(m.TakeOver("thief", publisher.epoch + 1)))
            socket.send_multipart(m.encode(m.AskStatus()))
            assert socket.poll(3000)
            assert isinstance(m.decode_to_member(socket.recv_multipart()), m.Status)
        assert publisher.publish().version == 1
        with pytest.raises(AddressInUseError, match="alive there"):
            ws.Publisher(publisher.address, keys=keys)
        with ws.Publisher(publisher.address, keys=keys, takeover=True) as second:
            assert second.epoch > publisher.epoch


def test_a_withdrawn_subscriber_is_refused_by_the_next_publisher(keys: str) -> None:
    add_subscriber(keys, "guest")
    guest = load_subscriber_keys(keys, "guest")
    assert guest.public in load_publisher_keys(keys).allowed
    (Path(keys) / "guest.key").unlink()
    with ws.Publisher("tcp://127.0.0.1:0", keys=keys) as publisher:
        publisher.register({"w": roles.torch.ones(3)})
        gets_nothing(publisher.address, guest)


@pytest.mark.parametrize("side", ["publisher", "subscriber"])
def test_a_secret_that_others_can_read_is_refused(keys: str, side: str) -> None:
    path = Path(keys) / f"{side}.key_secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for mode in (0o640, 0o604, 0o660):
        os.chmod(path, mode)
        with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
            if side == "publisher":
                ws.Publisher("tcp://127.0.0.1:0", keys=keys)
            else:
                ws.Subscriber("tcp://127.0.0.1:1", roles.model(), keys=keys)


def test_missing_and_broken_keys_name_the_file(keys: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weightsync keys new"):
        ws.Publisher("tcp://127.0.0.1:0", keys=tmp_path / "nowhere")
    secret = Path(keys) / "publisher.key_secret"
    secret.write_text("not a key")
    with pytest.raises(ConfigError, match=r"publisher\.key_secret"):
        ws.Publisher("tcp://127.0.0.1:0", keys=keys)
    with pytest.raises(ConfigError, match="exists already"):
        new_keys(keys)
