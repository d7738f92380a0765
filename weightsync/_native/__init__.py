"""Takes pointers, sizes and tables of moves; gives copies, casts and digests at memory bandwidth, and page exchange.

The compiled core is used where it can be loaded, and its pure twin, equal byte for byte, where not. The environment
variable WEIGHTSYNC_NATIVE decides at import: auto (the default), require (a missing core is an error), off.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from weightsync._native.layout import CANCELLED, EVICTED, OK, TIMEOUT

_mode = os.environ.get("WEIGHTSYNC_NATIVE", "auto")
if _mode not in ("auto", "require", "off"):
    raise ImportError(f"WEIGHTSYNC_NATIVE is {_mode!r}; expected auto, require or off")

if TYPE_CHECKING:
    from weightsync._native._core import Program, exchange, features, memory_copy, populate

    IS_NATIVE: bool
else:
    IS_NATIVE = False
    if _mode != "off":
        try:
            from weightsync._native._core import Program, exchange, features, memory_copy, populate

            IS_NATIVE = True
        except ImportError as error:
            if _mode == "require":
                raise ImportError(
                    f"WEIGHTSYNC_NATIVE=require, but the native core can't be loaded: {error}. Build it with g++ by "
                    "WEIGHTSYNC_NATIVE=require pip install --force-reinstall --no-deps weightsync "
                    "(in a checkout: pip install -e .), or unset the variable to use the slower pure twin"
                ) from error
    if not IS_NATIVE:
        from weightsync._native.pure import Program, exchange, features, memory_copy, populate

__all__ = [
    "CANCELLED",
    "EVICTED",
    "IS_NATIVE",
    "OK",
    "TIMEOUT",
    "Program",
    "exchange",
    "features",
    "memory_copy",
    "populate",
]
