"""Page tables by ctypes: exchange of two mappings, and population. The pure twin of `csrc/core/pages.cpp`."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time

import numpy as np

_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_MREMAP_DONTUNMAP = 4
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_FAILED = ctypes.c_void_p(-1).value


def _load(loader: type[ctypes.CDLL]) -> ctypes.CDLL:
    libc = loader(None, use_errno=True)
    libc.mremap.restype = libc.mmap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


_libc = _load(ctypes.CDLL)
_libc_with_gil = _load(ctypes.PyDLL)


def exchange(a: int, b: int, scratch: int, size: int) -> float:
    """Exchange the pages of two mappings; returns the seconds it took. The GIL is held."""
    page = mmap.PAGESIZE
    if size <= 0 or any(value % page for value in (a, b, scratch, size)):
        raise ValueError(
            f"exchange: expected multiples of the page size {page}, got {a:#x} {b:#x} {scratch:#x} {size}"
        )
    low, middle, high = sorted((a, b, scratch))
    if low + size > middle or middle + size > high:
        raise ValueError(f"exchange: the ranges {a:#x}, {b:#x} and {scratch:#x} of {size} bytes overlap")
    started = time.perf_counter()
    # A range that is moved away stays mapped where the kernel can do that, so that no other thread's mmap() lands in
    # it before its new pages arrive.
    keep = _MREMAP_DONTUNMAP
    error = _move(a, scratch, size, keep)
    if error in (errno.EINVAL, errno.ENOMEM):
        keep = 0
        error = _move(a, scratch, size, keep)
    if error:
        raise _failure("move a to scratch", error, scratch, size)
    error = _move(b, a, size, keep)
    if error:
        _move(scratch, a, size, 0)
        raise _failure("move b to a", error, scratch, size)
    error = _move(scratch, b, size, keep)
    if error:
        _move(a, b, size, keep)
        _move(scratch, a, size, 0)
        raise _failure("move scratch to b", error, scratch, size)
    seconds = time.perf_counter() - started
    error = _reserve(scratch, size)
    if error:
        raise OSError(error, f"exchange: done, but scratch can't be reserved again: {os.strerror(error)}")
    return seconds


def populate(address: int, size: int, *, write: bool) -> None:
    """Fill the page tables of a range, contents unchanged. Raises OSError."""
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    if _libc.madvise(address, size, advice) == 0:
        return
    error = ctypes.get_errno()
    is_known = _libc.madvise(None, 0, advice) == 0  # EINVAL may also mean that the range forbids the access
    if is_known or error != errno.EINVAL or address % mmap.PAGESIZE:
        raise OSError(error, f"populate {size} bytes: {os.strerror(error)}")
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))[:: mmap.PAGESIZE]
    if write:
        np.add(pages, 0, out=pages)
    else:
        pages.sum()


def _move(source: int, target: int, size: int, keep: int) -> int:
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | keep
    moved = _libc_with_gil.mremap(source, size, size, flags, target)
    return ctypes.get_errno() if moved == _FAILED else 0


def _reserve(scratch: int, size: int) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    got = _libc_with_gil.mmap(scratch, size, 0, flags, -1, 0)
    return ctypes.get_errno() if got == _FAILED else 0


def _failure(step: str, error: int, scratch: int, size: int) -> OSError:
    _reserve(scratch, size)  # kernels may unmap the target of a move that then fails
    return OSError(error, f"exchange: {step}: {os.strerror(error)}; everything is where it was")
