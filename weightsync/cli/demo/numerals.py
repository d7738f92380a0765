"""Numbers as the demo's views print them; a value that was not measured is a dash."""

from __future__ import annotations

from weightsync.cli.demo.spread import Spread

MISSING = "-"


def short(value: float | None) -> str:
    """Three significant digits, more only for whole numbers: 0.123, 4.56, 78.9, 1,234."""
    if value is None:
        return MISSING
    if abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    decimals = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{decimals}f}"


def pair(spread: Spread, factor: float = 1.0) -> str:
    """`p50 / p99`, after scaling to the unit of the column."""
    scaled = spread.scaled(factor)
    return f"{short(scaled.p50)} / {short(scaled.p99)}"


def milliseconds(spread: Spread) -> str:
    return f"{pair(spread, 1e3)} ms"


def microseconds(spread: Spread) -> str:
    return f"{pair(spread, 1e6)} µs"
