"""Operations that a loader may use on tensors without data, each told as copies to the recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from weightsync.integrations.loader_recorder import LoaderRecorder

_aten = torch.ops.aten


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, strides and dtype, without data."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


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


RECORDED: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.copy_: _copy_, _aten.fill_: _fill_, _aten.zero_: _fill_,
    _aten.clone: _clone, _aten._to_copy: _clone, _aten.cat: _cat, _aten.stack: _stack, _aten.repeat: _repeat,
    _aten.flip: _flip, _aten.constant_pad_nd: _pad,
    _aten.index: _index, _aten.index_select: _index_select,
    _aten.index_put_: _index_put_, _aten.index_copy_: _index_copy_,
}  # fmt: skip
"""Operations that copy, by their ATen names: each is recorded instead of run."""

FACTORIES = {
    _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.new_empty, _aten.new_empty_strided, _aten.new_zeros, _aten.new_ones, _aten.new_full,
}  # fmt: skip
"""Operations that only take shape and dtype of their argument; their result is the loader's own."""
