"""Which box of which tensor each server rank wants, and where in its fused parameters it goes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.errors import ConfigError
from weightsync.models.catalog import Catalog, RowCollector
from weightsync.models.rules import Split, TensorRule, stage_of_layers
from weightsync.moves import Int64s
from weightsync.wire.columns import Int32s, Side

_TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ServerMesh:
    """Degrees of parallelism of the servers; None: not given.

    A pipeline stage has `tp * dp = ep * etp * copies` ranks, tensor-parallel index fastest. Dense tensors are cut by
    `tp` and held `dp` times. Experts are dealt to `ep` groups, each cutting them by `etp`. Without `dp` and `etp`:
    `dp = ep`, `etp = tp`; with one of them the other follows.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int | None = None
    replicas: int = 1
    host: int = 8

    @property
    def stage_ranks(self) -> int:
        """Ranks of one stage of one replica."""
        if self.dp is not None:
            return self.tp * self.dp
        return self.ep * (self.tp if self.etp is None else self.etp)

    @property
    def expert_tp(self) -> int:
        if self.etp is not None:
            return self.etp
        return max(1, self.stage_ranks // self.ep)

    @property
    def ranks(self) -> int:
        return self.stage_ranks * self.pp * self.replicas

    def validate(self) -> None:
        """Raise ConfigError unless the degrees fit together."""
        n = self.stage_ranks
        if n % self.tp or n % (self.ep * self.expert_tp):
            raise ConfigError(
                f"servers: {n} ranks of a stage can't be divided by tp={self.tp}, and by ep={self.ep} times "
                f"etp={self.expert_tp}; give dp= or etp= so that tp*dp = ep*etp"
            )


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """The servers' ranks, and where each of their shards goes.

    Per row of `side.shards`: the number of the `parameter` (name and local shape in `names`, `shapes`), the `slot` in
    its stack of experts (-1: it is no stack), and the row `at` of dimension 0 (behind the stack) where the box begins.
    """

    side: Side
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parameter: Int32s
    slot: Int32s
    at: Int64s


def serve(
    catalog: Catalog, mesh: ServerMesh, *, placement: npt.ArrayLike | None = None, first_host: int = 1 << 20
) -> ServerLayout:
    """The servers' ranks: replica by replica, stage by stage.

    `placement`: the experts in the slots of each group, (ep, slots) or (layers, ep, slots) counting sparse layers;
    an expert may be in several. Default: blocks. Raises ConfigError for sizes that don't divide.
    """
    mesh.validate()
    model, n = catalog.model, mesh.stage_ranks
    stages = stage_of_layers(model.layers, mesh.pp)
    collector = RowCollector(mesh.pp * n, catalog.table.shape.shape[1], extra=3)
    parameters = _Parameters()
    index = np.arange(n)
    begins: dict[str, int] = {}
    for rule, numbers in _in_fused_order(catalog):
        ranks = mesh.expert_tp if rule.experts else mesh.tp
        local = list(rule.shape)
        local[rule.dimension] = rule.local_size(ranks)
        at = begins.get(rule.parameter, 0)
        begins[rule.parameter] = at + local[0]
        placed = _placement(rule, mesh, placement) if rule.experts else None
        layers = rule.layers or (model.layers - 1 if rule.is_last else 0,)
        of_layer = stages[list(layers)]
        known = parameters.add(rule, layers, local, at, 0 if placed is None else placed.shape[2])
        for stage in np.unique(of_layer).tolist():
            some, layouts = np.flatnonzero(of_layer == stage), stage * n + index
            start, stop = rule.cut(index % ranks, ranks)
            if placed is None:
                extra = np.stack([known[some], np.full(len(some), -1), np.full(len(some), at)], axis=-1)
                collector.add(layouts, numbers[some, 0], start, stop, extra[None])
                continue
            slots = placed.shape[2]
            extra = np.stack(
                [
                    np.repeat(known[some], slots),
                    np.tile(np.arange(slots), len(some)),
                    np.full(len(some) * slots, at),
                ],
                axis=-1,
            )
            for rank in range(n):
                experts = placed[some, rank // ranks % mesh.ep]
                tensors = np.take_along_axis(numbers[some], experts, axis=1).reshape(-1)
                collector.add(layouts[rank : rank + 1], tensors, start[[rank]], stop[[rank]], extra[None])
    if model.is_tied and mesh.pp > 1:
        _add_tied_head(collector, catalog, mesh, parameters)
    shards, columns = collector.columns()
    side = Side.spread(
        shards, np.tile(np.arange(mesh.pp * n), mesh.replicas), ranks_per_host=mesh.host, first_host=first_host,
        replicas=mesh.replicas,
    )  # fmt: skip
    return ServerLayout(
        side, tuple(parameters.names), tuple(tuple(shape) for shape in parameters.shapes),
        columns[:, 0].astype(np.int32), columns[:, 1].astype(np.int32), columns[:, 2],
    )  # fmt: skip


class _Parameters:
    """Names and local shapes of fused parameters, by number."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.shapes: list[list[int]] = []
        self._numbers: dict[str, int] = {}

    def add(self, rule: TensorRule, layers: tuple[int, ...], local: list[int], at: int, slots: int) -> Int64s:
        """Numbers of the rule's parameter in each layer; the parameter grows by the rule's part."""
        found = []
        for layer in layers:
            name = rule.parameter.format(layer=layer)
            number = self._numbers.setdefault(name, len(self.names))
            if number == len(self.names):
                self.names.append(name)
                self.shapes.append([*([slots] if slots else []), 0, *local[1:]])
            self.shapes[number][1 if slots else 0] = at + local[0]
            found.append(number)
        return np.array(found, np.int64)


def _in_fused_order(catalog: Catalog) -> list[tuple[TensorRule, Int32s]]:
    return sorted(zip(catalog.model.rules, catalog.numbers, strict=True), key=lambda entry: entry[0].part)


def _placement(rule: TensorRule, mesh: ServerMesh, placement: npt.ArrayLike | None) -> Int64s:
    """Experts by (sparse layer, group, slot)."""
    layers = len(rule.layers)
    if placement is None:
        if rule.experts % mesh.ep:
            raise ConfigError(f"servers: {rule.experts} experts can't be divided by ep={mesh.ep}")
        placement = np.arange(rule.experts).reshape(mesh.ep, -1)
    table = np.asarray(placement, np.int64)
    table = np.broadcast_to(table, (layers, *table.shape)) if table.ndim == 2 else table
    if table.ndim != 3 or table.shape[:2] != (layers, mesh.ep):
        raise ConfigError(f"placement: shape {list(table.shape)}, expected [{layers}, {mesh.ep}, slots]")
    for number, row in enumerate(table):
        if set(np.unique(row).tolist()) != set(range(rule.experts)):
            raise ConfigError(
                f"placement of sparse layer {number}: not exactly the experts 0 to {rule.experts - 1}"
            )
    return table


def _add_tied_head(
    collector: RowCollector, catalog: Catalog, mesh: ServerMesh, parameters: _Parameters
) -> None:
    """The last stage has an output head of its own, whose tensor is the embedding."""
    rule, numbers = next(
        (rule, numbers)
        for rule, numbers in zip(catalog.model.rules, catalog.numbers, strict=True)
        if rule.split is Split.VOCABULARY
    )
    n = mesh.stage_ranks
    index = np.arange(n)
    parameters.names.append(_TIED_HEAD)
    parameters.shapes.append([rule.local_size(mesh.tp), *rule.shape[1:]])
    start, stop = rule.cut(index % mesh.tp, mesh.tp)
    extra = np.array([[[len(parameters.names) - 1, -1, 0]]], np.int64)
    collector.add((mesh.pp - 1) * n + index, numbers[:, 0], start, stop, extra)
