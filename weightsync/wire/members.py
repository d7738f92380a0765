"""The subscribers that said Hello, as the coordinator sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightsync.types import MemberStatus
from weightsync.wire import messages as m
from weightsync.wire.ballots import Seat


@dataclass(slots=True)
class Member:
    """`target`: its number in the arrangement, once it said what it wants. `seat`: where it votes, if it does. `is_counted`:
    versions wait for it, since it had a plan for this layout; a reconnect keeps that. `since`: it is welcomed when all ranks
    have been heard since then: one that comes back may know of a death that is not known here. `may_serve`: it can read
    from other members, and `serves` says how they can from it, under `number`; `introduced`: those that it knows."""

    hello: m.Hello
    label: str
    last_seen: float
    since: float = 0.0
    welcomed: bool = False
    target: int | None = None
    plan: m.Plan | None = None
    seat: Seat | None = None
    is_counted: bool = False
    newer_than: int | None = None
    live_version: int | None = None
    state: str = "joining"
    transport: str = ""
    error: str | None = None
    may_serve: bool = False
    serves: m.Serve | None = None
    number: int = 0
    introduced: set[int] = field(default_factory=set)

    @property
    def instance(self) -> str:
        return self.hello.instance

    def status(self, newest: int, now: float) -> MemberStatus:
        """As `weightsync status` shows it."""
        hello, live = self.hello, self.live_version
        return MemberStatus(
            name=self.label, host=hello.host, pid=hello.pid, role=hello.role, transport=self.transport, swap=hello.swap,
            state=self.state, live_version=live, lag=None if live is None else max(0, newest - live),
            last_seen_s=round(now - self.last_seen, 3), error=self.error,
        )  # fmt: skip


class Members(dict[bytes, Member]):
    """By the route of their messages."""

    def labels(self) -> dict[str, str]:
        """From instance to label."""
        return {member.instance: member.label for member in self.values()}

    def new_label(self, hello: m.Hello) -> str:
        """One that no other member has."""
        taken = {member.label for member in self.values()}
        label = hello.name if hello.name not in taken else f"{hello.name}@{hello.pid}"
        return label if label not in taken else f"{label}.{hello.instance[:6]}"

    def counted(self) -> list[str]:
        """Labels of those that versions wait for."""
        return [member.label for member in self.values() if member.is_counted]

    def joined(self) -> list[str]:
        """Labels of those that have a plan."""
        return [member.label for member in self.values() if member.plan is not None]

    def laggards(self, version: int) -> list[str]:
        """Servers whose live version is below `version`, idle ones too."""
        return [
            f"{member.label} (live {member.live_version})"
            for member in self.values()
            if member.is_counted and member.hello.role == "server" and (member.live_version or 0) < version
        ]
