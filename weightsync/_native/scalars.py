"""Digest and casts of arrays of element bits, in integers only: the pure twin of `csrc/core/digest.h` and `cast.h`.

A tensor's elements, in row-major order, are a sequence of signed 16-bit words (an element of one byte is one word). A
digest is two independent sums mod 2^32, D[h] = sum of word * A[h](seed, j >> 12) * F[h][j & 4095] over the words with
number j, so it is additive over any partition; D[0] is the low half. `digest.h` says why this form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from weightsync._native import layout as col

UInts = npt.NDArray[np.unsignedinteger]
Uint64s = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**32 - 1
_EXPONENT_BITS = {col.F16: 5, col.BF16: 8, col.F32: 8, col.F64: 11}
_BITS: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _u64(value: int) -> np.uint64:
    return np.uint64(value % 2**64)


def _make_f(shift: int, first: int, second: int) -> npt.NDArray[np.int64]:
    x = (np.arange(col.BLOCK, dtype=np.int64) + shift) & 0x7FFF
    x ^= x >> 7
    x = (x * first) & 0x7FFF
    x ^= x >> 6
    x = (x * second) & 0x7FFF
    x ^= x >> 8
    factors = (2 * x + 1).astype(np.uint16).view(np.int16).astype(np.int64)
    factors.setflags(write=False)
    return factors


F = (_make_f(0x1B3D, 0x2D35, 0x5E6D), _make_f(0x4E6F, 0x6A4B, 0x3C97))
"""For each half the factors of a word's place in its block: odd, distinct, 16 bits, signed."""


def factor_a(seed: int, blocks: Uint64s) -> tuple[Uint64s, Uint64s]:
    """For each half the factors of the blocks: odd, 32 bits (splitmix64's finaliser, keyed)."""
    z = (blocks + _u64(1)) * _u64(_GOLDEN) + _u64(seed)
    z = (z ^ (z >> _u64(30))) * _u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _u64(27))) * _u64(0x94D049BB133111EB)
    z ^= z >> _u64(31)
    return (z & _u64(_MASK)) | _u64(1), (z >> _u64(32)) | _u64(1)


def add_halves(x: int, y: int) -> int:
    """The sum of two digests: each half mod 2^32."""
    return ((x >> 32) + (y >> 32)) % 2**32 << 32 | (x + y) % 2**32


def _words(bits: UInts) -> npt.NDArray[np.int64]:
    """Signed words, as a new last axis."""
    if bits.itemsize == 1:
        return bits.astype(np.int64)[..., None]
    dense = np.ascontiguousarray(bits)[..., None]
    return dense.view(np.int16).astype(np.int64)


def digest_run(bits: UInts, seed: int, index: int) -> int:
    """Digest of elements whose numbers are `index`, `index` + 1, ..."""
    words = _words(bits.reshape(-1)).reshape(-1)
    start = index * max(1, bits.itemsize // 2)
    first, ahead = divmod(start, col.BLOCK)
    count = -(-(ahead + words.size) // col.BLOCK)
    padded = np.zeros(count * col.BLOCK, np.int64)
    padded[ahead : ahead + words.size] = words
    blocks = np.arange(count, dtype=np.uint64) + _u64(first)
    sums = (padded.reshape(count, col.BLOCK) @ f for f in F)  # below 2^43: exact
    return _join(s.astype(np.uint64) * a for s, a in zip(sums, factor_a(seed, blocks), strict=True))


def digest_at(bits: UInts, seed: int, index: int, steps: Sequence[int]) -> int:
    """Digest of elements whose numbers start at `index` and grow by `steps` along the axes."""
    numbers = np.full((1,) * bits.ndim, index, np.int64)
    for axis, (count, step) in enumerate(zip(bits.shape, steps, strict=True)):
        shape = [1] * bits.ndim
        shape[axis] = count
        numbers = numbers + (np.arange(count, dtype=np.int64) * step).reshape(shape)
    words = _words(bits)
    places = numbers[..., None] * words.shape[-1] + np.arange(words.shape[-1])
    factors = factor_a(seed, (places >> 12).astype(np.uint64))
    place = places & (col.BLOCK - 1)
    return _join((words * f[place]).astype(np.uint64) * a for f, a in zip(F, factors, strict=True))


def _join(halves: Iterable[Uint64s]) -> int:
    low, high = (int(half.sum(dtype=np.uint64)) % 2**32 for half in halves)
    return high << 32 | low


def cast_bits(bits: UInts, src_type: int, dst_type: int) -> UInts:
    """The bits of each element in another float format: nearest, ties to even; NaNs are quieted and keep their sign
    and the top of their payload; too large becomes infinite; subnormals are kept."""
    src_exponent, dst_exponent = _EXPONENT_BITS[src_type], _EXPONENT_BITS[dst_type]
    src_mantissa = 8 * col.ITEM_BYTES[src_type] - 1 - src_exponent
    dst_mantissa = 8 * col.ITEM_BYTES[dst_type] - 1 - dst_exponent
    wide = bits.astype(np.uint64)
    sign = wide >> _u64(src_exponent + src_mantissa)
    exponent = ((wide >> _u64(src_mantissa)) & _u64((1 << src_exponent) - 1)).astype(np.int64)
    mantissa = wide & _u64((1 << src_mantissa) - 1)
    is_special = exponent == (1 << src_exponent) - 1
    is_nan = is_special & (mantissa != 0)

    # The significand with its leading one at bit 62, and the exponent that the value then has in the target.
    leading = np.where(exponent > 0, mantissa | _u64(1 << src_mantissa), mantissa)
    length = np.frexp(leading.astype(np.float64))[1].astype(np.int64)  # at most 53 bits: exact
    significand = leading << (63 - length).astype(np.uint64)
    bias = (1 << (dst_exponent - 1)) - (1 << (src_exponent - 1))
    scaled = np.maximum(exponent, 1) + bias + (length - 1 - src_mantissa)

    # Rounding carries into the exponent by itself, since a mantissa that overflows is 0 with the next exponent.
    drop = 62 - dst_mantissa + np.maximum(1 - scaled, 0)
    shift = np.minimum(drop, 63).astype(np.uint64)
    kept = significand >> shift
    rest = significand & ((_u64(1) << shift) - _u64(1))
    half = _u64(1) << (shift - _u64(1))
    kept = kept + ((rest > half) | ((rest == half) & ((kept & _u64(1)) != 0))).astype(np.uint64)
    magnitude = (np.maximum(scaled - 1, 0).astype(np.uint64) << _u64(dst_mantissa)) + kept

    infinite = _u64(((1 << dst_exponent) - 1) << dst_mantissa)
    magnitude = np.where(is_special | (scaled >= (1 << dst_exponent) - 1), infinite, magnitude)
    magnitude = np.where((leading == 0) | (drop > 63), _u64(0), magnitude)
    gap = src_mantissa - dst_mantissa
    payload = mantissa >> _u64(gap) if gap >= 0 else mantissa << _u64(-gap)
    magnitude = np.where(is_nan, infinite | _u64(1 << (dst_mantissa - 1)) | payload, magnitude)
    result: UInts = (magnitude | (sign << _u64(dst_exponent + dst_mantissa))).astype(
        _BITS[col.ITEM_BYTES[dst_type]]
    )
    return result
