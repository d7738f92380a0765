"""One question to whoever holds an address, one answer, with a deadline."""

from __future__ import annotations

from typing import Any

import zmq

from weightsync.config import MAX_CONTROL_BYTES, ZMQ_DESCRIPTORS
from weightsync.errors import ConfigError, ProtocolError
from weightsync.segment import check_descriptors
from weightsync.wire import messages as m
from weightsync.wire.address import Address
from weightsync.wire.keys import Keys


def control_socket(context: zmq.Context[Any], address: Address, keys: Keys | None) -> zmq.Socket[Any]:
    """A DEALER connected (in the background) to the control plane of `address`."""
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    socket.linger = 200
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
    socket.setsockopt(zmq.IPV6, ":" in address.host)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if keys:
        keys.protect_client(socket)
    try:
        host = "127.0.0.1" if address.host in ("0.0.0.0", "::") else address.host
        host = f"[{host}]" if ":" in host else host
        socket.connect(f"tcp://{host}:{address.port}" if address.scheme == "tcp" else address.text)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"can't connect to {address.text}: {error.strerror}") from error
    return socket


def ask(
    address: Address, question: m.FromMember, *, keys: Keys | None, timeout_s: float
) -> m.ToMember | None:
    """Send `question`, return the first answer, or None if there is none in time. Raises ProtocolError on garbage."""
    check_descriptors(ZMQ_DESCRIPTORS, f"a question to {address.text}")
    with zmq.Context() as context, control_socket(context, address, keys) as socket:
        socket.send_multipart(m.encode(question))
        if not socket.poll(int(timeout_s * 1000)):
            socket.linger = 0
            return None
        frames = socket.recv_multipart()
        try:
            return m.decode_to_member(frames)
        except ProtocolError as error:
            raise ProtocolError(f"{address.text}: {error}") from error
