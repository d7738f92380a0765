"""Shared memory goes to processes of the same user that know the token, and to nobody else."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable

import pytest

import weightsync as ws
from tests import roles
from tests.processes import Peer
from weightsync.errors import WeightSyncError

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")


@as_root
def test_another_user_falls_back_to_tcp_in_auto_and_fails_by_name_else(peer: Callable[[], Peer]) -> None:
    publisher, stranger = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    stranger.call(roles.become_another_user)
    for swap, transport in (("remap", "shm"), ("adopt", "auto")):
        with pytest.raises(WeightSyncError, match=r"another user|refused to hand over"):
            stranger.call(roles.open_subscriber, address, swap=swap, transport=transport, start_s=5.0)
    assert stranger.call(roles.open_subscriber, address, transport="auto") == "zmq"
    publisher.call(roles.publish, 10, members=1)
    assert stranger.call(roles.await_version, 1) == (1, 10)


@as_root
def test_another_users_process_gets_no_handle_even_with_the_token(peer: Callable[[], Peer]) -> None:
    stranger = peer()
    stranger.call(roles.become_another_user)
    with ws.Publisher("tcp://127.0.0.1:0", transports=["shm"]) as publisher:
        publisher.register({"w": roles.torch.ones(3)})
        (exporter,) = publisher._exporters
        offer = exporter.export()
        assert stranger.call(roles.ask_for_handles, offer["socket"], offer["token"]) == 0
        assert roles.ask_for_handles(None, offer["socket"], offer["token"]) == 3  # the header and two slots


def test_a_wrong_token_gets_no_handle_and_silence_costs_nothing(peer: Callable[[], Peer]) -> None:
    server = peer()
    with ws.Publisher("tcp://127.0.0.1:0") as publisher:
        model = roles.model()
        publisher.register(model)
        exporter = publisher._exporters[0]
        offer = exporter.export()
        assert roles.ask_for_handles(None, offer["socket"], secrets.token_hex(16)) == 0
        silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(50)]
        for one in silent:
            one.connect("\0" + offer["socket"])
        assert server.call(roles.open_subscriber, publisher.address, transport="shm") == "shm"
        roles.fill(model, 10)
        publisher.publish().wait("ready", 10.0)
        assert server.call(roles.await_version, 1) == (1, 10)
        for one in silent:
            one.close()


def test_a_server_can_not_write_to_the_publishers_memory(peer: Callable[[], Peer]) -> None:
    with ws.Publisher("tcp://127.0.0.1:0", transports=["shm"]) as publisher:
        publisher.register({"w": roles.torch.ones(3)})
        offer = publisher._exporters[0].export()
        assert roles.writable_handles(offer["socket"], offer["token"]) == 0
