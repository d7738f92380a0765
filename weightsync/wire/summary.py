"""What the plans of a fleet cost: moves, reads and bytes, and how near they are to the least possible."""

from __future__ import annotations

import msgspec
import numpy as np

from weightsync.wire.holders import distances
from weightsync.wire.plans import Plans

_NEAR = ("process", "host", "rack", "far")


class PlanSummary(msgspec.Struct, frozen=True):
    """Totals over all destinations. Bytes are on the wire; egress is what leaves one source.

    `bytes_needed`: distinct bytes that each destination wants, summed. `bytes_moved`: bytes of all moves.
    `egress_max_over_mean`: over all sources. `egress_bound_max_over_mean`: the same if boxes could be cut at
    will between the nearest holders, so no choice among these is more even. `slot_bytes_max` and `_total` are with
    padding; `slot_bytes_over_distinct`: staged bytes, without it, over the bytes that anyone wants of each tensor once,
    so 1 means that no byte is staged twice.
    """

    source_ranks: int
    target_ranks: int
    tensors: int
    patterns: int
    parcels: int
    moves: int
    ranges: int
    pairs: int
    ranges_per_pair_mean: float
    ranges_per_pair_max: int
    bytes_per_pair_min: int
    bytes_per_pair_median: int
    bytes_per_pair_max: int
    bytes_needed: int
    bytes_moved: int
    moved_over_needed: float
    egress_max_bytes: int
    egress_mean_bytes: float
    egress_max_over_mean: float
    egress_bound_max_over_mean: float
    ingress_max_over_mean: float
    slot_bytes_max: int
    slot_bytes_total: int
    slot_bytes_over_distinct: float
    bytes_by_distance: dict[str, int]


def summarize(plans: Plans) -> PlanSummary:
    """Count everything; no plan of a single destination is unfolded."""
    source, target, ranges, size = plans.pairs()
    egress = np.bincount(source, size, minlength=plans.sources.ranks)
    ingress = np.bincount(target, size, minlength=plans.targets.ranks)
    tiers = distances(plans.sources, plans.targets)[target, source]
    moved, pairs = int(size.sum()), max(1, len(size))
    mean = max(float(egress.mean()) if len(egress) else 0.0, 1e-9)
    some = size if len(size) else np.zeros(1, np.int64)
    return PlanSummary(
        source_ranks=plans.sources.ranks,
        target_ranks=plans.targets.ranks,
        tensors=len(plans.tensors.names),
        patterns=plans.patterns,
        parcels=len(plans.tensor),
        moves=plans.count_moves(),
        ranges=int(ranges.sum()),
        pairs=len(size),
        ranges_per_pair_mean=float(ranges.sum() / pairs),
        ranges_per_pair_max=int(ranges.max(initial=0)),
        bytes_per_pair_min=int(some.min()),
        bytes_per_pair_median=int(np.median(some)),
        bytes_per_pair_max=int(some.max()),
        bytes_needed=plans.bytes_needed,
        bytes_moved=moved,
        moved_over_needed=moved / max(1, plans.bytes_needed),
        egress_max_bytes=int(egress.max(initial=0)),
        egress_mean_bytes=mean if moved else 0.0,
        egress_max_over_mean=float(egress.max(initial=0) / mean) if moved else 1.0,
        egress_bound_max_over_mean=max(1.0, float(plans.even_bytes.max(initial=0) / mean)) if moved else 1.0,
        ingress_max_over_mean=float(ingress.max() / ingress.mean()) if moved else 1.0,
        slot_bytes_max=int(plans.slot_bytes.max(initial=0)),
        slot_bytes_total=int(plans.slot_bytes.sum()),
        slot_bytes_over_distinct=float(plans.size.sum() / max(1, plans.distinct_bytes)),
        bytes_by_distance={name: int(size[tiers == tier].sum()) for tier, name in enumerate(_NEAR)},
    )
