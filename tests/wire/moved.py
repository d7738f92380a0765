"""What a table of moves does, element by element."""

from __future__ import annotations

import numpy as np

from weightsync._native import layout as col


def elements(table: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> list[tuple[int, int, int]]:
    """For each element of each move, in row-major order: its global index, the byte it comes from (its move's begins at
    `sources`), the byte it goes to (`targets`)."""
    found: list[tuple[int, int, int]] = []
    for row, source, target in zip(table, sources, targets, strict=True):
        count = int(row[col.NDIM])
        places = list(np.ndindex(*row[col.SHAPE : col.SHAPE + count].tolist()))
        grid = np.array(places, np.int64).reshape(len(places), count)
        index, src, dst = (
            grid @ row[c : c + count] for c in (col.INDEX_STRIDE, col.SRC_STRIDE, col.DST_STRIDE)
        )
        found += zip(
            (index + row[col.INDEX]).tolist(), (src + source).tolist(), (dst + target).tolist(), strict=True
        )
    return found
