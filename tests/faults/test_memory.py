"""Too little of something is an error that says of what, leaves nothing behind, and may be tried again."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable

import pytest

import weightsync as ws
from tests import roles
from tests.processes import Peer
from weightsync import segment
from weightsync.errors import CapacityError, WeightSyncError

SWAPS = ["remap", "copy", "flip", "adopt"]


def test_a_tiny_memory_lock_limit_does_not_matter(peer: Callable[[], Peer]) -> None:
    publisher, server = peer(), peer()
    for one in (publisher, server):
        one.call(roles.limit, resource.RLIMIT_MEMLOCK, 0)
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    server.call(roles.open_subscriber, address, transport="shm")
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)


PAIR = """
import torch, weightsync as ws
assert len(open("/proc/mounts").read().split(" /dev/shm ")) >= 2
with ws.Publisher("tcp://127.0.0.1:0") as publisher:
    publisher.register({"w": torch.full((1 << 20,), 3.0)})
    mine = {"w": torch.zeros(1 << 20)}
    with ws.Subscriber(publisher.address, mine, transport="shm").start(20) as subscriber:
        for number in (1, 2, 3):
            publisher.publish()
            subscriber.wait_for(number, 20)
    assert mine["w"].eq(3).all()
"""


@pytest.mark.skipif(
    os.getuid() != 0
    or not shutil.which("unshare")
    or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="a mount namespace of one's own needs root",
)
@pytest.mark.parametrize("options", ["size=64k", "size=64k,ro"])
def test_a_tiny_or_unwritable_dev_shm_does_not_matter(options: str) -> None:
    script = f'mount -t tmpfs -o {options} none /dev/shm && exec "$@"'
    argv = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-W", "error", "-c", PAIR]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_too_little_memory_for_the_slots_says_how_much_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ws.Publisher(f"ipc://@{uuid.uuid4().hex}") as publisher:
        before = open_files()
        left = iter([10 << 20, 1 << 20])  # the first slot fits, the second does not
        monkeypatch.setattr(segment, "available_memory", lambda: next(left))
        with pytest.raises(CapacityError, match=r"weightsync-slot-1.*GiB.*fewer slots"):
            publisher.register(roles.model())
        monkeypatch.undo()
        assert open_files() == before, "the slot that fitted is not kept"
        publisher.register(roles.model())
        assert publisher.publish().version == 1


@pytest.mark.parametrize("swap", SWAPS)
def test_too_little_memory_for_the_back_buffers_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    with ws.Publisher(f"ipc://@{uuid.uuid4().hex}") as publisher:
        trained, served = roles.model(), roles.model()
        publisher.register(trained)
        roles.fill(trained, 10)
        roles.fill(served, 3)
        before = open_files()
        monkeypatch.setattr(segment, "available_memory", lambda: 1)
        with pytest.raises(CapacityError, match="memory"):
            ws.Subscriber(publisher.address, served, swap=swap).start(10.0)
        assert roles.content_of(served) == 3
        monkeypatch.undo()
        roles.settle(lambda: open_files() <= before)
        with ws.Subscriber(publisher.address, served, swap=swap).start(10.0) as subscriber:
            publisher.publish()
            subscriber.wait_for(1, 10.0)
            assert roles.content_of(served) == 10


def test_an_address_space_that_ends_is_an_error_and_the_next_try_works(peer: Callable[[], Peer]) -> None:
    publisher, server = peer(), peer()
    size = {"blocks": 8, "width": 1024}
    address = publisher.call(roles.bind_publisher, "tcp://127.0.0.1:0", size=size)
    publisher.call(roles.limit_address_space, 40 << 20)
    with pytest.raises(CapacityError, match="mmap"):
        publisher.call(roles.register)
    publisher.call(roles.limit_address_space, None)
    publisher.call(roles.register)
    server.call(roles.open_subscriber, address, size=size)
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)


@pytest.mark.parametrize("spare", [2, 12, 30])
def test_too_few_file_descriptors_are_an_error_and_the_next_try_works(
    peer: Callable[[], Peer], spare: int
) -> None:
    publisher, server = peer(), peer()
    publisher.call(roles.limit_files, spare)
    with pytest.raises(CapacityError, match="open files"):
        publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    publisher.call(roles.limit_files, None)
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    server.call(roles.open_subscriber, address, transport="shm")
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)


def test_a_publisher_that_ran_out_of_file_descriptors_takes_servers_again_later(
    peer: Callable[[], Peer],
) -> None:
    publisher, first, second = peer(), peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    first.call(roles.open_subscriber, address, transport="shm", name="first")
    publisher.call(roles.publish, 10, members=1)
    assert first.call(roles.await_version, 1) == (1, 10)
    publisher.call(roles.limit_files, 0)
    with pytest.raises(WeightSyncError):
        second.call(roles.open_subscriber, address, transport="shm", start_s=2.0)
    publisher.call(roles.publish, 20)  # nobody else was hurt
    assert first.call(roles.await_version, 2) == (2, 20)
    publisher.call(roles.limit_files, None)
    assert second.call(roles.open_subscriber, address, transport="shm", name="second") == "shm"
    assert second.call(roles.await_version, 2) == (2, 20)


def test_a_server_without_spare_file_descriptors_still_follows_the_next_publisher(
    peer: Callable[[], Peer],
) -> None:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    server.call(roles.open_subscriber, address, transport="shm")
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    server.call(roles.serve)
    server.call(roles.limit_files, 0)
    publisher.kill()
    successor = peer()
    successor.call(roles.open_publisher, address)
    successor.call(roles.publish, 30, members=1, wait="live")
    server.call(roles.limit_files, None)
    successor.call(roles.publish, 40, wait="live")
    assert server.call(roles.stop_serving) == [(1, 10), (1, 30), (2, 40)]
