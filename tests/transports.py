"""The transports that tests go through; those whose package is not installed are skipped with that reason."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(not find_spec("nixl"), reason="the package nixl is not installed")
)
each_transport = pytest.mark.parametrize("transport", ["shm", "zmq", NIXL])


def offering(transport: str) -> dict[str, Any]:
    """Options of a publisher that offers it."""
    return {"transports": ("shm", "zmq", transport)} if transport not in ("shm", "zmq") else {}
