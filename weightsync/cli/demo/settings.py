"""What one run of the demo was asked to do, and how it shares the machine's cores."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from weightsync.cli.demo.sizes import SIZES, GptSize

ModelSize = Literal["tiny", "small", "medium", "large", "xl"]
Transport = Literal["auto", "shm", "zmq"]
Swap = Literal["remap", "copy", "flip", "adopt"]

BUSY_SHARE = 0.4  # of a server's measured capacity that the default request rate asks for


@dataclass(frozen=True, slots=True)
class Settings:
    """Travels to every child process. `rate` is requests per second and server; None: from a measurement."""

    seconds: float = 30.0
    replicas: int = 2
    model_size: ModelSize = "small"
    transport: Transport = "auto"
    swap: Swap = "remap"
    rate: float | None = None
    publish_every: int | None = None
    check_every: int = 8
    seed: int = 0

    @property
    def size(self) -> GptSize:
        return SIZES[self.model_size]

    @property
    def steps_per_version(self) -> int:
        return self.size.publish_every if self.publish_every is None else self.publish_every

    @property
    def server_names(self) -> tuple[str, ...]:
        return tuple(f"server-{index}" for index in range(self.replicas))


def count_cores() -> int:
    """Cores that this process may run on, which in a container are often fewer than the host has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_process(cores: int, replicas: int) -> int:
    """An equal share for the trainer and each server; small models gain nothing beyond four threads."""
    return max(1, min(4, cores // (replicas + 1)))


def pick_rate(pass_s: float, size: GptSize) -> float:
    """Requests per second that keep a server busy for `BUSY_SHARE` of the time, given one pass's duration."""
    return BUSY_SHARE / (pass_s * size.reply_tokens)
