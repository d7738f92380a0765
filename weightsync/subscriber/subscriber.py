"""The subscriber: what an inference server embeds."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from weightsync.config import default_threads
from weightsync.errors import (
    ConfigError,
    NotReadyError,
    SyncTimeoutError,
    UsageError,
    WeightSyncError,
)
from weightsync.subscriber.holder import Holder
from weightsync.subscriber.receiver import Receiver
from weightsync.subscriber.session import (
    Choice,
    Session,
    mismatches,
    open_session,
    verifier_of,
    wants_of,
)
from weightsync.subscriber.switch import Live, Switch
from weightsync.subscriber.votes import Votes
from weightsync.tensors import Source, find_tensors, ignored_tensors
from weightsync.versioning.agreement import Agreement, place_in
from weightsync.versioning.gate import Gate, Step
from weightsync.versioning.slots import Slot, SlotState, SlotTable
from weightsync.versioning.swap.mode import SwapMode, byte_strides
from weightsync.versioning.swap.modes import swap_mode
from weightsync.wire import messages as m
from weightsync.wire.address import host_towards, parse_address, require_safe
from weightsync.wire.keys import load_subscriber_keys
from weightsync.wire.layout import Boxes
from weightsync.wire.link import Link
from weightsync.wire.plan import Plan
from weightsync.wire.registry import default_transports
from weightsync.wire.transport import Environment

log = logging.getLogger("weightsync")
SwapName = Literal["remap", "copy", "flip", "adopt"]
_BORROWED_SLOTS = 64
_HISTORY = 4096
_JOIN_ATTEMPTS = 3


@dataclass(slots=True)
class SubscriberStats:
    """Counters of one subscriber since it was made; the deques keep the newest 4096 values, in seconds."""

    versions_verified: int = 0
    versions_live: int = 0
    versions_failed: int = 0
    bytes_received: int = 0
    transport: str = ""
    last_error: str | None = None
    swap_pauses_s: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    read_s: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))


class Subscriber:
    """Follows the publisher at `address` and keeps the tensors of `source` at its newest verified version.

    `swap`: how a version goes live. `remap` exchanges page tables (default), `copy` writes in place (storage an engine
    owns), `flip` rebinds tensors, `adopt` maps the publisher's slot itself (same host). All but `copy` move the tensors
    into memory of ours at `start()`. `transport`: `auto` tries the fastest first; a name never falls back. `slots`:
    versions held, two at least; a third makes `rollback()` possible at any time. `verify`: `fused` digests while
    receiving (with `adopt`: trusts the publisher's seal); `full` reads everything again. `allow_missing`, `ignore`: name
    patterns wanted here but not published, and the reverse. `initial_version`: the tensors' own content counts as this
    version. `timeout_s`: for joining, for the first version and for a stalled publisher. `drain_timeout_s`: how long a
    step waits for others to leave before a swap.

    A server of several ranks (tensor, pipeline or expert parallel) is a *replica*: all its ranks go to a version at the same
    step boundary, or none does. `group`: a torch.distributed process group (gloo) of its ranks; `step()` agrees over it,
    and rank, ranks and the replica's name follow from it. An engine that drives all ranks itself gives each the same
    `replica` name, its `rank` and how many `ranks` there are, and calls `switch()` between steps; see `proposal`.

    `relay`: let other members that want the same tensors read verified parts from here, where the publisher asks for that
    (see `Publisher(relay=)`). `data_host`: the address of this host's network interface that they shall use.

    `on_ready(version)`, `on_live(version, pause_s)`, `on_failed(version, error)` are called on the thread where it
    happens, must not block, and what they raise is only logged; version 0 in `on_failed` means that no session could be opened.
    """

    def __init__(
        self,
        address: str,
        source: Source,
        *,
        swap: SwapName = "remap",
        transport: str = "auto",
        slots: int = 2,
        verify: Literal["fused", "full"] = "fused",
        allow_missing: Iterable[str] = (),
        ignore: Iterable[str] = (),
        initial_version: int | None = None,
        name: str | None = None,
        threads: int | None = None,
        replica: str | None = None,
        rank: int = 0,
        ranks: int = 1,
        group: Any = None,
        relay: bool = True,
        data_host: str | None = None,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        timeout_s: float = 60.0,
        drain_timeout_s: float = 5.0,
        on_ready: Callable[[int], None] | None = None,
        on_live: Callable[[int, float], None] | None = None,
        on_failed: Callable[[int, WeightSyncError], None] | None = None,
    ) -> None:
        if slots < 2:
            raise ConfigError(f"slots={slots}: at least 2 are needed, one to serve while the other is filled")
        if verify not in ("fused", "full"):
            raise ConfigError(f"verify={verify!r}: choose fused or full")
        self._address = parse_address(address)
        require_safe(self._address, has_keys=keys is not None, insecure=insecure)
        self._keys = load_subscriber_keys(keys) if keys is not None else None
        self._choice = Choice(transport, tuple(allow_missing), tuple(ignore))
        self._group, self._replica, self._rank, self._ranks = group, replica, rank, ranks
        if group is not None:
            self._replica, self._rank, self._ranks = place_in(group, replica)
        if not 0 <= self._rank < self._ranks or (self._ranks > 1 and self._replica is None):
            raise ConfigError(
                f"rank={rank}, ranks={ranks}, replica={replica!r}: ranks of one replica have one name, and are "
                "numbered from 0; or pass group="
            )
        if self._ranks > 1 and swap == "adopt":
            raise ConfigError('swap="adopt" is for servers of one rank; choose remap')
        threads = threads or default_threads()
        self._entries = find_tensors(source, ignore=self._choice.ignore)
        self._role = "server"
        self._mode = self._make_mode(slots, swap, ignored_tensors(source, self._choice.ignore), threads)
        self._table = self._new_table(slots, initial_version)
        self._verify_full = verify == "full"
        self._name = name or f"{socket.gethostname()}:{os.getpid()}"
        self._instance = secrets.token_hex(16)
        self._timeout_s = timeout_s
        self._on_ready, self._on_live, self._on_failed = on_ready, on_live, on_failed
        self._environment = Environment(
            None, self._keys, self._address.host if self._address.scheme == "tcp" else "127.0.0.1", self._instance,
            threads, lambda instance: None,
        )  # fmt: skip
        self._votes = Votes(self._mode.is_separate, self._ranks == 1, initial_version)
        self._changed = threading.Condition()
        self._switch = Switch(
            self._mode, self._table, self._votes, None if initial_version is None else Live(0, initial_version),
            changed=self._changed, send=self._send, stand=self._stand, on_live=self._went_live, on_failed=self._failed,
        )  # fmt: skip
        self._gate = Gate(self._switch.swap, drain_timeout_s)
        self._may_relay, self._data_host = relay, data_host
        self._holder: Holder | None = None
        self._agreement: Agreement | None = None
        self._plan: Plan | None = None
        self._receiver: Receiver | None = None
        self._link: Link | None = None
        self._is_closed = False
        self.stats = SubscriberStats()

    # ---- life

    @torch.no_grad()
    def start(self, timeout_s: float | None = None) -> Subscriber:
        """Join the publisher, match layouts, take over the tensors, and prefetch in the background from here on.

        Raises LayoutError listing every disagreement, SyncTimeoutError if no publisher with a layout answers, and
        TransportError if no data path works. After an error the subscriber is closed.
        """
        if self._receiver is not None or self._is_closed:
            raise UsageError("start() was called before; make a new subscriber")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        failures: list[WeightSyncError] = []

        def failed(version: int, error: WeightSyncError) -> None:
            failures.append(error)
            self._failed(version, error)

        receiver = self._receiver = Receiver(
            self._mode, self._table,
            verify_full=self._verify_full, timeout_s=self._timeout_s, open_session=self._open, send=self._send,
            on_session=self._joined, on_verified=self._verified, on_failed=failed, on_orders=self._decided,
            on_undo=self._undo, rejoin=self._rejoin, open_slot=self._open_slot, votes=self._votes, changed=self._changed,
        )  # fmt: skip
        self._link = Link(
            self._address, self._keys, hello=self._hello, heartbeat=self._heartbeat,
            on_message=receiver.take, on_lost=receiver.lose,
        )  # fmt: skip
        if self._group is not None:
            self._agreement = Agreement(self._group, self._timeout_s)
        self._link.start()
        with receiver.changed:
            receiver.changed.wait_for(
                lambda: receiver.session or receiver.fatal or len(failures) >= _JOIN_ATTEMPTS, timeout_s
            )
            session, fatal = receiver.session, receiver.fatal
        if session is None:
            refusal = self._link.refusal
            self.close()
            if fatal is not None:
                raise fatal
            if failures:
                raise failures[-1]
            raise SyncTimeoutError(_no_answer(self._address.text, timeout_s, refusal, self._keys is not None))
        return self

    def close(self) -> None:
        """Leave. The tensors keep the version they have."""
        if self._is_closed:
            return
        self._is_closed = True
        self._gate.shut()
        if self._receiver is not None:
            self._receiver.close()
        if self._holder is not None:
            self._holder.close()
        self._mode.close()
        if self._link is not None:
            self._link.close()

    def __enter__(self) -> Subscriber:
        return self if self._receiver is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- serving

    def step(self) -> Step:
        """Pins one version for one forward pass: `with sub.step() as version:` (or `async with`).

        On entry a pending verified version goes live, once no other step is open. Before the first version it waits up to
        `timeout_s`, then raises NotReadyError. With `group=` this is the step boundary: every rank calls it for the same
        steps, from one thread, and all switch at the same one.
        """
        with self._changed:
            self._votes.commit.require_clean()
        if self._switch.live is None:
            self._await_first()
        if self._agreement is not None:
            self.switch(self._agreement.boundary(self.proposal))
        return self._gate.step(self._label)

    def wait_for(self, version: int, timeout_s: float = 60.0) -> int:
        """Block until the live version is at least `version`; returns it. Makes pending versions live itself while no
        step is open. Raises SyncTimeoutError, and the error that ended the session if there is one."""
        if self._gate.is_inside():
            raise UsageError("wait_for() inside a step would wait for that step; leave it first")
        receiver = self._require_started()
        deadline = time.monotonic() + timeout_s
        while True:
            self._gate.adopt_pending()
            with receiver.changed:
                if self._has(version):
                    return self._label()
                if receiver.fatal is not None:
                    raise receiver.fatal
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SyncTimeoutError(self._why_not(version, timeout_s))
                # verified and still not live: another thread's step is open, and its end is not announced here
                receiver.changed.wait(min(left, 0.001 if self._table.find(SlotState.VERIFIED) else 0.5))

    async def wait_for_async(self, version: int, timeout_s: float = 60.0) -> int:
        """As `wait_for`, without blocking the event loop."""
        return await asyncio.to_thread(self.wait_for, version, timeout_s)

    def rollback(self, timeout_s: float = 5.0) -> int:
        """Make the version before the live one live again; returns it. Local: other servers are not asked. The version
        rolled back from is not adopted again; a newer one is.

        Raises UsageError if no older version is held (raise `slots`), SyncTimeoutError if steps stay open.
        """
        self._require_started()
        if self._votes.is_voting:
            raise UsageError("this server's replica decides together; roll back with Publisher.rollback()")
        with self._gate.exclusive(timeout_s):
            return self._switch.back()

    @property
    def proposal(self) -> int:
        """The newest decision of this rank's replica that is known here, as a number; 0: none. An engine that drives all
        ranks takes the highest of them and calls `switch` with it on every rank, between two steps."""
        with self._changed:
            return self._votes.commit.proposal

    def switch(self, number: int, timeout_s: float = 5.0) -> int | None:
        """Follow decision `number` of the replica: every rank calls it at the same step boundary. Returns the version that is
        live from here on; None before the first.

        Raises VersionError if this rank can't follow; it serves no step any more then, as its peers may serve another
        version. Raises SyncTimeoutError if steps stay open.
        """
        self._require_started()
        with self._gate.exclusive(timeout_s):
            after = self._switch.follow(number)
        if after is not None:
            after()
        return self.version

    def check(self) -> list[str]:
        """Digest the live weights as they are now and compare with the manifest of the version they claim to be. Call it
        inside a step. Names of tensors that differ; empty when all is right (or the version is the initial one)."""
        if not self._gate.is_inside():
            raise UsageError("check() needs a pinned version; call it inside `with sub.step():`")
        live = self._switch.live
        if live is None or live.digests is None or live.recipe is None:
            return []
        tensors = [entry.tensor for entry in self._entries]
        plan = live.recipe.plan(wants_of(self._entries, [byte_strides(tensor) for tensor in tensors]))
        addresses = np.fromiter((tensor.data_ptr() for tensor in tensors), np.uint64, len(tensors))
        digests = np.zeros(len(plan.wants), np.uint64)
        places = addresses[plan.wants] + plan.deltas.astype(np.uint64)
        verifier_of(plan).run(places, None, digests, threads=self._mode.threads)
        return mismatches(plan, digests, live.digests)

    @property
    def version(self) -> int | None:
        """The live version; None before the first."""
        return None if self._switch.live is None else self._switch.live.version

    @property
    def epoch(self) -> int | None:
        """The epoch of the live version."""
        return None if self._switch.live is None else self._switch.live.epoch

    @property
    def received_bytes(self) -> int:
        """Bytes received of the version being read now."""
        session = None if self._receiver is None else self._receiver.session
        return 0 if session is None else session.received

    # ---- steps

    def _make_mode(self, slots: int, swap: str, ignored: dict[str, torch.Tensor], threads: int) -> SwapMode:
        return swap_mode(swap)(self._entries, ignored, slots, threads)

    def _new_table(self, slots: int, initial_version: int | None) -> SlotTable:
        if self._mode.borrows_slots:
            return SlotTable(_BORROWED_SLOTS, keep=slots - 2)
        if self._mode.is_separate:
            return SlotTable(slots - 1, keep=slots - 2)
        table = SlotTable(slots, keep=slots - 2)
        table.slots[0] = Slot(SlotState.ACTIVE, 0, -1 if initial_version is None else initial_version)
        return table

    def _label(self) -> int:
        return self._switch.label(self.stats.last_error)

    def _decided(self) -> None:
        """The replica decided something; who is the whole of it switches at its next step boundary."""
        if self._ranks == 1:
            self._gate.request_swap()
        with self._changed:
            self._changed.notify_all()

    def _undo(self, epoch: int, version: int) -> None:
        if self._switch.undo(epoch, version):
            self._gate.request_swap()
        if self._switch.is_stranded:
            self._require_started().pull_older()

    def _stand(self) -> None:
        if self._receiver is not None:
            self._receiver.stand()

    def _went_live(self, version: int, pause_s: float) -> None:
        self.stats.versions_live += 1
        self.stats.swap_pauses_s.append(pause_s)
        _call(self._on_live, version, pause_s)

    def _verified(self, version: int, took_s: float) -> None:
        self.stats.versions_verified += 1
        self.stats.read_s.append(took_s)
        if self._plan is not None and not self._mode.borrows_slots:
            self.stats.bytes_received += self._plan.size_bytes
        if not self._votes.is_voting:
            self._gate.request_swap()
        with self._changed:
            self._changed.notify_all()
        _call(self._on_ready, version)

    def _failed(self, version: int, error: WeightSyncError) -> None:
        self.stats.versions_failed += 1
        self.stats.last_error = str(error)
        log.warning("%s: %s", self._name, error)
        _call(self._on_failed, version, error)

    def _open(self, welcome: m.Welcome, ask_plan: Callable[[Boxes], m.Plan]) -> Session:
        with torch.no_grad():
            session = open_session(
                welcome, self._entries, self._mode, self._environment, self._choice, ask_plan
            )
        try:
            if welcome.may_serve and self._may_relay and session.is_dense:
                self._serve(session)
        except BaseException:
            session.close()
            raise
        return session

    def _serve(self, session: Session) -> None:
        """Tell where others can read our slots."""
        if self._holder is None and self._mode.slot_memory():
            host = self._data_host or host_towards(self._address)
            wanted = self._choice.transport
            names = default_transports() if wanted == "auto" else (wanted,)
            self._holder = Holder(self._mode, self._environment, host, names)
        if self._holder is not None:
            offsets = self._holder.offsets(self._mode, session.matches)
            self._send(m.Serve(session.epoch, self._holder.offers, offsets.astype("<u8").tobytes()))

    def _open_slot(self, number: int) -> int:
        return 0 if self._holder is None else self._holder.open(number)

    def _joined(self, session: Session | None) -> None:
        """A session began; None: the one there was is about to end."""
        if session is not None:
            self._plan = session.plan
            self.stats.transport = session.transport
        if self._link is not None:
            self._link.watch(() if session is None else session.liveness_fds())
        live = self._switch.live
        if session is not None and live is not None and live.epoch == session.epoch:
            self._send(m.Live(live.epoch, live.version, 0.0))  # rejoined: what was said meanwhile may be lost

    def _rejoin(self) -> None:
        if self._link is not None:
            self._link.rejoin()

    def _send(self, message: m.FromMember) -> None:
        if self._link is not None:
            self._link.send(message)

    def _hello(self, last_epoch: int) -> m.Hello:
        return m.Hello(
            self._name,
            self._instance,
            self._role,
            socket.gethostname(),
            os.getpid(),
            self._mode.name,
            last_epoch,
            self._held() if self._mode.borrows_slots else None,
            self._replica,
            self._rank,
            self._ranks,
        )

    def _held(self) -> list[int]:
        """Versions whose slots at the publisher serve here, or may any moment."""
        return [
            slot.version
            for slot in list(self._table.slots)
            if slot.state not in (SlotState.EMPTY, SlotState.FAILED)
        ]

    def _heartbeat(self, epoch: int) -> m.Heartbeat:
        live = self._switch.live
        version = live.version if live is not None and live.epoch == epoch else None
        with self._changed:
            self._stand()
        state = "filling" if self._table.find(SlotState.FILLING) else "serving" if live else "waiting"
        return m.Heartbeat(epoch, version, state, self.stats.transport)

    def _await_first(self) -> None:
        receiver = self._require_started()

        def is_there() -> bool:
            if self._votes.is_voting:
                return self._votes.commit.ready is not None
            return bool(self._table.find(SlotState.VERIFIED))

        with self._changed:
            self._changed.wait_for(lambda: is_there() or self._switch.live or receiver.fatal, self._timeout_s)
            if not is_there() and self._switch.live is None:
                if receiver.fatal is not None:
                    raise receiver.fatal
                raise NotReadyError(
                    f"no verified version within {self._timeout_s:g} s: {self.stats.last_error or 'none was published'}; "
                    "pass initial_version= to serve the tensors' own content until then"
                )
        if self._ranks == 1:
            self._gate.request_swap()  # the receiver's own request may still be on its way

    def _has(self, version: int) -> bool:
        live, link = self._switch.live, self._link
        return (
            live is not None and live.version >= version and (link is None or live.epoch in (0, link.epoch))
        )

    def _why_not(self, version: int, timeout_s: float) -> str:
        last = f"; last error: {self.stats.last_error}" if self.stats.last_error else ""
        link = self._link
        known = f", publisher epoch {link.epoch}" if link else ""
        return f"version {version} was not live within {timeout_s:g} s; live is {self.version}{known}{last}"

    def _require_started(self) -> Receiver:
        if self._receiver is None:
            raise UsageError("call start() first")
        return self._receiver


def _call(callback: Callable[..., None] | None, *arguments: Any) -> None:
    """A callback of the user's, which must not end the thread that it is called on."""
    try:
        if callback is not None:
            callback(*arguments)
    except Exception:  # the edge to code that is not ours
        log.exception("a weightsync callback failed: %r", callback)


def _no_answer(address: str, timeout_s: float, refusal: str | None, has_keys: bool) -> str:
    keys = (
        " Is this subscriber's key in the publisher's folder, and the publisher's key in this one?"
        if has_keys
        else " If it uses keys, pass keys=DIR."
    )
    return (
        f"{address}: no publisher with registered tensors answered within {timeout_s:g} s"
        + (f" (last answer: {refusal})" if refusal else "")
        + f". Is one running there?{keys}"
    )
