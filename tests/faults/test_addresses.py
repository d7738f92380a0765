"""An address held by something else, and addresses that can't work, are errors that say so."""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from collections.abc import Callable, Iterator

import pytest
import zmq

import weightsync as ws
from tests import roles
from weightsync.errors import AddressInUseError, ConfigError, SyncTimeoutError


@contextlib.contextmanager
def tcp_listener(answer: bytes | None) -> Iterator[int]:
    """Something that accepts connections, and answers each with `answer` (None: never)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept: list[socket.socket] = []

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    kept.append(peer)
                    if answer is not None:
                        peer.sendall(answer)
                        peer.close()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10.0)
            for peer in kept:
                peer.close()


@contextlib.contextmanager
def zmq_echo() -> Iterator[int]:
    """Another ZeroMQ program: it returns whatever it gets, or something that looks like a message."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        over = threading.Event()

        def run() -> None:
            while not over.is_set():
                if router.poll(20):
                    router.send_multipart([router.recv_multipart()[0], b"hello", b"world"])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield port
        finally:
            over.set()
            thread.join(10.0)


HOLDERS: dict[str, Callable[[], contextlib.AbstractContextManager[int]]] = {
    "one that never answers": lambda: tcp_listener(None),
    "a web server": lambda: tcp_listener(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
    "another ZeroMQ program": zmq_echo,
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("takeover", [False, True])
def test_a_port_held_by_something_else_is_named_in_the_error(holder: str, takeover: bool) -> None:
    with HOLDERS[holder]() as port, pytest.raises(AddressInUseError, match=f"{port}.*choose another"):
        ws.Publisher(f"tcp://127.0.0.1:{port}", takeover=takeover)


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_subscriber_of_something_else_times_out_with_a_reason(holder: str) -> None:
    with HOLDERS[holder]() as port:
        subscriber = ws.Subscriber(f"tcp://127.0.0.1:{port}", roles.model())
        with pytest.raises(SyncTimeoutError, match=str(port)):
            subscriber.start(1.5)


def test_an_address_is_free_again_after_close(tmp_path: object) -> None:
    for address in (f"ipc://{tmp_path}/s", f"ipc://@{uuid.uuid4().hex}"):
        for _ in range(10):
            with ws.Publisher(address) as publisher:
                assert ws.fetch_status(address).epoch == publisher.epoch


@pytest.mark.parametrize(
    "address",
    ["", "tcp://", "tcp://host", "tcp://:1", "tcp://127.0.0.1:99999", "ipc://", "http://a:1", "inproc://x"],
)
def test_an_address_that_is_none_shows_the_forms(address: str) -> None:
    with pytest.raises(ConfigError, match="tcp://host:port"):
        ws.Publisher(address)


def test_an_address_that_can_not_be_bound_is_an_error() -> None:
    for address in ("ipc:///nowhere/at/all", "tcp://192.0.2.1:7077"):
        with pytest.raises(ConfigError, match="can't bind"):
            ws.Publisher(address, insecure=True)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://192.0.2.1:7077"])
def test_other_hosts_may_not_reach_an_address_without_keys(address: str) -> None:
    with pytest.raises(ConfigError, match="keys"):
        ws.Publisher(address)


def test_a_remote_publisher_is_not_read_without_keys() -> None:
    with pytest.raises(ConfigError, match="keys"):
        ws.Subscriber("tcp://192.0.2.1:7077", roles.model())
    with pytest.raises(ConfigError, match="keys"):
        ws.fetch_status("tcp://192.0.2.1:7077")
