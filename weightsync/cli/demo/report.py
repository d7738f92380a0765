"""The measurements of a run as one JSON document."""

from __future__ import annotations

import json
import math
from typing import Any

from weightsync.cli.demo.spread import Spread
from weightsync.cli.demo.summary import Claim
from weightsync.cli.demo.tally import ServerTally, Tally


def make_report(tally: Tally, claims: list[Claim], *, is_complete: bool) -> dict[str, Any]:
    """Times carry their unit in the key; null: not measured. `is_complete` is false after Ctrl-C or a failure."""
    settings, trainer, passes = tally.settings, tally.trainer, tally.passes
    return {
        "is_complete": is_complete,
        "seconds": settings.seconds,
        "replicas": settings.replicas,
        "model_size": settings.model_size,
        "transport": settings.transport,
        "swap": settings.swap,
        "parameters": None if trainer is None else trainer.parameters,
        "tensors": None if trainer is None else trainer.tensors,
        "version_bytes": None if trainer is None else trainer.size_bytes,
        "versions_published": len(tally.published),
        "versions_skipped": tally.skipped,
        "digest_failures": tally.digest_failures,
        "publish_call_ms": _ms(tally.publish_call_s),
        "time_to_staged_ms": _ms(tally.staged_s),
        "time_to_live_ms": _ms(tally.live_s),
        "request_ms": _ms(tally.request_s(is_syncing=True)),
        "request_ms_sync_off": _ms(tally.request_s(is_syncing=False)),
        "requests_answered": tally.requests,
        "requests_unanswered": tally.unanswered,
        "requests_per_s_per_server": _number(tally.rate),
        "tokens_per_s": _number(tally.tokens_per_s),
        "bytes_received": tally.bytes_received,
        "gib_per_s": _number(tally.gib_per_s),
        "optimizer_steps": tally.losses[-1].step if tally.losses else 0,
        "training_loss_first": _number(tally.losses[0].value) if tally.losses else None,
        "training_loss_last": _number(tally.losses[-1].value) if tally.losses else None,
        "forward_passes": passes.done,
        "mixed_forward_passes": passes.mixed,
        "passes_checked": passes.checked,
        "servers": [_server_report(tally, server) for server in tally.servers.values()],
        "claims": [
            {"verdict": claim.verdict.name.lower(), "title": claim.title, "facts": claim.facts}
            for claim in claims
        ],
    }


def dump_report(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def _server_report(tally: Tally, server: ServerTally) -> dict[str, Any]:
    return {
        "name": server.name,
        "transport": server.receipts.transport,
        "versions_live": server.receipts.versions_live,
        "versions_verified": server.receipts.versions_verified,
        "versions_failed": server.receipts.versions_failed,
        "digest_failures": server.receipts.digest_failures,
        "live_version": server.live_version,
        "forward_passes": server.passes.done,
        "mixed_forward_passes": server.passes.mixed,
        "passes_checked": server.passes.checked,
        "swap_pause_us": server.pause_s(tally.begin_s).scaled(1e6).as_dict(),
        "heldout_loss_first": _number(server.heldout_first),
        "heldout_loss_last": _number(server.heldout_last),
        "longest_gap_ms": _number(server.passes.longest_gap_s * 1e3),
        "bytes_received": server.receipts.bytes_received,
        "tokens": server.tokens,
        "failures": server.failures,
    }


def _ms(spread: Spread) -> dict[str, float | None]:
    return spread.scaled(1e3).as_dict()


def _number(value: float | None) -> float | None:
    """JSON knows no NaN: a loss that blew up is null too."""
    return None if value is None or not math.isfinite(value) else round(value, 4)
