"""Everything that was measured in a run, folded from the children's events. Views and files only read it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from weightsync.cli.demo.events import (
    Adopted,
    Answered,
    Event,
    HeldOut,
    Loss,
    Passes,
    Published,
    Receipts,
    Served,
    ServerUp,
    Synced,
    Trained,
    TrainerUp,
)
from weightsync.cli.demo.schedule import Schedule
from weightsync.cli.demo.settings import Settings
from weightsync.cli.demo.spread import Spread, spread_of

RECENT_S = 2.0  # span of the tokens/s shown while running


@dataclass(slots=True)
class ServerTally:
    name: str
    pass_s: float = 0.0
    reported_s: float = 0.0
    live_version: int = 0
    tokens: int = 0
    waiting: int = 0
    passes: Passes = field(default_factory=Passes)
    receipts: Receipts = field(default_factory=Receipts)
    answered: list[Answered] = field(default_factory=list)
    adopted: list[Adopted] = field(default_factory=list)
    heldout: list[HeldOut] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    sample: tuple[str, str] = ("", "")
    recent: deque[tuple[float, int]] = field(default_factory=deque)  # (at_s, tokens so far)

    def pause_s(self, begin_s: float) -> Spread:
        """How long a swap kept a forward pass from starting, of swaps from `begin_s` on."""
        return spread_of(adopted.pause_s for adopted in self.adopted if adopted.at_s >= begin_s)

    @property
    def heldout_first(self) -> float | None:
        return self.heldout[0].loss if self.heldout else None

    @property
    def heldout_last(self) -> float | None:
        return self.heldout[-1].loss if self.heldout else None

    @property
    def recent_tokens_per_s(self) -> float:
        if len(self.recent) < 2:
            return 0.0
        (from_s, before), (to_s, after) = self.recent[0], self.recent[-1]
        return (after - before) / (to_s - from_s)

    def fold(self, event: Served) -> None:
        self.reported_s = event.at_s
        self.live_version = event.live_version
        self.tokens = event.tokens
        self.waiting = event.waiting
        self.passes = event.passes
        self.receipts = event.receipts
        self.sample = event.sample
        self.answered.extend(event.answered)
        self.adopted.extend(event.adopted)
        self.heldout.extend(event.heldout)
        self.failures.extend(event.failures)
        self.recent.append((event.at_s, event.tokens))
        while event.at_s - self.recent[0][0] > RECENT_S and len(self.recent) > 2:
            self.recent.popleft()


class Tally:
    """Totals over all children. `schedule` is None until the run begins."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.schedule: Schedule | None = None
        self.rate = 0.0
        self.is_over = False
        self.trainer: TrainerUp | None = None
        self.losses: list[Loss] = []
        self.published: list[Published] = []
        self.synced: list[Synced] = []
        self.skipped = 0
        self.servers = {name: ServerTally(name) for name in settings.server_names}

    def fold(self, event: Event) -> None:
        if isinstance(event, TrainerUp):
            self.trainer = event
        elif isinstance(event, Trained):
            self.losses.extend(event.losses)
            self.published.extend(event.published)
            self.synced.extend(event.synced)
            self.skipped = event.skipped
        elif isinstance(event, ServerUp):
            self.servers[event.name].pass_s = event.pass_s
        elif isinstance(event, Served):
            self.servers[event.name].fold(event)

    @property
    def newest_version(self) -> int:
        return self.published[-1].version if self.published else 0

    def lag(self, server: ServerTally) -> int:
        """Versions that this server is behind the newest one published."""
        return max(0, self.newest_version - server.live_version)

    @property
    def begin_s(self) -> float:
        return math.inf if self.schedule is None else self.schedule.begin_s

    @property
    def _measured(self) -> list[Synced]:
        """Versions of the run itself: the first one waited for servers that were still starting."""
        warmup = {published.version for published in self.published if published.at_s < self.begin_s}
        return [synced for synced in self.synced if synced.version not in warmup]

    @property
    def staged_s(self) -> Spread:
        return spread_of(synced.staged_s for synced in self._measured if synced.staged_s is not None)

    @property
    def live_s(self) -> Spread:
        """From the `publish()` call until the last server had the version live."""
        return spread_of(synced.live_s for synced in self._measured if synced.live_s is not None)

    @property
    def publish_call_s(self) -> Spread:
        return spread_of(published.call_s for published in self.published if published.at_s >= self.begin_s)

    @property
    def pause_s(self) -> Spread:
        """Over all servers."""
        return spread_of(
            adopted.pause_s
            for server in self.servers.values()
            for adopted in server.adopted
            if adopted.at_s >= self.begin_s
        )

    @property
    def bytes_received(self) -> int:
        """0 when adopting: the servers map the publisher's own pages."""
        if self.settings.swap == "adopt":
            return 0
        return sum(server.receipts.bytes_received for server in self.servers.values())

    @property
    def gib_per_s(self) -> float | None:
        """Bytes of a version over the time one server took to read it, over all reads."""
        read_s = sum(sum(synced.reads_s) for synced in self._measured)
        size_bytes = sum(synced.size_bytes * len(synced.reads_s) for synced in self._measured)
        is_moved = self.settings.swap != "adopt" and read_s > 0
        return size_bytes / read_s / 2**30 if is_moved else None

    @property
    def tokens_per_s(self) -> float:
        """Of all servers together, over the run."""
        if self.schedule is None:
            return 0.0
        until_s = max(server.reported_s for server in self.servers.values())
        elapsed_s = min(until_s, self.schedule.end_s) - self.schedule.begin_s
        tokens = sum(server.tokens for server in self.servers.values())
        return tokens / elapsed_s if elapsed_s > 0 else 0.0

    def request_s(self, is_syncing: bool, name: str | None = None) -> Spread:
        """Latency, from arrival to the last byte, of requests that arrived while syncing was on, or off."""
        schedule = self.schedule
        if schedule is None:
            return Spread()
        servers = self.servers.values() if name is None else (self.servers[name],)
        return spread_of(
            answered.latency_s
            for server in servers
            for answered in server.answered
            if schedule.is_syncing(answered.arrived_s) is is_syncing
        )

    @property
    def requests(self) -> int:
        return sum(len(server.answered) for server in self.servers.values())

    @property
    def unanswered(self) -> int:
        return sum(server.waiting for server in self.servers.values())

    @property
    def passes(self) -> Passes:
        """Sums over the servers; the gap is the longest of any."""
        each = [server.passes for server in self.servers.values()]
        return Passes(
            sum(passes.done for passes in each),
            sum(passes.checked for passes in each),
            sum(passes.mixed for passes in each),
            max(passes.longest_gap_s for passes in each),
        )

    @property
    def digest_failures(self) -> int:
        return sum(server.receipts.digest_failures for server in self.servers.values())

    @property
    def versions_verified(self) -> int:
        return sum(server.receipts.versions_verified for server in self.servers.values())
