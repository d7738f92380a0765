"""Digest and casts of arrays of element bits, in integers only: the pure twin of `csrc/core/digest.h` and `cast.h`.

The digest of a logical tensor is the sum of bits(e) * A(seed, i >> 12) * B[i & 4095] mod 2^64 over its elements e with
row-major number i, so it is additive over any partition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightsync._native import layout as col

UInts = npt.NDArray[np.unsignedinteger]
Uint64s = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_EXPONENT_BITS = {col.F16: 5, col.BF16: 8, col.F32: 8, col.F64: 11}
_BITS: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _u64(value: int) -> np.uint64:
    return np.uint64(value % 2**64)


def _make_b() -> Uint64s:
    h = (np.arange(col.BLOCK, dtype=np.uint64) + _u64(0x9E3779B9)) & _u64(0xFFFFFFFF)
    h ^= h >> _u64(16)
    h = (h * _u64(0x85EBCA6B)) & _u64(0xFFFFFFFF)
    h ^= h >> _u64(13)
    h = (h * _u64(0xC2B2AE35)) & _u64(0xFFFFFFFF)
    h ^= h >> _u64(16)
    h |= _u64(1)
    h.setflags(write=False)
    return h


B = _make_b()
"""The factor of an element's place in its block: odd, distinct, 32 bits (murmur3's finaliser)."""


def factor_a(seed: int, blocks: Uint64s) -> Uint64s:
    """The factor of each block number: odd, 64 bits (splitmix64's finaliser, keyed)."""
    z = (blocks + _u64(1)) * _u64(_GOLDEN) + _u64(seed)
    z = (z ^ (z >> _u64(30))) * _u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _u64(27))) * _u64(0x94D049BB133111EB)
    return (z ^ (z >> _u64(31))) | _u64(1)


def digest_run(bits: UInts, seed: int, index: int) -> int:
    """Digest of elements whose numbers are `index`, `index` + 1, ..."""
    first = index // col.BLOCK
    ahead = index - first * col.BLOCK
    count = -(-(ahead + bits.size) // col.BLOCK)
    padded = np.zeros(count * col.BLOCK, np.uint64)
    padded[ahead : ahead + bits.size] = bits.reshape(-1)
    sums = padded.reshape(count, col.BLOCK) @ B
    blocks = np.arange(count, dtype=np.uint64) + _u64(first)
    return int((sums * factor_a(seed, blocks)).sum(dtype=np.uint64))


def digest_at(bits: UInts, seed: int, index: int, steps: Sequence[int]) -> int:
    """Digest of elements whose numbers start at `index` and grow by `steps` along the axes."""
    numbers = np.full((1,) * bits.ndim, index, np.int64)
    for axis, (count, step) in enumerate(zip(bits.shape, steps, strict=True)):
        shape = [1] * bits.ndim
        shape[axis] = count
        numbers = numbers + (np.arange(count, dtype=np.int64) * step).reshape(shape)
    places = numbers.astype(np.uint64)
    weights = factor_a(seed, places >> _u64(12)) * B[places & _u64(col.BLOCK - 1)]
    return int((bits.astype(np.uint64) * weights).sum(dtype=np.uint64))


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
