"""The publisher: what a trainer embeds."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Literal

import torch

from weightsync.config import default_threads
from weightsync.errors import ConfigError, LayoutError, UsageError
from weightsync.publisher.staging import Staging, WireDType
from weightsync.publisher.ticket import Stage, Ticket
from weightsync.tensors import Source, find_tensors
from weightsync.types import FleetStatus
from weightsync.wire.address import parse_address, require_safe
from weightsync.wire.coordinator import Coordinator
from weightsync.wire.fleet import Fleet
from weightsync.wire.keys import load_publisher_keys
from weightsync.wire.registry import make_exporter, transport_names
from weightsync.wire.transport import Environment, Exporter

WhenFull = Literal["wait", "skip", "evict"]


class Publisher:
    """Publishes versions of a model's weights at `address`.

    `slots`: whole versions held here; two let staging and reading overlap. `when_full`: what `publish()` does when
    readers hold every slot: `wait` for one (until `timeout_s`), `skip` this version, or `evict` the oldest readers.
    `max_lag`: `publish()` first waits until no member serves a version more than this many behind. `wire_dtype`: dtype on
    the wire, for all floats or by name pattern (`{"*": torch.bfloat16}`). `keys`: folder of `weightsync keys`; needed,
    or `insecure=True`, where other hosts can reach the address. `takeover`: replace a publisher that is alive there.
    `epoch`: a fencing token of your own, larger for each life; by default from the clock.

    Raises AddressInUseError that names who holds the address, and ConfigError.
    """

    def __init__(
        self,
        address: str,
        *,
        slots: int = 2,
        when_full: WhenFull = "wait",
        max_lag: int | None = None,
        transports: Sequence[str] = ("shm", "zmq"),
        wire_dtype: WireDType = None,
        threads: int | None = None,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        takeover: bool = False,
        epoch: int | None = None,
        name: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        if slots < 2:
            raise ConfigError(f"slots={slots}: at least 2 are needed, one to read while the other is filled")
        if when_full not in ("wait", "skip", "evict"):
            raise ConfigError(f"when_full={when_full!r}: choose wait, skip or evict")
        if max_lag is not None and max_lag < 1:
            raise ConfigError(f"max_lag={max_lag}: at least 1; members always lag by the version being sent")
        unknown = [t for t in transports if t not in transport_names()]
        if unknown or not transports:
            raise ConfigError(f"transports {list(transports)}: installed are {', '.join(transport_names())}")
        parsed = parse_address(address)
        require_safe(parsed, has_keys=keys is not None, insecure=insecure)
        self._keys = load_publisher_keys(keys) if keys is not None else None
        self._when_full, self._max_lag, self._timeout_s = when_full, max_lag, timeout_s
        self._wire_dtype, self._transports, self._slots = wire_dtype, tuple(transports), slots
        self._threads = threads or default_threads()
        self._data_host = parsed.host if parsed.scheme == "tcp" else "127.0.0.1"
        self._publishing = threading.Lock()
        self._staging: Staging | None = None
        self._exporters: list[Exporter] = []
        self._version = 0
        self._generation = 0
        self._is_closed = False
        self._coordinator = Coordinator(
            parsed,
            publisher=name or f"{socket.gethostname()}:{os.getpid()}",
            epoch=epoch if epoch is not None else time.time_ns() // 1_000_000,
            slots=slots,
            keys=self._keys,
            takeover=takeover,
        )

    def register(self, source: Source, *, ignore: Iterable[str] = ()) -> None:
        """Say what to publish: a module, a state dict or shards; once. `ignore`: name patterns to leave out.

        Allocates the slots. Raises LayoutError (listing every tensor that can't be moved) and CapacityError.
        """
        with self._publishing:
            if self._staging is not None:
                raise UsageError(
                    "register() was called before; one publisher has one layout, make a new one for another"
                )
            entries = find_tensors(source, ignore=ignore)
            if not entries:
                raise LayoutError("there is nothing to publish: no tensors were found")
            staging = Staging(entries, slots=self._slots, wire_dtype=self._wire_dtype, threads=self._threads)
            environment = Environment(
                self._coordinator.context, self._keys, self._data_host, secrets.token_hex(8), self._threads,
                self._coordinator.gone,
            )  # fmt: skip
            offers = {}
            for name in self._transports:
                exporter = make_exporter(name, environment)
                self._exporters.append(exporter)
                exporter.register(staging.slots, staging.header)
                offers[name] = exporter.export()
            self._staging = staging
            self._coordinator.register(staging.layout, offers)

    @torch.no_grad()
    def publish(
        self, version: int | None = None, *, wait: Stage | None = None, timeout_s: float | None = None
    ) -> Ticket:
        """Snapshot the registered tensors as the next version; they may change as soon as this returns.

        `version`: must grow; counts 1, 2, 3, … by default. `wait`: also wait for this stage, see `Ticket.wait`.
        `timeout_s`: for a free slot and for the wait. Raises SyncTimeoutError naming who holds the slots,
        FencedError when another publisher took over, LayoutError when tensors changed shape. After an error the version
        does not exist, and the next `publish()` may succeed.
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
        self._await_lag(version, timeout_s)
        started = time.monotonic()
        slot = self._take_slot(timeout_s)
        if slot is None:
            return Ticket(None, staging.layout, version, self.epoch)
        self._generation += 1
        generation = self._generation
        staging.headers.open(slot, generation)
        self._coordinator.change(lambda fleet: fleet.begin(version, slot, generation, started))
        try:
            digests = staging.stage(slot, generation)
        except BaseException as error:
            reason = f"staging failed: {error}"
            self._coordinator.change(lambda fleet: fleet.abort(version, reason))
            raise
        self._coordinator.change(lambda fleet: fleet.seal(version, digests, time.monotonic()))
        self._version = version
        return Ticket(self._coordinator, staging.layout, version, self.epoch)

    def _await_lag(self, version: int, timeout_s: float) -> None:
        lag = self._max_lag
        if lag is None:
            return
        self._coordinator.wait_until(
            lambda fleet: not fleet.laggards(version - lag),
            timeout_s,
            lambda fleet: (
                f"max_lag={lag}: version {version} waited {timeout_s:g} s for "
                + ", ".join(fleet.laggards(version - lag))
            ),
        )

    def _take_slot(self, timeout_s: float) -> int | None:
        """A slot to overwrite; None: skip."""
        slot = self._coordinator.change(lambda fleet: fleet.take_slot())
        if slot is None and self._when_full == "evict":
            slot = self._coordinator.change(lambda fleet: fleet.evict())
        if slot is None and self._when_full == "skip":
            return None
        if slot is None:
            found = self._coordinator.wait_until(
                lambda fleet: None if (s := fleet.take_slot()) is None else (s,),
                timeout_s,
                lambda fleet: (
                    f"no slot was free within {timeout_s:g} s; held by {', '.join(fleet.holders())}; "
                    'raise slots=, or choose when_full="skip" or "evict"'
                ),
            )
            slot = found[0]
        return int(slot)

    def wait_for_members(self, count: int, timeout_s: float = 60.0) -> None:
        """Block until `count` subscribers have joined. Raises SyncTimeoutError that names those who have."""
        self._coordinator.wait_until(
            lambda fleet: len(_joined(fleet)) >= count,
            timeout_s,
            lambda fleet: (
                f"{count} members were wanted within {timeout_s:g} s; joined: "
                + (", ".join(_joined(fleet)) or "none")
            ),
        )

    def status(self) -> FleetStatus:
        """Members, their versions and how far behind they are."""
        return self._coordinator.status()

    @property
    def address(self) -> str:
        """Where subscribers connect, with the real port if 0 was asked for."""
        return self._coordinator.fleet.address

    @property
    def epoch(self) -> int:
        return self._coordinator.fleet.epoch

    @property
    def version(self) -> int:
        """The newest published version, 0 before the first."""
        return self._version

    def close(self) -> None:
        """Stop publishing and free the address. Members keep serving what they have."""
        if self._is_closed:
            return
        self._is_closed = True
        for exporter in self._exporters:
            exporter.close()
        self._coordinator.close()
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
            if hasattr(self, "_coordinator"):
                self.close()


def _joined(fleet: Fleet) -> list[str]:
    return [member.label for member in fleet.members.values() if member.welcomed]
