"""Shared memory without names: memfd segments, their mappings, and reserved address ranges.

A segment is a sealed-size memfd, so nothing is left behind after `kill -9` and a peer can't truncate it under us.
Mappings are aligned so that page tables move at the 2 MiB (or 1 GiB) level; see `weightsync.versioning`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import weakref

import numpy as np
import numpy.typing as npt

from weightsync import _native
from weightsync.config import GIANT_PAGE, HUGE_PAGE
from weightsync.errors import CapacityError

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_HUGEPAGE = 14
_F_ADD_SEALS = 1033
_SEAL_SIZE = 0x1 | 0x2 | 0x4  # no further seals, no shrink, no grow

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def round_up(size: int, unit: int) -> int:
    """`size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def _mmap(address: int, size: int, protection: int, flags: int, fd: int) -> int:
    got = _libc.mmap(address or None, size, protection, flags, fd, 0)
    if got == _MAP_FAILED or got is None:
        error = ctypes.get_errno()
        raise CapacityError(f"mmap of {size} bytes failed: {os.strerror(error)}")
    return int(got)


def unmap(address: int, size: int) -> None:
    """Give back an address range. Idempotence is the owner's business."""
    _libc.munmap(address, size)


def reserve(size: int) -> int:
    """Address of `size` bytes of unmapped address space, aligned to 2 MiB, or to 1 GiB when that large."""
    alignment = GIANT_PAGE if size >= GIANT_PAGE else HUGE_PAGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = _mmap(0, size + alignment, 0, flags, -1)
    address = round_up(start, alignment)
    if address > start:
        unmap(start, address - start)
    tail = start + size + alignment - (address + size)
    if tail:
        unmap(address + size, tail)
    return address


class Mapping:
    """One mapping of a segment, or a bare reserved range; owns its address range until `close()` or collection.

    `array` is a uint8 numpy view. Tensors made from it keep the range alive: it is unmapped only when the last one is
    gone, so closing the library never pulls memory from under a model.
    """

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        buffer = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(buffer, unmap, address, size).atexit = False  # tensors may outlive us at exit
        self._buffer: ctypes.Array[ctypes.c_uint8] | None = buffer

    @property
    def buffer(self) -> ctypes.Array[ctypes.c_uint8]:
        if self._buffer is None:
            raise ValueError("mapping is closed")
        return self._buffer

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        return np.ctypeslib.as_array(self.buffer)

    def close(self) -> None:
        """Drop our reference; the range goes when no view is left."""
        self._buffer = None


class Segment:
    """An anonymous shared memory file of a fixed size. `fd` stays open until `close()`."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size

    @classmethod
    def create(cls, name: str, size: int, *, capacity: int = 0) -> Segment:
        """A new segment of at least `size` bytes (rounded to 2 MiB); its pages are allocated by `map`.

        `capacity`: bytes that it may grow to; until pages are touched they cost address space only. Raises CapacityError
        when the host can't hold `size`.
        """
        check_memory(round_up(max(size, 1), HUGE_PAGE), name)
        size = round_up(max(size, capacity, 1), HUGE_PAGE)
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise CapacityError(f"{name}: can't make a shared segment: {error}") from error
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SIZE)
        except OSError as error:
            os.close(fd)
            raise CapacityError(f"{name}: can't make a shared segment of {size} bytes: {error}") from error
        return cls(fd, size)

    def map_range(self, *, writable: bool, populate: int | None = None) -> int:
        """Map the whole segment at an aligned address, with huge pages where the host allows, page tables filled for its
        first `populate` bytes (None: all).

        Returns the address; the caller owns the range. Raises CapacityError.
        """
        address = reserve(self.size)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            _mmap(address, self.size, protection, mmap.MAP_SHARED | _MAP_FIXED, self.fd)
            _libc.madvise(address, self.size, _MADV_HUGEPAGE)
            filled = self.size if populate is None else min(self.size, round_up(populate, HUGE_PAGE))
            if filled:
                _native.populate(address, filled, write=writable)
        except (OSError, CapacityError) as error:
            unmap(address, self.size)
            raise CapacityError(f"can't allocate {self.size} bytes of shared memory: {error}") from error
        return address

    def map(self, *, writable: bool, populate: int | None = None) -> Mapping:
        """As `map_range`, owned by the result."""
        return Mapping(self.map_range(writable=writable, populate=populate), self.size)

    def read_only_fd(self) -> int:
        """A new descriptor that can only be mapped for reading; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()  # of a set that could not be made completely, too


def check_descriptors(count: int, what: str) -> None:
    """Raise CapacityError unless `count` more descriptors can be opened: libzmq ends the process when it runs out."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # not even one for the folder itself
        used = limit
    if used + count > limit:
        raise CapacityError(
            f"{what}: needs {count} file descriptors, but of {limit} allowed (too many open files) only "
            f"{max(0, limit - used)} are left; raise `ulimit -n`"
        )


def check_memory(size: int, what: str) -> None:
    """Raise CapacityError if `size` bytes clearly exceed what the host or the control group has left."""
    available = available_memory()
    if available is not None and size > available:
        raise CapacityError(
            f"{what}: needs {size / 2**30:.2f} GiB of memory, {available / 2**30:.2f} GiB are available; "
            "use fewer slots, or a smaller model"
        )


def available_memory() -> int | None:
    """Bytes that can still be allocated: the smaller of MemAvailable and the control group's headroom."""
    limits = []
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with (
        contextlib.suppress(OSError, ValueError),
        open("/sys/fs/cgroup/memory.max") as limit,
        open("/sys/fs/cgroup/memory.current") as used,
    ):
        limits.append(int(limit.read()) - int(used.read()))
    return min(limits, default=None)
