"""The run in plain lines, for logs and pipes."""

from __future__ import annotations

from weightsync.cli.demo.numerals import microseconds, milliseconds
from weightsync.cli.demo.sparkline import smoothed
from weightsync.cli.demo.tally import Tally
from weightsync.cli.demo.view import describe_model, describe_phase, describe_replicas, describe_transport
from weightsync.cli.progress import size_text


def describe_start(tally: Tally) -> str:
    settings = tally.settings
    return (
        f"{describe_model(tally)}; {describe_replicas(tally)}, transport {describe_transport(tally)}, "
        f"swap {settings.swap}, {tally.rate:.1f} requests/s each, {settings.seconds:g} s"
    )


def describe_now(tally: Tally, now_s: float) -> str:
    """One line with what changes while running."""
    schedule = tally.schedule
    elapsed_s = 0.0 if schedule is None else max(0.0, now_s - schedule.begin_s)
    curve = smoothed([loss.value for loss in tally.losses])
    servers = tally.servers.values()
    passes = tally.passes
    parts = [
        f"{elapsed_s:5.1f} s {describe_phase(tally, now_s)}",
        f"loss {curve[-1]:.2f}" if curve else "loss -",
        f"published {len(tally.published)}",
        "live " + "/".join(str(server.live_version) for server in servers),
        "lag " + "/".join(str(tally.lag(server)) for server in servers),
        f"staged {milliseconds(tally.staged_s)}",
        f"all live {milliseconds(tally.live_s)}",
        f"swap {microseconds(tally.pause_s)}",
        f"{sum(server.recent_tokens_per_s for server in servers):,.0f} tokens/s",
        f"request {milliseconds(tally.request_s(is_syncing=True))}",
        f"{size_text(tally.bytes_received)} received",
        f"{passes.checked} of {passes.done} passes re-digested, {passes.mixed} mixed",
    ]
    return " | ".join(parts)
