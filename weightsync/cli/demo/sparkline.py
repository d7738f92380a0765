"""A curve in one line of text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` characters, each the mean of an equal share of `values`; the lowest is ▁, the highest █."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [index * len(values) // columns for index in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(LEVELS[round((mean - low) / span * (len(LEVELS) - 1))] for mean in means)


def smoothed(values: Sequence[float], window: int = 8) -> list[float]:
    """Each value averaged with up to `window - 1` before it: mini-batch losses jump."""
    return [sum(values[max(0, end - window) : end]) / min(end, window) for end in range(1, len(values) + 1)]
