"""What travels between the demo's parent and its children: orders down, events up.

All times `at_s` are on the monotonic clock; all durations are in seconds; counts are totals since the start.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.cli.demo.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Connect:
    """To a server: the publisher is up, at this address."""

    address: str


@dataclass(frozen=True, slots=True)
class Begin:
    """To everyone: the measured run starts at `schedule.begin_s`, with this many requests per second and server."""

    schedule: Schedule
    rate: float


@dataclass(frozen=True, slots=True)
class Stop:
    """To anyone: finish what is in hand, report the last facts, close, exit."""


@dataclass(frozen=True, slots=True)
class TrainerUp:
    address: str
    parameters: int
    tensors: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Loss:
    at_s: float
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Published:
    """A version was snapshotted; `call_s` is how long `publish()` kept the optimizer waiting."""

    at_s: float
    version: int
    step: int
    call_s: float


@dataclass(frozen=True, slots=True)
class Synced:
    """How a version fared, from its `publish()` call; None: it was overtaken by a newer version first."""

    version: int
    size_bytes: int
    staged_s: float | None
    ready_s: float | None
    live_s: float | None
    reads_s: tuple[float, ...]  # per server that read it


@dataclass(frozen=True, slots=True)
class Trained:
    """What the trainer did since its last report."""

    losses: tuple[Loss, ...]
    published: tuple[Published, ...]
    synced: tuple[Synced, ...]
    skipped: int  # publishes that found no free slot, in total


@dataclass(frozen=True, slots=True)
class TrainerDone:
    """The last version was published and the fleet had time to adopt it."""


@dataclass(frozen=True, slots=True)
class ServerUp:
    """A server has its first verified version live; `pass_s` is what one forward pass took beside the others."""

    name: str
    pass_s: float


@dataclass(frozen=True, slots=True)
class Answered:
    arrived_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Adopted:
    at_s: float
    version: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class HeldOut:
    at_s: float
    version: int
    loss: float


@dataclass(frozen=True, slots=True)
class Passes:
    """Forward passes so far, how many of them re-digested the live weights, and how many mixed versions."""

    done: int = 0
    checked: int = 0
    mixed: int = 0
    longest_gap_s: float = 0.0  # between two passes while requests waited


@dataclass(frozen=True, slots=True)
class Receipts:
    """What the subscriber counted so far."""

    transport: str = ""
    versions_live: int = 0
    versions_verified: int = 0
    versions_failed: int = 0
    digest_failures: int = 0
    bytes_received: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """What a server did since its last report; `passes`, `receipts` and `tokens` are totals."""

    name: str
    at_s: float
    live_version: int
    tokens: int
    waiting: int  # requests admitted or queued, not yet answered
    passes: Passes
    receipts: Receipts
    answered: tuple[Answered, ...]
    adopted: tuple[Adopted, ...]
    heldout: tuple[HeldOut, ...]
    failures: tuple[str, ...]
    sample: tuple[str, str]  # the newest request: what is left of the prompt in its window, and the reply


@dataclass(frozen=True, slots=True)
class ServerDone:
    name: str


@dataclass(frozen=True, slots=True)
class Crashed:
    """A child's last words: the traceback of what it did not expect."""

    name: str
    traceback: str


Order = Connect | Begin | Stop
Event = TrainerUp | Trained | TrainerDone | ServerUp | Served | ServerDone | Crashed
