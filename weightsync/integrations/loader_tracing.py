"""A server's shards, derived from its own checkpoint loader: run once on tensors without data, nothing is moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.errors import LayoutError
from weightsync.integrations.boxes import intersect, remainder
from weightsync.integrations.loader_recorder import LoaderRecorder, Origin, Store, Written
from weightsync.integrations.loader_scalars import LoaderScalars
from weightsync.integrations.strided import Cut, Frame, Place, ScatteredError, cut
from weightsync.tensors import Entry, Source, find_tensors
from weightsync.types import Box, Shard
from weightsync.wire.layout import Catalogue

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
_MAX_LISTED = 20


def trace_loader(
    load: Load,
    model: Source,
    checkpoint: Mapping[str, torch.Tensor] | Catalogue,
    *,
    ignore: Iterable[str] = (),
    tied: Iterable[Sequence[str]] = (),
) -> list[Shard]:
    """The shards that `model` wants, in the order of its tensors, as strided views of its real parameters.

    `load(weights)` is the server's own loader: it takes an iterable of (name, tensor) and copies into the tensors of
    `model`. It is run once, with tensors that have shapes and dtypes but no data. The parameters keep their content,
    except where the loader sets values of its own (padding): those are set after everything else succeeded.
    `checkpoint`: names, shapes and dtypes to offer, as a state dict (its data is not read; the meta device will do) or
    as the layout that `fetch_layout()` gets from a publisher. `ignore`: patterns of parameters that the loader may
    leave alone. `tied`: groups of checkpoint names for one and the same tensor, which may go to the same place.

    Checkpoint tensors that no shard names were offered but not used. Raises one LayoutError that lists every range
    never written, every range written twice, every dtype that would lose bits on the way, and parameters replaced
    rather than copied into; and LayoutError naming the checkpoint tensor when the loader needs data or itself fails.
    """
    entries = find_tensors(model, ignore=ignore)
    before = [_memory(entry) for entry in entries]
    recorder = LoaderRecorder()
    stores = [recorder.add_parameter(" = ".join(entry.names), entry.tensor.detach()) for entry in entries]
    offered, groups = _offer(checkpoint, tied)
    _run(load, recorder, offered)
    problems = [
        f"{store.label}: the loader replaced this parameter; it must copy into it"
        for store, entry, memory in zip(stores, entries, before, strict=True)
        if _memory(entry) != memory
    ]
    coverages = [_Coverage.of(store, groups) for store in stores]
    problems += [problem for coverage in coverages for problem in coverage.problems()]
    if problems:
        shown = "\n  ".join(problems[:_MAX_LISTED])
        more = f"\n  and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise LayoutError(
            f"the loader does not write every element exactly once ({len(problems)}):\n  {shown}{more}"
        )
    shards = [
        shard
        for entry, coverage in zip(entries, coverages, strict=True)
        for written in coverage.loaded
        for shard in _shards(written, coverage.store, entry.tensor.detach())
    ]
    for entry, coverage in zip(entries, coverages, strict=True):
        coverage.set_own_values(entry.tensor.detach())
    return shards


def _offer(
    checkpoint: Mapping[str, torch.Tensor] | Catalogue, tied: Iterable[Sequence[str]]
) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], dict[str, str]]:
    """What to hand to the loader, by name, and for each tied name the one that stands for its group."""
    groups = {name: names[0] for names in map(tuple, tied) for name in names}
    if not isinstance(checkpoint, Catalogue):
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in checkpoint.items()}, groups
    offered = {spec.name: (spec.shape, _dtype(spec.dtype)) for spec in checkpoint.tensors}
    for alias, name in checkpoint.aliases.items():
        offered[alias] = offered[name]
        groups.setdefault(alias, groups.get(name, name))
    return offered, groups


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _memory(entry: Entry) -> list[tuple[int, ...]]:
    return [(id(entry.home[entry.key]), *(tensor.untyped_storage()._cdata for tensor in entry.objects))]


def _run(
    load: Load, recorder: LoaderRecorder, offered: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    current = "before it took the first tensor"
    sources = {name: recorder.add_source(name, *what) for name, what in offered.items()}

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for name, tensor in sources.items():
            current = f"after it was given {name}"
            yield name, tensor

    try:
        with torch.no_grad(), recorder, LoaderScalars(recorder.knows):
            load(weights())
    except LayoutError:
        if not recorder.failures:
            raise
    except (
        Exception
    ) as error:  # the loader is the caller's: whatever it raises is told with the tensor at hand
        if not recorder.failures:
            raise LayoutError(
                f"the loader failed {current}: {type(error).__name__}: {error}; "
                "tracing gives it tensors without data, it can only copy them and take views"
            ) from error
    if recorder.failures:
        raise recorder.failures[0]


@dataclass(slots=True)
class _Coverage:
    """What of one parameter is loaded from the checkpoint, and what the loader sets itself."""

    store: Store
    loaded: list[Written]
    own: list[Written]
    overlaps: list[str]

    @classmethod
    def of(cls, store: Store, groups: Mapping[str, str]) -> _Coverage:
        coverage = cls(store, [], [], [])
        counted: list[Written] = []
        places: dict[tuple[str, Cut], set[str]] = defaultdict(set)
        for written in store.written:
            name = written.origin.name
            if name is None:
                hit = [w for w in counted if intersect(w.cut.box, written.cut.box)]
                coverage.overlaps += [_twice(store, w, written) for w in hit]
                coverage.own.append(written)
                continue
            seen = places[groups.get(name, name), written.cut]
            if not seen:
                counted.append(written)
            elif name in seen:
                coverage.overlaps.append(_twice(store, written, written))
            if name not in seen:
                coverage.loaded.append(written)
            seen.add(name)
        coverage.overlaps += [_twice(store, a, b) for a, b in _overlapping(counted)]
        return coverage

    def problems(self) -> list[str]:
        found = list(self.overlaps)
        found += [f"{self.store.label}: {box} is never written" for box in self._gaps()]
        for written in self.loaded:
            source, passed, end = written.origin.tensor.dtype, written.dtype, self.store.dtype
            if passed not in (source, end):
                found.append(
                    f"{self.store.label}: {written.origin.name} is {source} in the checkpoint and passes "
                    f"{passed} on its way to {end}, which loses bits; convert it once"
                )
        return found

    def set_own_values(self, tensor: torch.Tensor) -> None:
        """Write what the loader sets without the checkpoint, where no checkpoint tensor goes."""
        taken = [written.cut.box for written in self.loaded]
        for written in self.own:
            for box in remainder(written.cut.box, taken):
                part = written.cut.within(box)
                values = written.origin.tensor
                _view(tensor, self.store.frame, box).copy_(
                    values.as_strided(box.shape, part.there.strides, part.there.offset)
                )

    def _gaps(self) -> list[Box]:
        whole = Box.whole(self.store.frame.shape)
        return remainder(whole, [written.cut.box for written in (*self.loaded, *self.own)])


def _overlapping(written: list[Written]) -> Iterator[tuple[Written, Written]]:
    """Every pair that shares elements."""
    if len(written) < 2 or not written[0].cut.box.start:
        yield from ((written[0], other) for other in written[1:])
        return
    starts = np.array([w.cut.box.start for w in written])
    stops = np.array([w.cut.box.stop for w in written])
    for number in range(len(written) - 1):
        low = np.maximum(starts[number], starts[number + 1 :])
        high = np.minimum(stops[number], stops[number + 1 :])
        for other in np.flatnonzero((low < high).all(axis=1)):
            yield written[number], written[number + 1 + int(other)]


def _twice(store: Store, a: Written, b: Written) -> str:
    shared = intersect(a.cut.box, b.cut.box) or a.cut.box
    first, second = (w.origin.name or "a value of the loader's own" for w in (a, b))
    hint = (
        f'; if they are one tensor, say tied=[("{first}", "{second}")]'
        if a.origin.name and b.origin.name and first != second
        else ""
    )
    return f"{store.label}: {shared} is written twice, by {first} and by {second}{hint}"


def _view(tensor: torch.Tensor, frame: Frame, box: Box) -> torch.Tensor:
    return tensor.as_strided(box.shape, frame.place.strides, frame.place.at(box.start))


def _shards(written: Written, store: Store, tensor: torch.Tensor) -> Iterator[Shard]:
    """The same elements, as boxes of the checkpoint tensor that view the parameter."""
    origin: Origin = written.origin
    box, place = written.cut.box, store.frame.place
    frame = Frame.of(origin.tensor)
    here = Place(place.at(box.start), place.strides)
    try:
        parts = cut(frame, box.shape, written.cut.there, here)
    except ScatteredError as error:
        raise LayoutError(
            f"{store.label}: what it takes from {origin.name} is no box of it: {error}"
        ) from error
    for part in parts:
        strides = list(part.there.strides)
        step = 1
        for axis in range(len(strides) - 1, -1, -1):
            if part.box.shape[axis] == 1:
                strides[axis] = (
                    step  # never used; set as torch does, so that a whole tensor looks like itself
                )
            step = max(step, strides[axis] * part.box.shape[axis])
        view = tensor.as_strided(part.box.shape, strides, part.there.offset)
        yield Shard(str(origin.name), part.box, view, tuple(origin.tensor.shape))
