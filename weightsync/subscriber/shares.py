"""One version read in shares: each from where the coordinator says, verified alone, and offered to others at once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weightsync.errors import EvictedError, SyncTimeoutError, TransportError, WeightSyncError
from weightsync.subscriber.session import Session, Share, mismatches, wrong_digests
from weightsync.versioning.swap.mode import Uint64s
from weightsync.wire import messages as m

_PUBLISHER = -1
_ATTEMPTS = 2
_STALL_S = 5.0
"""How long a peer may be silent; it has what it is asked for, unlike a publisher that is still staging."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the version goes: a slot of ours, its generation there (0: others can't read it), the address of each entry."""

    slot: int
    generation: int
    destinations: Uint64s


class Shares:
    """Made when a version is announced; `order` what the coordinator says, then `wait` until all is there.

    `is_over()`: the version, or the session, has ended. `await_seal(give_up)` blocks for the digests of the plan's moves, or
    raises. `changed` guards the fields.
    """

    def __init__(
        self,
        session: Session,
        announce: m.Announce,
        place: Place,
        *,
        timeout_s: float,
        changed: threading.Condition,
        is_over: Callable[[], bool],
        await_seal: Callable[[Callable[[], bool]], Uint64s],
        send: Callable[[m.FromMember], None],
    ) -> None:
        self._session, self._announce, self._place = session, announce, place
        self.version = announce.version
        self._timeout_s, self._changed = timeout_s, changed
        self._has_ended, self._await_seal, self._send = is_over, await_seal, send
        self._held = np.zeros(len(session.matches.wants), bool)
        self._running: dict[tuple[int, int], ctypes.c_uint32] = {}
        self._writing: set[tuple[int, int]] = set()
        self._busy = 0
        self._has_moved = False
        self._is_stopped = False
        self.failure: WeightSyncError | None = None
        self.relayed_bytes = 0
        self.transports: set[str] = set()

    def order(self, fetch: m.Fetch, peer: m.Peer | None) -> None:
        """Called locked: read a share; what was still being read of it is given up."""
        key = (fetch.first, fetch.stop)
        if (
            self._is_stopped
            or not 0 <= fetch.first < fetch.stop <= len(self._held)
            or self._held[slice(*key)].all()
        ):
            return
        self._cancel(key)
        cancel = self._running[key] = ctypes.c_uint32(0)
        self._busy += 1
        self._session.pool.submit(self._run, fetch, peer, cancel)

    def wait(self) -> Uint64s:
        """Block until every share is verified; returns the digests of the plan's moves. Raises what ended it. Nothing is
        written any more after that."""
        try:
            with self._changed:
                while not self._held.all():
                    self._has_moved, received = False, self._session.received
                    moved = self._changed.wait_for(
                        lambda: self._has_moved or self.failure or self._has_ended(), self._timeout_s
                    )
                    if self.failure is not None:
                        raise self.failure
                    if self._has_ended():
                        raise EvictedError(f"version {self._announce.version}: given up")
                    if not moved and self._session.received == received:
                        raise SyncTimeoutError(
                            f"version {self._announce.version}: nothing arrived within {self._timeout_s:g} s"
                        )
            return self._await_seal(self._has_ended)
        finally:
            self.stop()

    def stop(self) -> None:
        """Give up what is being read, and wait until nothing is."""
        with self._changed:
            self._is_stopped = True
            for key in list(self._running):
                self._cancel(key)
            self._changed.wait_for(lambda: not self._busy)

    def _cancel(self, key: tuple[int, int]) -> None:
        running = self._running.pop(key, None)
        if running is not None:
            running.value = 1

    # ---- in a thread of the pool

    def _run(self, fetch: m.Fetch, peer: m.Peer | None, cancel: ctypes.c_uint32) -> None:
        error: BaseException | None = None
        key = (fetch.first, fetch.stop)
        with self._changed:  # an earlier read of the share, given up, may be in the middle of a write
            self._changed.wait_for(lambda: key not in self._writing)
            self._writing.add(key)
        try:
            share = self._read(fetch, peer, cancel)
        except BaseException as raised:  # a thread's edge: kept, and sorted out below
            error = raised
        with self._changed:
            self._busy -= 1
            self._writing.discard(key)
            self._has_moved = True
            if not cancel.value and not (error and self._has_ended()):
                self._running.pop(key, None)
                if error is None:
                    self._held[fetch.first : fetch.stop] = True
                    self.relayed_bytes += share.plan.size_bytes if peer is not None else 0
                    self.transports.update(path.transport for path, _, _ in share.parts)
                    self._send(m.Fetched(
                        fetch.epoch, fetch.version, fetch.first, fetch.stop, self._place.slot, self._place.generation
                    ))  # fmt: skip
                elif peer is not None:
                    self._send(m.Unfetched(
                        fetch.epoch, fetch.version, fetch.first, fetch.stop, fetch.source, repr(error)[:500]
                    ))  # fmt: skip
                else:
                    self.failure = (
                        error if isinstance(error, WeightSyncError) else TransportError(repr(error))
                    )
            self._changed.notify_all()
        if error is not None and peer is not None and not cancel.value:
            self._session.drop(peer.number)

    def _read(self, fetch: m.Fetch, peer: m.Peer | None, cancel: ctypes.c_uint32) -> Share:
        """Read and verify one share."""
        session, place = self._session, self._place
        if cancel.value:
            raise TransportError("given up before it began")
        if peer is None and fetch.source != _PUBLISHER:
            raise TransportError(f"peer {fetch.source} was never introduced")
        share = session.share(peer, fetch.first, fetch.stop)
        plan = share.plan
        targets = place.destinations[plan.wants] + plan.deltas.astype(np.uint64)
        digests = np.zeros(len(plan.wants), np.uint64)
        slot, generation = (
            (self._announce.slot, self._announce.generation)
            if peer is None
            else (fetch.slot, fetch.generation)
        )
        for _ in range(_ATTEMPTS):
            session.read(
                share,
                slot,
                generation,
                targets,
                digests,
                self._timeout_s if peer is None else _STALL_S,
                cancel,
            )
            seal = self._await_seal(lambda: bool(cancel.value))
            if peer is None:
                expected = seal[session.rows(fetch.first, fetch.stop)]
            else:
                expected = session.of_wants(seal)[fetch.first : fetch.stop]
            wrong = mismatches(plan, digests, expected)
            if not wrong:
                return share
        raise wrong_digests(fetch.version, wrong)
