"""What a server notes while it serves, and hands over with each report."""

from __future__ import annotations

import time
from typing import TypeVar

import weightsync as ws
from weightsync.cli.demo.events import Adopted, Answered, HeldOut, Passes, Receipts, Served
from weightsync.errors import DigestError

Noted = TypeVar("Noted")


class Record:
    """Written by the serving thread and by the subscriber's callbacks; lists are emptied by each report.

    The callbacks may run on another thread: they only append, and a report only takes what it has copied.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens = 0
        self.passes = 0
        self.answered: list[Answered] = []
        self.heldout: list[HeldOut] = []
        self.sample = ("", "")
        self.reported_s = 0.0
        self._checked = 0
        self.mixed = 0
        self._longest_gap_s = 0.0
        self._busy_since_s: float | None = None
        self.digest_failures = 0
        self._adopted: list[Adopted] = []
        self._failures: list[str] = []

    def note_live(self, version: int, pause_s: float) -> None:
        self._adopted.append(Adopted(time.monotonic(), version, pause_s))

    def note_failed(self, version: int, error: BaseException) -> None:
        if isinstance(error, DigestError):
            self.digest_failures += 1
        self._failures.append(f"version {version}: {type(error).__name__}: {error}")

    def note_pass(
        self, version: int, label: int | None, differing: list[str], *, is_checked: bool, is_busy: bool
    ) -> None:
        """A forward pass on `version` ended with the server reporting `label`; `differing` must be empty."""
        now_s = time.monotonic()
        self.passes += 1
        self._checked += is_checked
        if differing or label != version:
            self.mixed += 1
            named = ", ".join(differing[:5]) or "none"
            self._failures.append(
                f"a pass on version {version} ended on {label}; tensors that differ: {named}"
            )
        if self._busy_since_s is not None:
            self._longest_gap_s = max(self._longest_gap_s, now_s - self._busy_since_s)
        self._busy_since_s = now_s if is_busy else None

    def report(self, subscriber: ws.Subscriber, waiting: int) -> Served:
        self.reported_s = time.monotonic()
        stats = subscriber.stats
        live_version = subscriber.version
        return Served(
            name=self.name,
            at_s=self.reported_s,
            live_version=0 if live_version is None else live_version,
            tokens=self.tokens,
            waiting=waiting,
            passes=Passes(self.passes, self._checked, self.mixed, self._longest_gap_s),
            receipts=Receipts(
                transport=stats.transport or "",
                versions_live=stats.versions_live,
                versions_verified=stats.versions_verified,
                versions_failed=stats.versions_failed,
                digest_failures=self.digest_failures,
                bytes_received=stats.bytes_received,
            ),
            answered=_take(self.answered),
            adopted=_take(self._adopted),
            heldout=_take(self.heldout),
            failures=_take(self._failures),
            sample=self.sample,
        )


def _take(notes: list[Noted]) -> tuple[Noted, ...]:
    """Empty the list of what it holds now; what another thread appends meanwhile stays for the next report."""
    taken = tuple(notes)
    del notes[: len(taken)]
    return taken
