"""Move new model weights from trainers to inference servers, and switch to them atomically while serving.

Takes tensors on the trainer (`Publisher`), gives them to servers (`Subscriber`), and promises that a forward
pass sees the weights of exactly one verified version. Importing this package loads neither torch nor native code.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.publisher.publisher import Publisher as Publisher
    from weightsync.publisher.ticket import Ticket as Ticket
    from weightsync.subscriber.fetch import fetch_layout as fetch_layout
    from weightsync.subscriber.fetch import fetch_status as fetch_status
    from weightsync.subscriber.fetch import pull as pull
    from weightsync.subscriber.subscriber import Subscriber as Subscriber
    from weightsync.types import Box as Box
    from weightsync.types import FleetStatus as FleetStatus
    from weightsync.types import MemberReport as MemberReport
    from weightsync.types import MemberStatus as MemberStatus
    from weightsync.types import Shard as Shard
    from weightsync.types import SyncReport as SyncReport

__version__ = "0.1.0"

_HOMES = {
    "Publisher": "weightsync.publisher.publisher",
    "Ticket": "weightsync.publisher.ticket",
    "Subscriber": "weightsync.subscriber.subscriber",
    "fetch_layout": "weightsync.subscriber.fetch",
    "fetch_status": "weightsync.subscriber.fetch",
    "pull": "weightsync.subscriber.fetch",
    "Box": "weightsync.types",
    "Shard": "weightsync.types",
    "SyncReport": "weightsync.types",
    "MemberReport": "weightsync.types",
    "FleetStatus": "weightsync.types",
    "MemberStatus": "weightsync.types",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'weightsync' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
