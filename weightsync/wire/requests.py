"""Questions of a publisher's ranks that are answered when something has come true, or by a deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weightsync.errors import SyncTimeoutError, WeightSyncError
from weightsync.wire import messages as m


@dataclass(slots=True)
class Request:
    """`attempt(now)` gives the answer, or None for not yet; it raises what the asker shall raise. `why()` says, when the
    deadline passes, who was missing."""

    route: bytes
    number: int
    deadline: float
    attempt: Callable[[float], m.Answer | None]
    why: Callable[[], str]


class Requests:
    """Those that are open."""

    def __init__(self, epoch: int, send: Callable[[bytes, m.Answer], None]) -> None:
        self.epoch, self._send = epoch, send
        self._open: list[Request] = []

    def add(self, request: Request) -> None:
        """One that is asked again takes the place of itself."""
        self._open = [r for r in self._open if (r.route, r.number) != (request.route, request.number)]
        self._open.append(request)

    def settle(self, now: float) -> None:
        """Answer what can be answered."""
        still: list[Request] = []
        for request in self._open:
            try:
                answer = request.attempt(now)
                if answer is None and now >= request.deadline:
                    raise SyncTimeoutError(request.why())
            except WeightSyncError as error:
                answer = m.Answer(self.epoch, request.number, error=(type(error).__name__, str(error)))
            if answer is None:
                still.append(request)
            else:
                self._send(request.route, answer)
        self._open = still

    def forget(self, route: bytes) -> None:
        """Whoever asked is gone."""
        self._open = [request for request in self._open if request.route != route]

    def next_deadline(self) -> float | None:
        return min((request.deadline for request in self._open), default=None)
