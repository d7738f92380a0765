"""Several hosts (network namespaces): versions over real links, and what happens when one is cut."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from benchmarks import netns
from tests import roles
from tests.processes import Peer, eventually
from tests.transports import NIXL

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000
SIZE = {"blocks": 16, "width": 512}
pytestmark = pytest.mark.skipif(netns.why_not() is not None, reason=netns.why_not() or "")


def move_to(state: SimpleNamespace, host: netns.Host) -> None:
    """This process is on that host from now on, and all threads that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{host.name}", os.O_RDONLY)
    try:
        if libc.setns(handle, _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), "can't move to the namespace")
    finally:
        os.close(handle)
    socket.sethostname(host.name)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[netns.Host]]:
    with netns.hosts(4, mbit=400) as made:
        yield made


def on_hosts(
    peer: Callable[[], Peer], hosts: list[netns.Host], transport: str = "zmq", count: int = 2
) -> tuple[Peer, list[Peer], str]:
    """A publisher on the first, servers on the others."""
    publisher, servers = peer(), [peer() for _ in range(count)]
    for one, host in zip([publisher, *servers], hosts, strict=False):
        one.call(move_to, host)
    address = publisher.call(
        roles.open_publisher,
        f"tcp://{hosts[0].address}:0",
        size=SIZE,
        insecure=True,
        transports=("shm", transport),
    )
    for number, server in enumerate(servers):
        server.call(
            roles.open_subscriber, address, size=SIZE, transport=transport, insecure=True, name=f"s{number}",
            timeout_s=6.0,
        )  # fmt: skip
    return publisher, servers, address


@pytest.mark.parametrize("transport", ["zmq", NIXL])
def test_versions_reach_other_hosts_and_a_late_joiner(
    peer: Callable[[], Peer], hosts: list[netns.Host], transport: str
) -> None:
    publisher, servers, address = on_hosts(peer, hosts, transport)
    for content in (10, 20, 30):
        version = publisher.call(roles.publish, content, members=2, wait="ready")
        for server in servers:
            assert server.call(roles.await_version, version) == (version, content)
    late = peer()
    late.call(move_to, hosts[3])
    late.call(roles.open_subscriber, address, size=SIZE, transport=transport, insecure=True)
    assert late.call(roles.await_version, 3) == (3, 30)


def test_shared_memory_is_not_tried_across_hosts(peer: Callable[[], Peer], hosts: list[netns.Host]) -> None:
    _, _, address = on_hosts(peer, hosts, count=0)
    server = peer()
    server.call(move_to, hosts[1])
    assert server.call(roles.open_subscriber, address, size=SIZE, insecure=True) == "zmq"


def test_a_cable_pulled_in_the_middle_leaves_the_old_version_and_the_next_one_arrives(
    peer: Callable[[], Peer], hosts: list[netns.Host]
) -> None:
    publisher, (cut, other), _ = on_hosts(peer, hosts)
    publisher.call(roles.publish, 10, members=2, wait="ready")
    for server in (cut, other):
        assert server.call(roles.await_version, 1) == (1, 10)
        server.call(roles.serve)
    hosts[1].set_link(up=False)
    try:
        publisher.call(roles.publish, 20, wait="staged")
        before = time.monotonic()
        eventually(lambda: publisher.call(roles.live_versions) == {"s1": 2}, "the cut server is missed", 15.0)
        assert time.monotonic() - before < 10
    finally:
        hosts[1].set_link(up=True)
    publisher.call(roles.publish, 30, members=2, wait="ready", timeout_s=20.0)
    seen = [server.call(roles.stop_serving) for server in (cut, other)]
    assert seen[0][0] == (1, 10) and seen[1][:2] == [(1, 10), (2, 20)]
    for server in (cut, other):
        assert server.call(roles.await_content, 30) == (3, 30)


def test_the_publisher_s_cable_is_pulled_and_all_go_on_afterwards(
    peer: Callable[[], Peer], hosts: list[netns.Host]
) -> None:
    publisher, servers, _ = on_hosts(peer, hosts)
    publisher.call(roles.publish, 10, members=2, wait="ready")
    for server in servers:
        assert server.call(roles.await_version, 1) == (1, 10)
    hosts[0].set_link(up=False)
    try:
        publisher.call(roles.publish, 20, wait="staged")
        for server in servers:
            server.call(roles.await_silence)
            assert server.call(roles.look) == (1, 10)
    finally:
        hosts[0].set_link(up=True)
    publisher.call(roles.publish, 30, members=2, wait="ready", timeout_s=20.0)
    for server in servers:
        assert server.call(roles.await_content, 30) == (3, 30)


def test_a_server_on_another_host_is_killed_and_its_peer_goes_on(
    peer: Callable[[], Peer], hosts: list[netns.Host]
) -> None:
    publisher, (victim, other), _ = on_hosts(peer, hosts)
    publisher.call(roles.publish, 10, members=2, wait="ready")
    publisher.tell(roles.publish, 20, wait="staged")
    victim.kill()
    publisher.reply()
    assert other.call(roles.await_content, 20) == (2, 20)
    publisher.call(roles.publish, 30, wait="ready")
    assert other.call(roles.await_content, 30) == (3, 30)
