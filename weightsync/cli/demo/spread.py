"""The middle and the tail of a list of measurements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 99th percentile; None when nothing was measured. With few values p99 is close to the largest."""

    p50: float | None = None
    p99: float | None = None

    def scaled(self, factor: float) -> Spread:
        return Spread(
            None if self.p50 is None else self.p50 * factor, None if self.p99 is None else self.p99 * factor
        )

    def as_dict(self, digits: int = 3) -> dict[str, float | None]:
        return {
            "p50": None if self.p50 is None else round(self.p50, digits),
            "p99": None if self.p99 is None else round(self.p99, digits),
        }


def spread_of(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    if not ordered:
        return Spread()
    return Spread(_interpolate(ordered, 0.50), _interpolate(ordered, 0.99))


def _interpolate(ordered: list[float], share: float) -> float:
    """As numpy's default: linear between the two nearest ranks."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
