"""The recorder of a weight loader: it watches copies between tensors without data and keeps them as strided boxes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsync.errors import LayoutError
from weightsync.integrations.boxes import intersect, remainder
from weightsync.integrations.strided import Cut, Frame, Place, ScatteredError, cut

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Origin:
    """Where copied elements come from: the checkpoint tensor `name`, or (None) values that the loader made itself."""

    name: str | None
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Written:
    """One box of a store and its origin. `dtype` is the narrowest that the elements have passed through."""

    cut: Cut
    origin: Origin
    dtype: torch.dtype


@dataclass(slots=True)
class Store:
    """What was written to one tensor, in order: a parameter of the model (`label`), or a temporary of the loader.

    In a temporary the last write wins; a parameter keeps every write, so that overlaps are seen.
    """

    frame: Frame
    dtype: torch.dtype
    label: str | None = None
    written: list[Written] = field(default_factory=list)

    def write(self, new: Written) -> None:
        if self.label is None:
            kept = []
            for old in self.written:
                left = remainder(old.cut.box, [new.cut.box])
                kept += [Written(old.cut.within(box), old.origin, old.dtype) for box in left]
            self.written = kept
        self.written.append(new)


class LoaderRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, every operation on a known tensor is recorded instead of run.

    Call order: `add_parameter` and `add_source` for all tensors; run the loader inside `with recorder`; read `stores`.
    Views run as they are, since they move nothing. Copies are kept. Everything else would need the data, and raises
    LayoutError naming the checkpoint tensors concerned; `failures` keeps the errors for loaders that swallow them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stores: list[Store] = []
        self.failures: list[LayoutError] = []
        self._sources: dict[int, Origin] = {}
        self._stores: dict[int, list[Store]] = {}
        self._alive: list[torch.Tensor] = []  # a storage that is freed could lend its identity to another

    def add_parameter(self, label: str, tensor: torch.Tensor) -> Store:
        """Record what is written to `tensor`, whose memory stays untouched."""
        store = self._add_store(tensor, label)
        self.stores.append(store)
        return store

    def add_source(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor to hand to the loader in place of the checkpoint tensor `name`; it has no data."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._alive.append(tensor)
        self._sources[_storage(tensor)] = Origin(name, tensor)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and self.knows(t)]
        if not known:
            return func(*args, **kwargs)
        record = _RECORDED.get(func.overloadpacket)
        try:
            if record is not None:
                return record(self, func, *args, **kwargs)
            if func.overloadpacket in _FACTORIES:
                return func(*args, **{**kwargs, "device": "cpu"})
            return self._view(func, known, args, kwargs)
        except ScatteredError as error:
            raise self.refusal(f"{func}: {error}", known) from error

    # ---- what the recorded operations use

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """`to`, which is known, now holds the elements of `source`, broadcast to its shape."""
        store = self._store_of(to)
        for shape, here, there, origin, dtype in self._elements(to, source.expand(to.shape)):
            for part in cut(store.frame, shape, here, there):
                store.write(Written(part, origin, _narrower(dtype, store.dtype)))

    def adopt(self, tensor: torch.Tensor) -> None:
        """Know a tensor of the loader's own that is about to receive elements: what it holds so far is its own."""
        if self.knows(tensor):
            return
        whole = tensor if tensor._base is None else tensor._base
        store = self._add_store(whole, None)
        if whole.device.type != "meta":
            for part in cut(store.frame, tuple(whole.shape), Place.of(whole), Place.of(whole)):
                store.write(Written(part, Origin(None, whole), whole.dtype))

    def temporary(self, like: torch.Tensor) -> torch.Tensor:
        """A new store for the result of an operation, described by a tensor without data."""
        self._add_store(like, None)
        return like

    def _elements(
        self, to: torch.Tensor, source: torch.Tensor
    ) -> Iterator[tuple[tuple[int, ...], Place, Place, Origin, torch.dtype]]:
        """Strided pieces of a copy: shape, place in `to`, place at the origin, the origin, the dtype passed."""
        shape, here, there = tuple(to.shape), Place.of(to), Place.of(source)
        origin = self._sources.get(_storage(source))
        if origin is not None:
            yield shape, here, there, origin, origin.tensor.dtype
            return
        if not self.knows(source):
            if source.device.type != "meta":  # without data and never written: nothing is known to be there
                yield shape, here, there, Origin(None, source), source.dtype
            return
        store = self._store_of(source)
        for read in cut(store.frame, shape, there, here):
            for written in store.written:
                box = intersect(read.box, written.cut.box)
                if box is not None:
                    place = written.cut.within(box).there
                    yield box.shape, read.within(box).there, place, written.origin, written.dtype

    def _store_of(self, view: torch.Tensor) -> Store:
        """The store that holds all of `view`; several parameters may lie in one storage."""
        for store in self._stores.get(_storage(view), ()):
            with contextlib.suppress(ScatteredError):
                cut(store.frame, tuple(view.shape), Place.of(view), Place.of(view))
                return store
        raise ScatteredError(f"{list(view.shape)} elements at {Place.of(view)} belong to no single parameter")

    def _view(
        self, func: Any, known: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        schema = func._schema
        moves_nothing = any(r.alias_info is not None for r in schema.returns) and not schema.is_mutable
        if not moves_nothing and func.overloadpacket is not _aten._unsafe_view:
            raise self.refusal(f"{func} needs their data; only copies and views can be traced", known)
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if tensor.dtype != known[0].dtype or tensor.is_conj() or tensor.is_neg():
                raise self.refusal(
                    f"{func} reads their bits as {tensor.dtype}; only copies and views can be traced", known
                )
        return out

    def refusal(self, why: str, tensors: Sequence[torch.Tensor]) -> LayoutError:
        """The error to raise: `why`, after the names of what `tensors` hold."""
        names: list[str] = []
        for tensor in tensors:
            origin = self._sources.get(_storage(tensor))
            stores = self._stores.get(_storage(tensor), ())
            names += [origin.name] if origin is not None and origin.name else []
            names += [store.label for store in stores if store.label]
            names += [
                w.origin.name for store in stores if not store.label for w in store.written if w.origin.name
            ]
        listed = list(dict.fromkeys(names))
        shown = ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
        error = LayoutError(f"{shown}: {why}")
        self.failures.append(error)
        return error

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether its elements are tracked."""
        identity = _storage(tensor)
        return identity in self._sources or identity in self._stores

    def _add_store(self, tensor: torch.Tensor, label: str | None) -> Store:
        store = Store(Frame.of(tensor), tensor.dtype, label)
        self._alive.append(tensor)
        self._stores.setdefault(_storage(tensor), []).append(store)
        return store


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, strides and dtype, without data."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _narrower(passed: torch.dtype, through: torch.dtype) -> torch.dtype:
    """The dtype whose values survive when elements that passed one dtype are stored in another."""
    if passed == through or passed == torch.bool:
        return passed
    if passed.is_floating_point and through.is_floating_point:
        a, b = torch.finfo(passed), torch.finfo(through)
        return passed if b.eps <= a.eps and b.max >= a.max and b.tiny <= a.tiny else through
    if passed.is_floating_point or through.is_floating_point or passed.is_complex or through.is_complex:
        return through
    c, d = torch.iinfo(passed), torch.iinfo(through)
    return passed if d.min <= c.min and d.max >= c.max else through


# ---- recorded operations, by their ATen names


def _copy_(
    recorder: LoaderRecorder, func: Any, to: torch.Tensor, source: torch.Tensor, *_: Any
) -> torch.Tensor:
    recorder.adopt(to)
    recorder.copy(to, source)
    return to


def _fill_(recorder: LoaderRecorder, func: Any, to: torch.Tensor, value: Any = 0) -> torch.Tensor:
    recorder.adopt(to)
    recorder.copy(to, value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=to.dtype))
    return to


def _clone(recorder: LoaderRecorder, func: Any, source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    kept = {key: kwargs[key] for key in ("dtype", "memory_format") if key in kwargs}
    out = recorder.temporary(func(_bare(source), **kept))
    recorder.copy(out, source)
    return out


def _cat(recorder: LoaderRecorder, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    out = recorder.temporary(func([_bare(t) for t in tensors], dim))
    at = 0
    for tensor in tensors:
        if tensor.shape == (0,):
            continue
        recorder.copy(out.narrow(dim, at, tensor.shape[dim]), tensor)
        at += tensor.shape[dim]
    return out


def _stack(
    recorder: LoaderRecorder, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0
) -> torch.Tensor:
    out = recorder.temporary(func([_bare(t) for t in tensors], dim))
    for number, tensor in enumerate(tensors):
        recorder.copy(out.select(dim, number), tensor)
    return out


def _repeat(
    recorder: LoaderRecorder, func: Any, source: torch.Tensor, repeats: Sequence[int]
) -> torch.Tensor:
    out = recorder.temporary(func(_bare(source), repeats))
    shape = (*(1,) * (len(repeats) - source.dim()), *source.shape)
    for copy in product(*map(range, repeats)):
        part = out
        for axis, number in enumerate(copy):
            part = part.narrow(axis, number * shape[axis], shape[axis])
        recorder.copy(part, source)
    return out


def _flip(recorder: LoaderRecorder, func: Any, source: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    for dim in dims:
        backwards = torch.arange(source.shape[dim] - 1, -1, -1)
        source = _take(recorder, source, dim, backwards)
    return source


def _pad(
    recorder: LoaderRecorder, func: Any, source: torch.Tensor, pad: Sequence[int], value: Any = 0
) -> torch.Tensor:
    out = recorder.temporary(func(_bare(source), pad, value))
    recorder.copy(out, torch.tensor(value, dtype=out.dtype))
    part = out
    for number in range(len(pad) // 2):
        dim, (before, after) = source.dim() - 1 - number, pad[2 * number : 2 * number + 2]
        source = source.narrow(dim, max(0, -before), source.shape[dim] - max(0, -before) - max(0, -after))
        part = part.narrow(dim, max(0, before), source.shape[dim])
    recorder.copy(part, source)
    return out


def _index(
    recorder: LoaderRecorder, func: Any, source: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    dim, index = _only_index(recorder, func, source, indices)
    return _take(recorder, source, dim, index)


def _index_select(
    recorder: LoaderRecorder, func: Any, source: torch.Tensor, dim: int, index: torch.Tensor
) -> torch.Tensor:
    return _take(recorder, source, dim, _known_index(recorder, func, source, index))


def _index_put_(
    recorder: LoaderRecorder, func: Any, to: torch.Tensor, indices: Sequence[torch.Tensor | None],
    values: torch.Tensor, accumulate: bool = False,
) -> torch.Tensor:  # fmt: skip
    if accumulate:
        raise recorder.refusal(
            f"{func} adds to what is there; only copies and views can be traced", [to, values]
        )
    dim, index = _only_index(recorder, func, to, indices)
    values = values.expand(*to.shape[:dim], len(index), *to.shape[dim + 1 :])
    return _put(recorder, to, dim, index, values)


def _index_copy_(
    recorder: LoaderRecorder, func: Any, to: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    return _put(recorder, to, dim, _known_index(recorder, func, to, index), source)


def _take(recorder: LoaderRecorder, source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    shape = (*source.shape[:dim], len(index), *source.shape[dim:][1:])
    out = recorder.temporary(torch.empty(shape, dtype=source.dtype, device="meta"))
    for at, start, count in _runs(index, source.shape[dim]):
        recorder.copy(out.narrow(dim, at, count), source.narrow(dim, start, count))
    return out


def _put(
    recorder: LoaderRecorder, to: torch.Tensor, dim: int, index: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    recorder.adopt(to)
    for at, start, count in _runs(index, to.shape[dim]):
        recorder.copy(to.narrow(dim, start, count), values.narrow(dim, at, count))
    return to


def _runs(index: torch.Tensor, size: int) -> Iterator[tuple[int, int, int]]:
    """Runs of an index that count upwards: position in the index, first value, length."""
    values = [int(i) + size if i < 0 else int(i) for i in index.tolist()]
    at = 0
    while at < len(values):
        end = at + 1
        while end < len(values) and values[end] == values[end - 1] + 1:
            end += 1
        yield at, values[at], end - at
        at = end


def _only_index(
    recorder: LoaderRecorder, func: Any, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> tuple[int, torch.Tensor]:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        raise recorder.refusal(
            f"{func} with several index tensors can't be traced; index one dimension at a time", [tensor]
        )
    return given[0][0], _known_index(recorder, func, tensor, given[0][1])


def _known_index(
    recorder: LoaderRecorder, func: Any, tensor: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    if recorder.knows(index) or index.dim() != 1:
        raise recorder.refusal(f"{func} takes an index that is data or not one-dimensional", [tensor, index])
    return index.nonzero().reshape(-1) if index.dtype == torch.bool else index


_RECORDED: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.copy_: _copy_, _aten.fill_: _fill_, _aten.zero_: _fill_,
    _aten.clone: _clone, _aten._to_copy: _clone, _aten.cat: _cat, _aten.stack: _stack, _aten.repeat: _repeat,
    _aten.flip: _flip, _aten.constant_pad_nd: _pad,
    _aten.index: _index, _aten.index_select: _index_select,
    _aten.index_put_: _index_put_, _aten.index_copy_: _index_copy_,
}  # fmt: skip
_FACTORIES = {
    _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.new_empty, _aten.new_empty_strided, _aten.new_zeros, _aten.new_ones, _aten.new_full,
}  # fmt: skip
