"""Swap modes by name."""

from __future__ import annotations

from weightsync.errors import ConfigError
from weightsync.versioning.swap.adopt import Adopt
from weightsync.versioning.swap.copy import Copy
from weightsync.versioning.swap.flip import Flip
from weightsync.versioning.swap.mode import SwapMode
from weightsync.versioning.swap.remap import Remap

MODES: dict[str, type[SwapMode]] = {mode.name: mode for mode in (Remap, Copy, Flip, Adopt)}


def swap_mode(name: str) -> type[SwapMode]:
    """The class of mode `name`. Raises ConfigError that lists the modes."""
    if name not in MODES:
        raise ConfigError(f"swap={name!r}: choose {', '.join(MODES)}")
    return MODES[name]
