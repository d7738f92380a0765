"""The tensors of a model by number, and rows of layouts while they are being collected."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightsync.models.rules import ModelShape, TensorRule
from weightsync.moves import Int64s
from weightsync.wire.columns import Int32s, ShardColumns, TensorTable


@dataclass(frozen=True, slots=True)
class Catalog:
    """`numbers[i]`: tensors of rule `i` of the model, int32 (layers, experts), at least one by one.

    Tensors are numbered layer by layer, so that slots are filled and read in the order of the layers.
    """

    model: ModelShape
    table: TensorTable
    numbers: tuple[Int32s, ...]


def catalog_of(model: ModelShape) -> Catalog:
    """Number all tensors of a model."""
    numbers = [np.zeros((max(1, len(rule.layers)), max(1, rule.experts)), np.int32) for rule in model.rules]
    names: list[str] = []
    rule_of: list[tuple[int, int]] = []
    for position, rule in sorted(_positions(model), key=lambda entry: entry[0]):
        layer, at = position[0], position[1]
        count = max(1, rule.experts)
        numbers[at][rule.layers.index(layer) if rule.layers else 0] = np.arange(
            len(names), len(names) + count
        )
        names += [rule.name.format(layer=layer, expert=expert) for expert in range(count)]
        rule_of.append((at, count))
    kinds = np.repeat([at for at, _ in rule_of], [count for _, count in rule_of])
    width = max(len(rule.shape) for rule in model.rules)
    shapes = np.array([[*rule.shape, *([1] * (width - len(rule.shape)))] for rule in model.rules], np.int64)
    ndims = np.array([len(rule.shape) for rule in model.rules], np.int64)
    sizes = np.array([rule.itemsize for rule in model.rules], np.int64)
    return Catalog(model, TensorTable(names, shapes[kinds], ndims[kinds], sizes[kinds]), tuple(numbers))


def _positions(model: ModelShape) -> list[tuple[tuple[int, int], TensorRule]]:
    """(layer, rule number) of every tensor or stack of experts; outer tensors come before and after all layers."""
    return [
        ((layer, at), rule)
        for at, rule in enumerate(model.rules)
        for layer in (rule.layers or ((model.layers if rule.is_last else -1),))
    ]


class RowCollector:
    """Collects rows of many layouts in blocks; `extra` columns travel with them."""

    def __init__(self, layouts: int, width: int, extra: int = 0) -> None:
        self._layouts = layouts
        self._width = width
        self._extra = extra
        self._blocks: list[tuple[Int32s, Int32s, Int64s, Int64s, Int64s]] = []

    def add(
        self, layouts: Int64s, tensors: Int32s, start: Int64s, stop: Int64s, extra: Int64s | None = None
    ) -> None:
        """All of `tensors` in each of `layouts`, whose boxes are `start`, `stop` (layouts, dimensions).

        Empty boxes are left out. `extra` is (layouts or 1, tensors or 1, extra columns).
        """
        count = len(layouts)
        keep = np.asarray((start < stop).all(axis=1))
        layouts, start, stop = layouts[keep], start[keep], stop[keep]
        shape = (len(layouts), len(tensors))
        if not all(shape):
            return
        pad = self._width - start.shape[1]
        start = np.pad(start, ((0, 0), (0, pad)))
        stop = np.pad(stop, ((0, 0), (0, pad)), constant_values=1)
        if extra is None:
            extra = np.zeros((1, 1, self._extra), np.int64)
        elif extra.shape[0] == count > 1:
            extra = extra[keep]
        self._blocks.append((
            np.repeat(layouts.astype(np.int32), len(tensors)),
            np.tile(tensors, len(layouts)),
            np.repeat(start, len(tensors), axis=0),
            np.repeat(stop, len(tensors), axis=0),
            np.broadcast_to(extra, (*shape, self._extra)).reshape(shape[0] * shape[1], self._extra),
        ))  # fmt: skip

    def columns(self) -> tuple[ShardColumns, Int64s]:
        """The layouts, and the extra columns of each row."""
        layout, tensor, start, stop, extra = (
            np.concatenate(column) for column in zip(*self._blocks, strict=True)
        )
        self._blocks.clear()
        order = np.argsort(layout, kind="stable")
        first = np.searchsorted(layout[order], np.arange(self._layouts + 1)).astype(np.int64)
        return ShardColumns(first, tensor[order], start[order], stop[order]), extra[order]
