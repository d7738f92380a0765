"""The recorder of a weight loader: it watches copies between tensors without data and keeps them as strided boxes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsync.errors import LayoutError
from weightsync.integrations.boxes import intersect, remainder
from weightsync.integrations.loader_operations import FACTORIES, RECORDED
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: a loader is not compiled, and torch would import its compiler for every mode that says yes."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and self.knows(t)]
        if not known:
            return func(*args, **kwargs)
        record = RECORDED.get(func.overloadpacket)
        try:
            if record is not None:
                return record(self, func, *args, **kwargs)
            if func.overloadpacket in FACTORIES:
                return func(*args, **{**kwargs, "device": "cpu"})
            return self._view(func, known, args, kwargs)
        except ScatteredError as error:
            raise self.refusal(f"{func}: {error}", known) from error

    # ---- what the recorded operations use

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """`to`, which is known, now holds the elements of `source`, broadcast to its shape."""
        store = self._store_of(to)
        for shape, here, there, origin, dtype in list(self._elements(to, source.expand(to.shape))):
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
