"""What the processes of the tests with a coordinator of its own do."""

from __future__ import annotations

import time
from types import SimpleNamespace

import weightsync.publisher.line
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
