"""Numbers of the protocol that both sides share, in one place. Units are in the names."""

from __future__ import annotations

import os

WIRE_SCHEMA = 2
HEARTBEAT_S = 0.5
MEMBER_TIMEOUT_S = 5.0
MAX_CONTROL_BYTES = 64 << 20
MAX_MEMBER_BYTES = 16 << 20
MAX_MEMBERS = 4096
ZMQ_DESCRIPTORS = 32
"""What a side's ZeroMQ context and sockets may open, with room for a probe."""
TENSOR_ALIGNMENT = 64
HUGE_PAGE = 2 << 20
GIANT_PAGE = 1 << 30


def default_threads() -> int:
    """Copy threads: the CPUs this process may use, at most 16 (memory bandwidth is full by then)."""
    return max(1, min(16, len(os.sched_getaffinity(0))))
