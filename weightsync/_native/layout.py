"""The columns of a move table, the codes of element types, and the status codes of a run.

Callers, the native core and its pure twin share these numbers; `csrc/core/move.h` repeats them.
"""

from __future__ import annotations

from typing import Final

MAX_NDIM: Final = 8
COLUMNS: Final = 38

SRC_TYPE: Final = 0
DST_TYPE: Final = 1
SEED: Final = 2
"""Digest key of the tensor: the bit pattern of a uint64."""
INDEX: Final = 3
"""Row-major number, in the logical tensor, of the box's first element."""
OFFSET: Final = 4
"""Byte offset of the move's first byte in the slot; only watermarks use it."""
NDIM: Final = 5
SHAPE: Final = 6
SRC_STRIDE: Final = 14
"""Bytes."""
DST_STRIDE: Final = 22
"""Bytes."""
INDEX_STRIDE: Final = 30
"""Elements of the logical tensor."""

RAW8: Final = 1
RAW16: Final = 2
RAW32: Final = 3
RAW64: Final = 4
F16: Final = 16
BF16: Final = 17
F32: Final = 18
F64: Final = 19

ITEM_BYTES: Final[dict[int, int]] = {RAW8: 1, RAW16: 2, RAW32: 4, RAW64: 8, F16: 2, BF16: 2, F32: 4, F64: 8}
FLOATS: Final = frozenset({F16, BF16, F32, F64})

OK: Final = 0
TIMEOUT: Final = 1
CANCELLED: Final = 2
EVICTED: Final = 3

BLOCK: Final = 4096
"""16-bit words that share the factors A of the digest."""
