"""A publisher rank's line to the coordinator: in this process, or over the network. Questions and orders are the same."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from weightsync import errors
from weightsync.errors import (
    AddressInUseError,
    ConfigError,
    FencedError,
    LayoutError,
    SyncTimeoutError,
    WeightSyncError,
)
from weightsync.types import FleetStatus
from weightsync.wire import messages as m
from weightsync.wire.address import Address
from weightsync.wire.coordinator import Coordinator
from weightsync.wire.keys import Keys
from weightsync.wire.link import Link
from weightsync.wire.query import ask

_GRACE_S = 5.0  # a coordinator that lives answers by the deadline; this much later it counts as gone


class Line(ABC):
    """`ask` and `send` for the rank's threads; `next_order` for the one that obeys. `changed` guards every field."""

    def __init__(self, address: str) -> None:
        self.changed = threading.Condition()
        self.address = address
        self.epoch = 0
        self.version = 0
        self.stage: m.Stage | None = None
        self._orders: deque[m.Enlisted | m.Extend] = deque()
        self._refusal: WeightSyncError | None = None
        self._end: BaseException | None = None
        self._number = 0
        self._open: dict[int, tuple[m.Question, float]] = {}
        self._answers: dict[int, m.Answer] = {}
        self._is_closed = False

    # ---- to the coordinator

    def enlist(self, introduce: Callable[[int], m.Enlist], timeout_s: float) -> m.Stage:
        """Take the rank's seat; returns what to stage, once all ranks are there. `introduce(last_epoch)` is called again
        whenever the connection or the coordinator is another one, on any thread.

        Raises LayoutError if ranks disagree, AddressInUseError if a living process has the seat, SyncTimeoutError.
        """
        self._enlist(introduce)
        with self.changed:
            self.changed.wait_for(lambda: self.stage or self._refusal or self._end, timeout_s)
            self._raise_end()
            if self._refusal is not None:
                raise self._refusal
            if self.stage is not None:
                return self.stage
        raise SyncTimeoutError(f"{self.address}: {self._why_not_seated(timeout_s)}")

    def leave(self) -> None:
        """Give the seat up; another `enlist` may follow."""
        with self.changed:
            self.stage, self._refusal, seated = None, None, self.epoch
        if seated:
            with contextlib.suppress(WeightSyncError):
                self.send(m.Bye)
        self._left()

    def send(self, kind: Callable[..., m.FromMember], *fields: Any) -> None:
        """Post a message of this kind with the epoch and these fields."""
        with self.changed:
            self._raise_end()
            epoch = self.epoch
        self._post(kind(epoch, *fields))

    def ask(self, kind: Callable[..., m.Question], *fields: Any, timeout_s: float) -> m.Answer:
        """Post a question with the epoch, a number and these fields; wait for its answer and raise what it says."""
        with self.changed:
            self._raise_end()
            self._number += 1
            number = self._number
            question = kind(self.epoch, number, *fields)
            self._open[number] = (question, time.monotonic() + timeout_s)
        try:
            self._post(question)
            with self.changed:
                self.changed.wait_for(lambda: number in self._answers or self._end, timeout_s + _GRACE_S)
                answer = self._answers.pop(number, None)
                if answer is None:
                    self._raise_end()
                    raise SyncTimeoutError(
                        f"{self.address}: the coordinator did not answer within {timeout_s:g} s"
                    )
        finally:
            with self.changed:
                del self._open[number]
        if answer.error is not None:
            error, text = answer.error
            raise getattr(errors, error, WeightSyncError)(text)
        return answer

    @abstractmethod
    def status(self) -> FleetStatus:
        """What the coordinator knows of the fleet. Raises SyncTimeoutError."""

    def report(self, version: int) -> m.Report | None:
        """What the coordinator knows of one version; None if nothing any more."""
        return self.ask(m.AskReport, version, timeout_s=0.0).report  # answered at once

    def close(self) -> None:
        """No more orders."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        self._close()

    # ---- from the coordinator

    def next_order(self) -> m.Enlisted | m.Extend | None:
        """Block for what the coordinator wants done; None: the line is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self._orders or self._is_closed or self._end)
            return self._orders.popleft() if self._orders and not self._is_closed else None

    def deliver(self, message: m.ToMember) -> None:
        """Take one message; never blocks."""
        with self.changed:
            match message:
                case m.Enlisted():
                    self._enlisted(message)
                case m.Stage():
                    self.stage, self._refusal = message, None
                case m.Extend():
                    self._orders.append(message)
                case m.Answer() if message.request in self._open:
                    self._answers[message.request] = message
                case m.NoPlan():
                    self._refusal = LayoutError(message.reason)
                case m.Refused():
                    self._refused(message.reason)
            self.changed.notify_all()

    def end(self, error: BaseException) -> None:
        """There will be no more messages, and everybody who waits is told why."""
        with self.changed:
            self._end = error
            self.changed.notify_all()

    def _enlisted(self, message: m.Enlisted) -> None:
        self.epoch, self.version = message.epoch, max(self.version, message.version)
        self._orders.append(message)

    def _refused(self, reason: str) -> None:
        if self.stage is None:
            self._refusal = AddressInUseError(f"{self.address}: {reason}")
        else:
            self._end = FencedError(f"{self.address}: {reason}")

    def _raise_end(self) -> None:
        if self._end is not None:
            raise self._end

    @abstractmethod
    def _why_not_seated(self, timeout_s: float) -> str: ...

    @abstractmethod
    def _enlist(self, introduce: Callable[[int], m.Enlist]) -> None: ...

    @abstractmethod
    def _left(self) -> None: ...

    @abstractmethod
    def _post(self, message: m.FromMember) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


