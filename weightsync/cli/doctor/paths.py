"""Do what a sync does: exchange two mappings, and move weights between two processes over each transport."""

from __future__ import annotations

import subprocess
import sys
import uuid
from contextlib import ExitStack

from weightsync.cli.doctor.finding import Finding, State
from weightsync.cli.doctor.peer import Answer, sample_tensors
from weightsync.config import HUGE_PAGE
from weightsync.errors import WeightSyncError

EXCHANGE_BYTES = 8 * HUGE_PAGE
EXCHANGES = 5
PEER_TIMEOUT_S = 60.0
USES = {
    "shm": "same-host transfers fall back to zmq, several times slower",
    "zmq": "nothing reaches other hosts",
}
OTHER = "this path is not used"


def check_exchange() -> Finding:
    """Exchange two small segments a few times, as swap="remap" does between two forward passes."""
    try:
        times = [_exchange_once() for _ in range(EXCHANGES)]
    except (WeightSyncError, OSError) as error:
        cost = 'swap="remap" and "adopt" do not work'
        return Finding(
            "remap",
            State.FAIL,
            f"mremap failed: {error}",
            cost,
            'use swap="copy", or run Linux 5.14 or newer',
        )
    if None in times:
        cost = 'swap="remap" would serve wrong weights'
        return Finding(
            "remap",
            State.FAIL,
            "mremap left wrong bytes",
            cost,
            'use swap="copy", and report the kernel version',
        )
    best_us = min(seconds for seconds in times if seconds is not None) * 1e6
    found = f"two segments of {EXCHANGE_BYTES >> 20} MiB exchanged in {best_us:.0f} µs, addresses unchanged"
    return Finding("remap", State.OK, found)


def _exchange_once() -> float | None:
    """Seconds taken; None when the bytes are not where they should be."""
    from weightsync import _native
    from weightsync.segment import Mapping, Segment, reserve

    with ExitStack() as stack:
        mappings = []
        for fill in (1, 2):
            segment = Segment.create("weightsync-doctor", EXCHANGE_BYTES)
            stack.callback(segment.close)
            mapping = segment.map(writable=True)
            stack.callback(mapping.close)
            mapping.array[:] = fill
            mappings.append(mapping)
        scratch = Mapping(reserve(EXCHANGE_BYTES), EXCHANGE_BYTES)
        stack.callback(scratch.close)
        first, second = mappings
        seconds = _native.exchange(first.address, second.address, scratch.address, EXCHANGE_BYTES)
        is_right = bool((first.array == 2).all() and (second.array == 1).all())
    return seconds if is_right else None


def installed() -> list[str]:
    """Every transport, ours first."""
    from weightsync.wire.registry import transport_names

    return sorted(transport_names(), key=lambda name: (name not in USES, name))


def check_transport(name: str) -> Finding:
    """Publish here, subscribe in a second process over one named transport, compare every bit there."""
    import weightsync as ws

    title = f"{name} transport"
    address = "tcp://127.0.0.1:0" if name == "zmq" else f"ipc://@weightsync-doctor-{uuid.uuid4().hex}"
    other, cost = "shm" if name == "zmq" else "zmq", USES.get(name, OTHER)
    fix = f"see why with `weightsync --verbose doctor`; until then use transport={other!r}"
    try:
        with ws.Publisher(address, transports=(name,), name="doctor") as publisher:
            publisher.register(sample_tensors())
            publisher.publish()
            answer = _ask_peer(publisher.address, name)
    except (WeightSyncError, OSError, subprocess.SubprocessError) as error:
        return Finding(title, State.FAIL, f"no roundtrip: {error}", cost, fix)
    if answer.error:
        return Finding(title, State.FAIL, f"no roundtrip: {answer.error}", cost, fix)
    if answer.different:
        return Finding(
            title, State.FAIL, f"wrong bits in {', '.join(answer.different)}", "weights would be wrong", fix
        )
    speed = f"{answer.size_bytes / 2**20:.0f} MiB in {answer.read_s * 1e3:.1f} ms"
    return Finding(title, State.OK, f"two processes, {answer.tensors} tensors, every bit equal, {speed}")


def _ask_peer(address: str, transport: str) -> Answer:
    argv = [sys.executable, "-m", "weightsync.cli.doctor.peer", address, transport]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PEER_TIMEOUT_S)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Answer(error=f"the second process ended with {done.returncode}: {last}")
    return Answer.from_json(done.stdout)
