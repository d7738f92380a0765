"""Shared memory, huge pages, and the limits of this process."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
from pathlib import Path

from weightsync.cli.doctor.finding import Finding, State
from weightsync.cli.progress import size_text
from weightsync.config import HUGE_PAGE
from weightsync.errors import CapacityError

FEW_FILES = 1024
LITTLE_MEMORY = 1 << 30
PROBE_BYTES = 4 * HUGE_PAGE
_KERNEL = "run Linux 5.14 or newer, and allow memfd_create in the container's seccomp profile"
_SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def check_segments() -> Finding:
    from weightsync.segment import Segment

    try:
        segment = Segment.create("weightsync-doctor", HUGE_PAGE)
        try:
            with contextlib.suppress(PermissionError):
                os.ftruncate(segment.fd, 0)
                return Finding(
                    "shared memory",
                    State.FAIL,
                    "memfd works, seals don't",
                    "a peer could cut a slot short",
                    _KERNEL,
                )
            segment.map(writable=True).close()
        finally:
            segment.close()
    except (CapacityError, OSError) as error:
        return Finding(
            "shared memory",
            State.FAIL,
            f"memfd does not work: {error}",
            "no shm transport, no remap",
            _KERNEL,
        )
    return Finding("shared memory", State.OK, "memfd segments with seals; nothing stays behind after a crash")


def check_huge_pages() -> Finding:
    from weightsync.segment import Segment

    setting = "unknown"
    with contextlib.suppress(OSError):
        text = _SHMEM.read_text()
        chosen = re.search(r"\[(\w+)\]", text)
        setting = chosen[1] if chosen else text.strip()
    huge_kib = 0
    segment = Segment.create("weightsync-doctor", PROBE_BYTES)
    try:
        mapping = segment.map(writable=True)
        huge_kib = _huge_kib_at(mapping.address)
        mapping.close()
    finally:
        segment.close()
    if huge_kib:
        return Finding(
            "huge pages", State.OK, f"a segment got {huge_kib // 1024} MiB of them (shmem_enabled: {setting})"
        )
    return Finding(
        "huge pages",
        State.WARN,
        f"a segment got none (shmem_enabled: {setting})",
        "slots are made of 4 KiB pages: filling one the first time is slower, and copies miss the TLB more; "
        "the swap pause does not change",
        f"echo advise | sudo tee {_SHMEM}   (advise: for memory that asks, as ours does; never: for none)",
    )


def _huge_kib_at(address: int) -> int:
    """KiB mapped by huge pages in the mapping that starts at `address`."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            is_here = int(head[1], 16) <= address < int(head[2], 16)
        elif is_here and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1])
    return 0


def check_dev_shm() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return Finding("/dev/shm", State.OK, "not there, and not needed: our segments have no names")
    found = f"{size_text(usage.total)}, {size_text(usage.free)} free"
    return Finding("/dev/shm", State.OK, f"{found}; any size will do, our segments are not kept in it")


def check_memory() -> Finding:
    from weightsync.segment import available_memory

    available = available_memory()
    if available is None:
        return Finding(
            "memory", State.WARN, "unknown", "a model that does not fit is found out late", "mount /proc"
        )
    found = f"{size_text(available)} available to this process (control group included)"
    if available < LITTLE_MEMORY:
        cost = "a trainer needs 2 slots, a server 1 back buffer, each as large as its weights"
        return Finding(
            "memory",
            State.WARN,
            found,
            cost,
            "free memory, raise the control group's memory.max, or use fewer slots",
        )
    return Finding("memory", State.OK, found)


def check_locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else size_text(soft)
    has_rdma = any(Path("/sys/class/infiniband").glob("*"))
    if soft == resource.RLIM_INFINITY or not has_rdma:
        needed = "" if soft == resource.RLIM_INFINITY else "; shm and zmq lock nothing, RDMA would need more"
        return Finding("locked memory", State.OK, f"{text}{needed}")
    cost = "RDMA registrations beyond it are refused"
    return Finding(
        "locked memory", State.WARN, text, cost, "ulimit -l unlimited, or docker run --ulimit memlock=-1"
    )


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (at most {hard})"
    if soft >= FEW_FILES:
        return Finding("open files", State.OK, found)
    cost = "each member takes several on the publisher; late members would be turned away"
    return Finding(
        "open files", State.WARN, found, cost, "ulimit -n 65536, or docker run --ulimit nofile=65536"
    )
