"""The publisher: what a trainer embeds, in every rank."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
import zmq

from weightsync.config import default_threads
from weightsync.errors import ConfigError, LayoutError, UsageError, VersionError, WeightSyncError
from weightsync.publisher.line import Line, LocalLine, RemoteLine
from weightsync.publisher.staging import Staging, WireDType
from weightsync.publisher.ticket import Stage, Ticket
from weightsync.tensors import Source, find_tensors
from weightsync.types import FleetStatus
from weightsync.wire import messages as m
from weightsync.wire.address import host_towards, parse_address, require_safe
from weightsync.wire.coordinator import Coordinator, authenticate
from weightsync.wire.keys import load_publisher_keys
from weightsync.wire.registry import default_transports, make_exporter, transport_names
from weightsync.wire.relay import check_mode
from weightsync.wire.rollout import parse_policy
from weightsync.wire.transport import Environment, Exporter

log = logging.getLogger("weightsync")
WhenFull = Literal["wait", "skip", "evict"]
_REGISTER_S = 60.0


class Publisher:
    """Publishes versions of a model's weights at `address`; one object in each rank of the trainer.

    `rank`, `ranks`: this process and how many there are; each registers the shards that it holds. Rank 0 binds `address`,
    the others connect to it. `coordinator="external"`: a `weightsync coordinator` holds the address, and every rank
    connects. `slots`: whole versions held here; two let staging and reading overlap. `when_full`: what `publish()` does
    when readers hold every slot: `wait` for one (until `timeout_s`), `skip` this version, or `evict` the oldest readers.
    `max_lag`: `publish()` first waits until no member serves a version more than this many behind. `policy`: when a replica
    that is ready goes live: `each` by itself, `together` when all are ready, `canary=N` the first N by name, the others
    after `promote()`, `manual` all after `promote()`. `relay`: members that want the same tensors read most of them from
    each other, so that each byte leaves the trainer once: `auto` those on other hosts, `always`, or `never`.
    `transports`: what is offered, by default `shm`, `zmq`, and `nixl` where it is installed and there is an RDMA device.
    `wire_dtype`: dtype on the wire, for all floats or by name pattern (`{"*": torch.bfloat16}`). `keys`: folder of
    `weightsync keys`; needed, or `insecure=True`, where other hosts can reach the address. `takeover`: replace a publisher
    that is alive there.
    `data_host`: the address of this host's network interface that readers shall use. `epoch`: a fencing token of your
    own, larger for each life; by default from the clock.

    Raises AddressInUseError that names who holds the address, and ConfigError.
    """

    def __init__(
        self,
        address: str,
        *,
        rank: int = 0,
        ranks: int = 1,
        coordinator: Literal["embedded", "external"] = "embedded",
        slots: int = 2,
        when_full: WhenFull = "wait",
        max_lag: int | None = None,
        policy: str = "each",
        relay: Literal["auto", "always", "never"] = "auto",
        transports: Sequence[str] | None = None,
        wire_dtype: WireDType = None,
        threads: int | None = None,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        takeover: bool = False,
        data_host: str | None = None,
        epoch: int | None = None,
        name: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank={rank}: ranks={ranks} are numbered from 0 to {ranks - 1}")
        if coordinator not in ("embedded", "external"):
            raise ConfigError(f"coordinator={coordinator!r}: choose embedded or external")
        if slots < 2:
            raise ConfigError(f"slots={slots}: at least 2 are needed, one to read while the other is filled")
        if when_full not in ("wait", "skip", "evict"):
            raise ConfigError(f"when_full={when_full!r}: choose wait, skip or evict")
        if max_lag is not None and max_lag < 1:
            raise ConfigError(f"max_lag={max_lag}: at least 1; members always lag by the version being sent")
        transports = default_transports() if transports is None else transports
        unknown = [t for t in transports if t not in transport_names()]
        if unknown or not transports:
            raise ConfigError(f"transports {list(transports)}: installed are {', '.join(transport_names())}")
        self._policy, self._relay = str(parse_policy(policy)), check_mode(relay)
        parsed = parse_address(address)
        require_safe(parsed, has_keys=keys is not None, insecure=insecure)
        self._keys = load_publisher_keys(keys) if keys is not None else None
        self._rank, self._ranks, self._takeover = rank, ranks, takeover
        self._name = name or f"{socket.gethostname()}:{os.getpid()}"
        self._when_full, self._max_lag, self._timeout_s = when_full, max_lag, timeout_s
        self._wire_dtype, self._transports, self._slots = wire_dtype, tuple(transports), slots
        self._threads = threads or default_threads()
        self._publishing = threading.Lock()
        self._staging: Staging | None = None
        self._exporters: list[Exporter] = []
        self._tender: threading.Thread | None = None
        self._version = 0
        self._held: dict[int, int] = {}
        self._instance = secrets.token_hex(16)
        self._is_closed = False
        self._coordinator: Coordinator | None = None
        self._context: zmq.Context[Any] | None = None
        self._auth: Any = None
        self._data_host = data_host
        self._line: Line
        if rank == 0 and coordinator == "embedded":
            self._coordinator = Coordinator(
                parsed,
                publisher=self._name,
                epoch=epoch if epoch is not None else time.time_ns() // 1_000_000,
                keys=self._keys,
                takeover=takeover,
            )
            self._line = LocalLine(self._coordinator)
            self._bind_host = data_host or (parsed.host if parsed.scheme == "tcp" else "127.0.0.1")
        else:
            if parsed.scheme == "tcp" and not parsed.port:
                raise ConfigError(f"{address}: only the rank that binds can leave the port open")
            self._line = RemoteLine(parsed, self._keys, follow=coordinator == "external")
            self._data_host = data_host or host_towards(parsed)
            self._bind_host = self._data_host

    @classmethod
    def from_process_group(cls, address: str, group: Any = None, **options: Any) -> Publisher:
        """A publisher in every rank of a torch.distributed process group (None: the default one): rank and number of ranks
        are the group's, and a port that rank 0 leaves open (`tcp://host:0`) is told to all. Options as of the class."""
        from torch import distributed

        if not distributed.is_initialized():
            raise UsageError("torch.distributed is not initialised; call init_process_group() first")
        rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
        made: Publisher | None = None
        said: list[Any] = [None]
        if rank == 0:
            try:
                made = cls(address, rank=0, ranks=ranks, **options)
                said = [made.address]
            except WeightSyncError as error:
                said = [error]
        distributed.broadcast_object_list(
            said, src=distributed.get_global_rank(group, 0) if group else 0, group=group
        )
        if isinstance(said[0], WeightSyncError):
            raise said[0]
        return made or cls(str(said[0]), rank=rank, ranks=ranks, **options)

    def register(self, source: Source, *, ignore: Iterable[str] = (), timeout_s: float = _REGISTER_S) -> None:
        """Say what to publish: a module, a state dict or shards; once. `ignore`: name patterns to leave out. Waits up to
        `timeout_s` for all ranks to do the same, then allocates the slots.

        Raises LayoutError (listing every tensor that can't be moved, or on which ranks disagree), CapacityError, and
        SyncTimeoutError that names the ranks that did not come.
        """
        with self._publishing:
            if self._staging is not None:
                raise UsageError(
                    "register() was called before; one publisher has one layout, make a new one for another"
                )
            entries = find_tensors(source, ignore=ignore)
            if not entries and self._ranks == 1:
                raise LayoutError("there is nothing to publish: no tensors were found")
            staging = Staging(entries, slots=self._slots, wire_dtype=self._wire_dtype, threads=self._threads)

            def introduce(last_epoch: int) -> m.Enlist:
                return self._introduce(staging, last_epoch)

            try:
                staging.follow(self._line.enlist(introduce, timeout_s))
            except BaseException:
                self._line.leave()
                raise
            self._staging = staging
            self._open_exporters(staging)
            self._line.send(m.Offers, self._offers())
            self._version = max(self._version, self._line.version)
        self._tender = threading.Thread(
            target=self._tend, args=(staging,), name="weightsync-rank", daemon=True
        )
        self._tender.start()

    def _introduce(self, staging: Staging, last_epoch: int) -> m.Enlist:
        """Who this rank is, and what a coordinator that has just started must know of it."""
        takeover = self._takeover and not last_epoch  # only once: later that would be another one's seat
        held = [(self._held.get(slot, 0), staging.generation(slot)) for slot in range(self._slots)]
        readers = sorted({instance for exporter in self._exporters for instance in exporter.readers()})
        return m.Enlist(
            self._rank, self._ranks, self._instance, self._name, socket.gethostname(), os.getpid(), last_epoch,
            self._version, self._slots, staging.layout, takeover, self._policy, self._relay, held, readers,
        )  # fmt: skip

    def _open_exporters(self, staging: Staging) -> None:
        environment = Environment(
            self._data_context(),
            self._keys,
            self._bind_host,
            secrets.token_hex(8),
            self._threads,
            self._member_gone,
        )
        for name in self._transports:
            exporter = make_exporter(name, environment)
            self._exporters.append(exporter)
            exporter.register(staging.slots, staging.header)

    def _offers(self) -> dict[str, dict[str, str]]:
        """What readers need to connect to the slots."""
        at = {} if self._data_host is None else {"at": self._data_host}
        named = zip(self._transports, self._exporters, strict=True)
        return {name: exporter.export() | at for name, exporter in named}

    def _follow(self, staging: Staging) -> None:
        """Stage what the coordinator wants staged by now."""
        if self._line.stage is not None:
            staging.follow(self._line.stage)
            if any([exporter.grow() for exporter in self._exporters]):
                self._line.send(m.Offers, self._offers())

    def _data_context(self) -> zmq.Context[Any]:
        """The context of this process's data sockets; strangers without a key are turned away."""
        if self._coordinator is not None:
            return self._coordinator.context
        self._context = zmq.Context()
        self._auth = authenticate(self._context, self._keys) if self._keys else None
        return self._context

    def _member_gone(self, instance: str) -> None:
        with contextlib.suppress(WeightSyncError):
            self._line.send(m.MemberGone, instance)

    def _tend(self, staging: Staging) -> None:
        """The thread that obeys the coordinator between publishes."""
        while (order := self._line.next_order()) is not None:
            try:
                if isinstance(order, m.Enlisted):
                    self._line.send(m.Offers, self._offers())
                    continue
                with self._publishing, torch.no_grad():
                    self._follow(staging)
                    digests = staging.extend(order)
                if digests is not None:
                    self._line.send(m.Extended, order.version, digests)
            except WeightSyncError as error:
                log.warning("%s: %s", self._name, error)

    @torch.no_grad()
    def publish(
        self, version: int | None = None, *, wait: Stage | None = None, timeout_s: float | None = None
    ) -> Ticket:
        """Snapshot the registered tensors as the next version; they may change as soon as this returns. Every rank calls
        it; the version exists when all have.

        `version`: must grow, the same in all ranks; counts 1, 2, 3, … by default. `wait`: also wait for this stage, see
        `Ticket.wait`. `timeout_s`: for a free slot and for the wait. Raises SyncTimeoutError naming who holds the slots or
        which rank is missing, FencedError when another publisher took over, LayoutError when tensors changed shape,
        VersionError if another rank could not stage it. After an error the version does not exist, and the next
        `publish()` may succeed.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        with self._publishing:
            if self._staging is None:
                raise UsageError("call register() before publish()")
            number = self._version + 1 if version is None else version
            if number <= self._version:
                raise UsageError(f"version {number} is not newer than {self._version}; versions only grow")
            ticket = self._publish(self._staging, number, timeout_s)
        if wait is not None and not ticket.skipped:
            ticket.wait(wait, timeout_s)
        return ticket

    def _publish(self, staging: Staging, version: int, timeout_s: float) -> Ticket:
        try:
            granted = self._line.ask(
                m.Begin, version, self._when_full, self._max_lag, timeout_s, timeout_s=timeout_s
            )
        except VersionError:
            self._version = version  # another rank failed with it: all go on with the next
            raise
        catalogue = staging.layout.catalogue
        if granted.slot < 0:
            if self._ranks > 1:
                self._version = version
            return Ticket(None, catalogue, version, self.epoch)
        try:
            self._follow(staging)
            staging.headers.open(granted.slot, granted.generation)
            self._held[granted.slot] = version
            digests = staging.stage(granted.slot, granted.generation)
        except BaseException as error:
            self._line.send(m.Aborted, version, f"staging failed: {error}")
            if self._ranks > 1:
                self._version = version
            raise
        self._line.send(m.Sealed, version, digests)
        self._version = version
        return Ticket(self._line, catalogue, version, self.epoch)

    def wait_for_members(self, count: int, timeout_s: float = 60.0) -> None:
        """Block until `count` subscribers have joined. Raises SyncTimeoutError that names those who have."""
        self._line.ask(m.AwaitMembers, count, timeout_s, timeout_s=timeout_s)

    def promote(self, version: int | None = None, timeout_s: float = 5.0) -> None:
        """With the policies `canary=N` and `manual`: let every replica go to `version` (the newest published by default).
        Raises UsageError if it is not held any more, was rolled back, or is older than one promoted before."""
        self._line.ask(m.Promote, self._given(version), timeout_s=timeout_s)

    def rollback(self, version: int | None = None, timeout_s: float = 5.0) -> None:
        """`version` (the newest published by default) is bad: every server that has it live goes back to the one before at
        its next step boundary, and nobody makes it live any more. Returns when the order is given. Servers that hold no
        older version read it again, if it is still held here, or wait for the next one. Raises
        UsageError if the version is unknown."""
        self._line.ask(m.Rollback, self._given(version), timeout_s=timeout_s)

    def _given(self, version: int | None) -> int:
        found = self._version if version is None else version
        if found < 1:
            raise UsageError("nothing was published yet")
        return found

    def status(self) -> FleetStatus:
        """Members, their versions and how far behind they are."""
        return self._line.status()

    @property
    def address(self) -> str:
        """Where subscribers connect, with the real port if 0 was asked for."""
        return self._line.address

    @property
    def epoch(self) -> int:
        """The life of the coordinator that this publisher belongs to."""
        return self._line.epoch

    @property
    def version(self) -> int:
        """The newest version published by this rank, 0 before the first."""
        return self._version

    def close(self) -> None:
        """Stop publishing and free the address. Members keep serving what they have."""
        if self._is_closed:
            return
        self._is_closed = True
        for exporter in self._exporters:
            exporter.close()
        self._line.close()
        if self._coordinator is not None:
            self._coordinator.close()
        if self._tender is not None:
            self._tender.join(timeout=5.0)
        if self._auth is not None:
            self._auth.stop()
        if self._context is not None:
            self._context.term()
        if self._staging is not None:
            self._staging.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if hasattr(self, "_line"):
                self.close()
