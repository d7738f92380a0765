"""What a run proves: each claim with the figures behind it, and whether it held."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rich.table import Table
from rich.text import Text

from weightsync.cli.demo.numerals import MISSING, microseconds, milliseconds, short
from weightsync.cli.demo.tally import Tally
from weightsync.cli.demo.view import describe_bytes, describe_model, describe_transport

NEAR = 1.25  # latency with syncing on over syncing off that still counts as undisturbed
SLACK_S = 0.01  # a difference smaller than this is the clock's and the scheduler's


class Verdict(Enum):
    """FAIL makes the run fail; NOTE is a figure that this machine or a short run can spoil."""

    PASS = "green"
    FAIL = "red"
    NOTE = "yellow"


@dataclass(frozen=True, slots=True)
class Claim:
    verdict: Verdict
    title: str
    facts: str


def judge_run(tally: Tally) -> list[Claim]:
    return [
        _judge_adoption(tally),
        _judge_passes(tally),
        _judge_digests(tally),
        _judge_heldout(tally),
        _judge_requests(tally),
        _judge_latency(tally),
    ]


def has_failed(claims: list[Claim]) -> bool:
    return any(claim.verdict is Verdict.FAIL for claim in claims)


def _judge_adoption(tally: Tally) -> Claim:
    """The first version is only the start: adopting means having switched to a later one while serving."""
    servers = tally.servers.values()
    adopted = ", ".join(f"by {server.name} {server.receipts.versions_live}" for server in servers)
    skipped = f" ({tally.skipped} more skipped, no free slot)" if tally.skipped else ""
    live = ", ".join(str(server.live_version) for server in servers)
    is_ok = all(server.receipts.versions_live >= 2 for server in servers)
    facts = f"versions published: {len(tally.published)}{skipped}; adopted {adopted}; live at the end: {live}"
    return Claim(Verdict.PASS if is_ok else Verdict.FAIL, "servers switched while serving", facts)


def _judge_passes(tally: Tally) -> Claim:
    passes = tally.passes
    facts = (
        f"{passes.mixed} mixed among {passes.done:,} forward passes; in {passes.checked:,} of them the live weights, "
        "while pinned, were re-digested and compared with the manifest of the version claimed"
    )
    is_ok = passes.mixed == 0 and passes.checked > 0
    return Claim(Verdict.PASS if is_ok else Verdict.FAIL, "no pass mixed versions", facts)


def _judge_digests(tally: Tally) -> Claim:
    failed = sum(server.receipts.versions_failed for server in tally.servers.values())
    others = f", {failed - tally.digest_failures} not received for other reasons" if failed else ""
    facts = (
        f"{tally.versions_verified} versions verified against the trainer's digests before going live, "
        f"{tally.digest_failures} wrong{others}"
    )
    is_ok = tally.digest_failures == 0 and tally.versions_verified > 0
    return Claim(Verdict.PASS if is_ok else Verdict.FAIL, "every byte was right", facts)


def _judge_heldout(tally: Tally) -> Claim:
    falls, parts = [], []
    for server in tally.servers.values():
        first, last = server.heldout_first, server.heldout_last
        falls.append(first is not None and last is not None and last < first)
        parts.append(f"{server.name} {_fixed(first)} → {_fixed(last)}")
    facts = f"held-out loss, nats per byte: {', '.join(parts)}"
    return Claim(Verdict.PASS if all(falls) else Verdict.NOTE, "new versions were better", facts)


def _fixed(loss: float | None) -> str:
    return MISSING if loss is None else f"{loss:.2f}"


def _judge_requests(tally: Tally) -> Claim:
    gap_s = tally.passes.longest_gap_s
    facts = (
        f"{tally.requests:,} requests answered, {tally.unanswered} not; {tally.tokens_per_s:,.0f} tokens/s; "
        f"longest time between two passes with work at hand {short(gap_s * 1e3)} ms"
    )
    is_ok = tally.requests > 0 and tally.unanswered == 0
    return Claim(Verdict.PASS if is_ok else Verdict.NOTE, "serving never stopped", facts)


def _judge_latency(tally: Tally) -> Claim:
    on, off = tally.request_s(is_syncing=True), tally.request_s(is_syncing=False)
    facts = f"request p50 / p99: syncing on {milliseconds(on)}, syncing off {milliseconds(off)}"
    is_ok = _is_near(on.p50, off.p50) and _is_near(on.p99, off.p99)
    return Claim(Verdict.PASS if is_ok else Verdict.NOTE, "syncing stays out of the way", facts)


def _is_near(on_s: float | None, off_s: float | None) -> bool:
    return on_s is not None and off_s is not None and on_s <= off_s * NEAR + SLACK_S


def draw_figures(tally: Tally) -> Table:
    """The measured times, for people who want the numbers rather than the verdicts."""
    rate = "" if tally.gib_per_s is None else f", {short(tally.gib_per_s)} GiB/s in one read"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("model", describe_model(tally))
    grid.add_row("sync", f"transport {describe_transport(tally)}, swap {tally.settings.swap}")
    grid.add_row("publish() call", f"{milliseconds(tally.publish_call_s)}  (p50 / p99, as all below)")
    grid.add_row("time to staged", milliseconds(tally.staged_s))
    grid.add_row("time to all live", milliseconds(tally.live_s))
    grid.add_row("swap pause", microseconds(tally.pause_s))
    grid.add_row("bytes received", f"{describe_bytes(tally)}{rate}")
    return grid


def draw_claims(claims: list[Claim]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column()
    for claim in claims:
        mark = Text(claim.verdict.name, style=f"bold {claim.verdict.value}")
        grid.add_row(mark, Text(claim.title, style="bold"), claim.facts)
    return grid
