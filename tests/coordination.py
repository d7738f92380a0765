"""What the processes of the tests with a coordinator of its own do."""

from __future__ import annotations

import time
from types import SimpleNamespace

from torch import distributed

import weightsync as ws
import weightsync.publisher.line
from tests import sharded
from weightsync.wire.address import parse_address
from weightsync.wire.coordinator import Coordinator

State = SimpleNamespace


def open_coordinator(state: State, address: str, *, epoch: int | None = None) -> str:
    """Hold `address` for publishers to come; returns the real one."""
    epoch = time.time_ns() // 1_000_000 if epoch is None else epoch
    state.coordinator = Coordinator(
        parse_address(address), publisher="coordinator", epoch=epoch, keys=None, takeover=False, is_external=True
    )  # fmt: skip
    state.stack.callback(state.coordinator.close)
    return str(state.coordinator.fleet.address)


def lose_patience(state: State) -> None:
    """A coordinator that does not answer counts as gone right after the deadline, instead of five seconds."""
    weightsync.publisher.line._GRACE_S = 0.5


def register(state: State, timeout_s: float) -> None:
    state.pub.register(state.trained, timeout_s=timeout_s)


def publish_by(state: State, timeout_s: float) -> int:
    """Publish what is there, by a deadline."""
    return int(state.pub.publish(timeout_s=timeout_s).version)


def promote(state: State) -> None:
    state.pub.promote()


def roll_back(state: State) -> None:
    state.pub.rollback()


def open_in_group(state: State, address: str, rank: int, ranks: int, store: str) -> None:
    """A publisher of a process group, with a row of a tensor in each rank."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    state.stack.callback(distributed.destroy_process_group)
    state.pub = state.stack.enter_context(ws.Publisher.from_process_group(address, coordinator="external"))
    state.shards = sharded.shards_of(sharded.MODEL, "rows", rank, ranks)
    state.pub.register(state.shards, timeout_s=20.0)