class LocalLine(Line):
    """The coordinator is a thread of this process."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator.fleet.address)
        self._coordinator = coordinator
        self.epoch = coordinator.fleet.epoch
        coordinator.join(self.deliver, self.end)

    def _enlist(self, introduce: Callable[[int], m.Enlist]) -> None:
        self._coordinator.receive(introduce(0))

    def _post(self, message: m.FromMember) -> None:
        self._coordinator.receive(message)

    def status(self) -> FleetStatus:
        return self._coordinator.status()

    def report(self, version: int) -> m.Report | None:
        """Legal even after the end."""
        found: m.Report | None = self._coordinator.look(lambda fleet: fleet.report(version))
        return found

    def _why_not_seated(self, timeout_s: float) -> str:
        missing: list[str] = self._coordinator.look(
            lambda fleet: [f"rank {r}" for r, seat in enumerate(fleet.ranks.seats) if seat is None]
        )
        return f"not every rank has registered within {timeout_s:g} s; missing: {', '.join(missing)}"

    def _left(self) -> None:
        """There is no connection to give up."""

    def _close(self) -> None:
        """The coordinator is closed by its owner."""


class RemoteLine(Line):
    """The coordinator lives elsewhere. `follow`: another life of it, with a newer epoch, is joined too; otherwise it means
    that this publisher was replaced."""

    def __init__(self, address: Address, keys: Keys | None, *, follow: bool) -> None:
        super().__init__(address.text)
        self._parsed, self._keys, self._follow = address, keys, follow
        self._link: Link | None = None

    def _enlist(self, introduce: Callable[[int], m.Enlist]) -> None:
        self._link = Link(
            self._parsed,
            self._keys,
            hello=introduce,
            heartbeat=m.Beat,
            on_message=self.deliver,
            on_lost=self._lost,
        )
        self._link.start()

    def _enlisted(self, message: m.Enlisted) -> None:
        if self.epoch and message.epoch != self.epoch and not self._follow:
            self._end = FencedError(f"{self.address}: another publisher took over (epoch {message.epoch})")
            # this seat is another process's; the link can't be closed by its own thread
            threading.Thread(target=self._close, name="weightsync-fenced", daemon=True).start()
            return
        super()._enlisted(message)
        now = time.monotonic()
        for question, deadline in self._open.values():  # asked of a life that did not answer any more
            question.epoch = self.epoch
            if isinstance(question, m.Begin | m.AwaitMembers | m.AwaitStage):
                question.timeout_s = max(0.0, deadline - now)
            self._post(question)

    def report(self, version: int) -> m.Report | None:
        """None also if the coordinator has gone: what a ticket has waited for stays true without it."""
        try:
            return super().report(version)
        except WeightSyncError:
            return None

    def _left(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _lost(self, reason: str) -> None:
        """The link says Enlist again by itself."""

    def _post(self, message: m.FromMember) -> None:
        if self._link is None:
            raise ConfigError("register() comes first")
        self._link.send(message)

    def status(self) -> FleetStatus:
        reply = ask(self._parsed, m.AskStatus(), keys=self._keys, timeout_s=_GRACE_S)
        if not isinstance(reply, m.Status):
            raise SyncTimeoutError(f"{self.address}: the coordinator does not answer")
        return reply.status

    def _why_not_seated(self, timeout_s: float) -> str:
        reply = ask(self._parsed, m.AskStatus(), keys=self._keys, timeout_s=1.0)
        if not isinstance(reply, m.Status):
            keys = "does it use the same keys" if self._keys else "does it need keys=DIR"
            return f"no coordinator answered within {timeout_s:g} s; is one running there, and {keys}?"
        if not self.epoch:
            return f"the coordinator gave this rank no seat within {timeout_s:g} s; has a process that died just now kept it?"
        missing = ", ".join(reply.status.missing_ranks)
        return f"not every rank has registered within {timeout_s:g} s; missing: {missing}"

    def _close(self) -> None:
        if self._link is not None:
            self._link.close()
