"""The background thread that receives versions: pull, read, verify, hand to the gate."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weightsync.errors import (
    EvictedError,
    LayoutError,
    SyncTimeoutError,
    TransportError,
    VersionError,
    WeightSyncError,
)
from weightsync.subscriber.session import Session, mismatches, wrong_digests
from weightsync.subscriber.shares import Place, Shares
from weightsync.subscriber.votes import Votes
from weightsync.versioning.slots import SlotState, SlotTable
from weightsync.versioning.swap.mode import SwapMode, Uint64s
from weightsync.wire import messages as m
from weightsync.wire.layout import Boxes
from weightsync.wire.plan import Plan

_ATTEMPTS = 2
_RETRY_S = 0.2
_IDLE_S = 1.0  # a version that waits this long for a step makes way for a newer one


@dataclass(frozen=True, slots=True)
class Filled:
    """A version is here and right: the digests of its moves, and how it came."""

    digests: Uint64s
    transport: str
    relayed_bytes: int = 0


class Receiver:
    """Owns the session and the slots. `changed` guards both, and every field; callbacks are called without it.

    `open_session` makes a session from a welcome and a way to ask for a plan; `send` queues a message to the publisher;
    `on_verified(version)`, `on_failed(version, error)`, `on_orders()` (the replica decided something) and
    `on_undo(epoch, version)` tell the subscriber; `rejoin` asks for a fresh welcome. `open_slot(number)` lets
    others read what a slot will hold, under the generation that it returns (0: they can't). `votes`: this rank's part in a
    replica.
    """

    def __init__(
        self,
        mode: SwapMode,
        table: SlotTable,
        *,
        verify_full: bool,
        timeout_s: float,
        open_session: Callable[[m.Welcome, Callable[[Boxes], m.Plan]], Session],
        send: Callable[[m.FromMember], None],
        on_session: Callable[[Session | None], None],
        on_verified: Callable[[int, float], None],
        on_failed: Callable[[int, WeightSyncError], None],
        on_orders: Callable[[], None],
        on_undo: Callable[[int, int], None],
        rejoin: Callable[[], None],
        open_slot: Callable[[int], int],
        votes: Votes,
        changed: threading.Condition,
    ) -> None:
        self.changed = changed
        self.table = table
        self.session: Session | None = None
        self.fatal: BaseException | None = None
        self._mode = mode
        self._verify_full, self._timeout_s = verify_full, timeout_s
        self._open_session, self._send, self._rejoin, self._open_slot = open_session, send, rejoin, open_slot
        self._on_session, self._on_verified, self._on_failed = on_session, on_verified, on_failed
        self._on_orders, self._on_undo, self.votes = on_orders, on_undo, votes
        self._welcome: m.Welcome | None = None
        self._announce: m.Announce | None = None
        self._plan: m.Plan | None = None
        self._announced_plan: m.Plan | None = None
        self._no_plan: str | None = None
        self._seal: m.Seal | None = None
        self._abort: str | None = None
        self._peers: dict[int, m.Peer] = {}
        self._fetches: list[m.Fetch] = []
        self._shares: Shares | None = None
        self._newest_tried = 0
        self._sources: dict[int, dict[str, dict[str, str]]] = {}
        self._is_pulling = False
        self._verified_at = 0.0
        self._cancel = ctypes.c_uint32(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="weightsync-receiver", daemon=True)
        self._thread.start()

    # ---- from the link's thread

    def take(self, message: m.ToMember) -> None:
        """One message of the publisher."""
        with self.changed:
            match message:
                case m.Welcome():
                    self._welcome, self._announce, self._seal = message, None, None
                    self._plan, self._no_plan, self._peers = None, None, {}
                    self._cancel.value = 1  # whatever is being read belongs to an older welcome
                case m.Plan():
                    self._plan = message
                case m.NoPlan():
                    self._no_plan = message.reason
                case m.Announce():
                    self._overtake(message)
                case m.Peer():
                    self._peers[message.number] = message
                case m.PeerGone():
                    self._peers.pop(message.number, None)
                    if self.session is not None and not self._stopping:
                        self.session.forget(message.number)
                case m.Fetch() if self._announce and message.version == self._announce.version:
                    self._order(message)
                case m.Seal() if self._announce and message.version == self._announce.version:
                    self._seal = message
                case m.Admit() | m.Grant() | m.Commit() | m.Cancel():
                    self.votes.take(message)
                case m.Abort() if self._announce and message.version == self._announce.version:
                    self._abort = message.reason
                    self._cancel.value = 1
            self.changed.notify_all()
            if isinstance(message, m.Admit | m.Grant | m.Commit | m.Cancel):
                self.stand()
        if isinstance(message, m.Commit):
            self._on_orders()
        elif isinstance(message, m.Undo):
            self._on_undo(message.epoch, message.version)

    def _overtake(self, announce: m.Announce) -> None:
        """Called locked: read this version next, and none that was announced before."""
        before = self._announce
        if before is not None and before.version != announce.version:
            self._send(m.Release(before.epoch, before.version))
            self._cancel.value = 1
        if before is None or before.version != announce.version:
            self._fetches = []
        self._announce, self._seal, self._abort = announce, None, None
        self._announced_plan = self._plan
        self._is_pulling = False

    def _order(self, fetch: m.Fetch) -> None:
        """Called locked: a share to read, at once or when its version's turn comes."""
        if self._shares is None or self._shares.version != fetch.version:
            self._fetches.append(fetch)
        else:
            self._shares.order(fetch, self._peers.get(fetch.source))

    def stand(self) -> None:
        """Called locked: tell the coordinator where this rank stands, if it votes."""
        if self.votes.is_voting and self.session is not None:
            if self._mode.borrows_slots:
                self._let_go_unneeded()
            self._send(self.votes.stand(self.session.epoch, self._announce is None and self._has_room()))

    def lose(self, reason: str) -> None:
        """The publisher is gone: stop reading, keep serving."""
        with self.changed:
            self._abort = self._abort or reason
            self._cancel.value = 1
            self._is_pulling = False
            self.changed.notify_all()

    def pull_older(self) -> None:
        """Ask for whatever version there is, older ones too."""
        with self.changed:
            self._newest_tried, self._is_pulling = 0, False
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self._stopping = True
            self._cancel.value = 1
            self.changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=30.0)
        if self.session is not None:
            self.session.close()

    # ---- the thread

    def _run(self) -> None:
        try:
            while True:
                with self.changed:
                    work = self._next_work()
                if work is None:
                    return
                if isinstance(work, m.Welcome):
                    self._begin_session(work)
                else:
                    self._receive(work)
        except BaseException as error:  # a thread's edge: kept, raised to whoever waits
            with self.changed:
                self.fatal = error
                self.changed.notify_all()

    def _next_work(self) -> m.Welcome | m.Announce | None:
        while not self._stopping:
            if self._welcome is not None:
                welcome, self._welcome = self._welcome, None
                return welcome
            announce = self._announce
            if announce is not None and self._abort is None and self.session is not None:
                if self._is_to_read(announce):
                    self._cancel.value = 0
                    return announce
                self._announce = None
            if self._abort is not None:
                self._announce, self._abort = None, None
            self._pull_if_idle()
            self.changed.wait(_IDLE_S if self.table.find(SlotState.VERIFIED) else None)
        return None

    def _is_to_read(self, announce: m.Announce) -> bool:
        if not announce.ballot:
            return announce.version > self._newest_tried
        if self.votes.grant(announce, self.table, is_idle=self._is_idle()):
            return True
        self._announce = None
        self._send(m.Release(announce.epoch, announce.version))
        self.stand()
        return False

    def _pull_if_idle(self) -> None:
        if self.votes.is_voting:
            return
        if self.session is not None and self._announce is None and not self._is_pulling and self._has_room():
            self._is_pulling = True
            self._send(m.Pull(self.session.epoch, self._newest_tried))

    def _has_room(self) -> bool:
        if self._mode.borrows_slots:  # two pending ones would starve the publisher
            return not self.table.find(SlotState.VERIFIED)
        if self.votes.is_voting:
            return self.votes.spare_slot(self.table, is_idle=self._is_idle()) is not None
        return self.table.has_room() or self._is_idle()

    def _is_idle(self) -> bool:
        return bool(self.table.find(SlotState.VERIFIED)) and time.monotonic() - self._verified_at > _IDLE_S

    def _let_go_unneeded(self) -> None:
        """What was borrowed and can't go live, since its ballot was cancelled, goes back to the publisher."""
        for number in self.table.find(SlotState.VERIFIED):
            slot = self.table.slots[number]
            if self.votes.may_refill(slot):
                self.table.move(number, SlotState.EMPTY)
                self._send(m.Release(slot.epoch, slot.version))
        self.votes.forget_absent(self.table)

    def _begin_session(self, welcome: m.Welcome) -> None:
        with self.changed:
            old, self.session = self.session, None
            self._newest_tried, self._is_pulling, self._abort = 0, False, None
            if self._mode.borrows_slots:
                self._let_go(welcome.offers)
            self.votes.enter(welcome.session, self.table)
        if old is not None:
            self._on_session(None)  # nobody may watch a descriptor that is closed now
            old.close()
        try:
            session = self._open_session(welcome, lambda boxes: self._ask_plan(welcome.epoch, boxes))
        except WeightSyncError as error:
            with self.changed:
                if self._welcome is not None or self._stopping:
                    return  # overtaken
                self.fatal = None if isinstance(error, TransportError) else error
                self.changed.notify_all()
            self._on_failed(0, error)
            if not isinstance(error, LayoutError):
                time.sleep(_RETRY_S)
                self._rejoin()
            return
        with self.changed:
            self.session, self.fatal = session, None
            ranks = np.unique(np.frombuffer(session.recipe.message.ranks, "<u4")).tolist()
            self._sources = {rank: welcome.offers[rank] for rank in ranks}
            self.changed.notify_all()
        self._on_session(session)
        with self.changed:
            self.stand()

    def _ask_plan(self, epoch: int, boxes: Boxes) -> m.Plan:
        """Say what is wanted and wait for the plan. Raises LayoutError if it can't be had."""
        self._send(m.Wants(epoch, boxes))
        with self.changed:
            self.changed.wait_for(
                lambda: self._plan or self._no_plan or self._welcome or self._abort or self._stopping,
                self._timeout_s,
            )
            if self._plan is not None:
                return self._plan
            if self._no_plan is not None:
                raise LayoutError(self._no_plan)
            raise TransportError(f"the publisher sent no plan: {self._abort or 'it is silent'}")

    def _let_go(self, offers: list[dict[str, dict[str, str]]]) -> None:
        """Start again with the slots of a new publisher. Of the same one, the slot that serves is still held."""
        is_same = all(offers[rank : rank + 1] == [offer] for rank, offer in self._sources.items())
        kept = [(number, self.table.slots[number]) for number in self.table.find(SlotState.ACTIVE) if is_same]
        if is_same:
            for slot in self.table.slots:
                if slot.state not in (SlotState.EMPTY, SlotState.ACTIVE):
                    self._send(m.Release(slot.epoch, slot.version))
        self.table.forget()
        for number, slot in kept:
            self.table.slots[number] = slot
            self._newest_tried = 0 if self.table.is_bad(number) else slot.version

    def _receive(self, announce: m.Announce) -> None:
        with self.changed:
            session = self.session
            if session is None:
                return
            number = self._take_slot(announce)
            generation = self._open_slot(number)
        started = time.monotonic()
        try:
            filled = self._fill(session, announce, number, generation)
            self._keep(session, announce, number, filled)
        except EvictedError:
            self._give_up(number, announce, SlotState.EMPTY)
        except TransportError as error:
            self._give_up(number, announce, SlotState.EMPTY)
            if not self._cancel.value:
                self._on_failed(announce.version, error)
                self._rejoin()
        except VersionError as error:
            self._refuse(session, number, announce, error)
        except SyncTimeoutError as error:
            self._refuse(session, number, announce, error)
        else:
            took = time.monotonic() - started
            borrows = self._mode.borrows_slots
            slot = number if generation else -1
            self._send(m.Verified(
                session.epoch, announce.version, took, filled.transport, borrows, slot, generation, filled.relayed_bytes
            ))  # fmt: skip
            with self.changed:
                self.stand()
            self._on_verified(announce.version, took)

    def _keep(self, session: Session, announce: m.Announce, number: int, filled: Filled) -> None:
        """The version is verified. Raises EvictedError if it was rolled back meanwhile."""
        with self.changed:
            self._newest_tried = announce.version
            if self.table.is_bad(number):
                self._send(m.Release(announce.epoch, announce.version))
                raise EvictedError(f"version {announce.version} was rolled back")
            if self._announce is announce:
                self._announce = None
            self.table.move(number, SlotState.VERIFIED)
            slot = self.table.slots[number]
            slot.digests, slot.recipe = filled.digests, session.recipe
            self._verified_at = time.monotonic()
            self.votes.verified(announce.epoch, announce.version)

    def _take_slot(self, announce: m.Announce) -> int:
        if announce.ballot and not self._mode.borrows_slots:
            return self.votes.take_slot(self.table, announce.epoch, announce.version, is_idle=self._is_idle())
        if not self._mode.borrows_slots:
            return self.table.take(announce.epoch, announce.version)
        if self.table.slots[announce.slot].state is SlotState.RETIRED:
            self.table.move(announce.slot, SlotState.EMPTY)
        self.table.take_this(announce.slot, announce.epoch, announce.version)
        return announce.slot

    def _fill(self, session: Session, announce: m.Announce, number: int, generation: int) -> Filled:
        """Read and verify. Raises what `_receive` sorts out."""
        if self._announced_plan is not None and self._announced_plan is not session.recipe.message:
            session.use(self._announced_plan)
        session.begin()
        if announce.in_shares and not self._mode.borrows_slots:
            return self._fill_in_shares(session, announce, number, generation)
        return Filled(self._fill_alone(session, announce, number), session.transport)

    def _fill_in_shares(self, session: Session, announce: m.Announce, number: int, generation: int) -> Filled:
        moves = len(session.plan.wants)
        shares = Shares(
            session, announce, Place(number, generation, self._mode.destinations(number)),
            timeout_s=self._timeout_s, changed=self.changed, send=self._send,
            is_over=lambda: bool(self._abort or self._stopping or self._welcome or self._cancel.value),
            await_seal=lambda give_up: self._await_seal(announce, moves, give_up),
        )  # fmt: skip
        with self.changed:
            self._shares, waiting, self._fetches = shares, self._fetches, []
            for fetch in waiting:
                shares.order(fetch, self._peers.get(fetch.source))
        try:
            expected = shares.wait()
        finally:
            with self.changed:
                self._shares = None
        if self._verify_full:
            wrong = mismatches(session.plan, self._digests_of(session, number), expected)
            if wrong:
                raise wrong_digests(announce.version, wrong)
        return Filled(expected, "+".join(sorted(shares.transports)), shares.relayed_bytes)

    def _digests_of(self, session: Session, number: int) -> Uint64s:
        """Of what lies in a slot now."""
        plan = session.plan
        digests = np.zeros(len(plan.wants), np.uint64)
        session.verifier.run(self._targets(plan, number), None, digests, threads=self._mode.threads)
        return digests

    def _targets(self, plan: Plan, number: int) -> Uint64s:
        return self._mode.destinations(number)[plan.wants] + plan.deltas.astype(np.uint64)

    def _fill_alone(self, session: Session, announce: m.Announce, number: int) -> Uint64s:
        plan = session.plan
        wrong: list[str] = []
        for _ in range(_ATTEMPTS):
            digests = np.zeros(len(plan.wants), np.uint64)
            if not self._mode.borrows_slots:
                session.read(
                    None, announce.slot, announce.generation, self._targets(plan, number), digests, self._timeout_s,
                    self._cancel,
                )  # fmt: skip
            expected = self._await_seal(announce, len(plan.wants), lambda: bool(self._cancel.value))
            if self._verify_full:
                digests = self._digests_of(session, number)
            elif self._mode.borrows_slots:
                return expected  # the very bytes that were digested while they were staged, sealed and leased
            wrong = mismatches(plan, digests, expected)
            if not wrong:
                return expected
        raise wrong_digests(announce.version, wrong)

    def _await_seal(self, announce: m.Announce, moves: int, give_up: Callable[[], bool]) -> Uint64s:
        with self.changed:
            got = self.changed.wait_for(
                lambda: (
                    self._seal is not None
                    or self._abort is not None
                    or self._stopping
                    or self._welcome is not None
                    or give_up()
                ),
                self._timeout_s,
            )
            if self._seal is not None and self._seal.version == announce.version:
                if len(self._seal.digests) != 8 * moves:
                    raise VersionError(
                        f"version {announce.version}: {len(self._seal.digests)} bytes of digests, expected {8 * moves}"
                    )
                return np.frombuffer(self._seal.digests, "<u8").astype(np.uint64)
            if got:
                raise EvictedError(f"version {announce.version}: {self._abort or 'given up'}")
        raise SyncTimeoutError(f"version {announce.version} was not sealed within {self._timeout_s:g} s")

    def _give_up(self, number: int, announce: m.Announce, to: SlotState) -> None:
        with self.changed:
            self.table.move(number, to)
            if self._announce is announce:
                self._announce, self._abort = None, None
            if to is SlotState.EMPTY:
                self.stand()
        if self._mode.borrows_slots:
            self._send(m.Release(announce.epoch, announce.version))

    def _refuse(self, session: Session, number: int, announce: m.Announce, error: WeightSyncError) -> None:
        self._give_up(number, announce, SlotState.FAILED)
        with self.changed:
            self.table.move(number, SlotState.EMPTY)
            self._newest_tried = announce.version
            self.votes.refuse(announce.epoch, announce.version)
            self.stand()
        self._send(m.Failed(session.epoch, announce.version, str(error)))
        self._on_failed(announce.version, error)
