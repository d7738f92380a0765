"""Finding tensors in what users hand over: a module, a state dict, or shards. Both sides use it.

Names are those of `state_dict()`. Tied tensors (same storage, same view) are one entry with several names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from weightsync.errors import LayoutError
from weightsync.types import DTYPES, Box, Shard

Source = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[Shard]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor and where to find it: `home[key]` is read again at every use, so a replaced tensor is noticed.

    `ties` are the places of other tensor objects that are the same view of the same storage.
    """

    names: tuple[str, ...]
    box: Box
    shape: tuple[int, ...]
    home: Mapping[Any, torch.Tensor]
    key: Any
    ties: tuple[tuple[Mapping[Any, torch.Tensor], Any], ...] = ()

    @property
    def tensor(self) -> torch.Tensor:
        return self.home[self.key]

    @property
    def objects(self) -> list[torch.Tensor]:
        """Every distinct tensor object of this entry."""
        places = ((self.home, self.key), *self.ties)
        return list({id(tensor): tensor for tensor in (home[key] for home, key in places)}.values())


def find_tensors(source: Source, *, ignore: Iterable[str] = ()) -> list[Entry]:
    """All tensors of `source` in its own order, tied ones merged, names that match a pattern of `ignore` left out.

    Raises LayoutError that lists every tensor that can't be moved, and why.
    """
    patterns = tuple(ignore)
    found = [entry for entry in _walk(source) if not any(fnmatchcase(entry.names[0], p) for p in patterns)]
    problems = [f"{entry.names[0]}: {why}" for entry in found if (why := why_unfit(entry.tensor))]
    if problems:
        raise LayoutError(f"{len(problems)} tensors can't be moved:\n  " + "\n  ".join(problems))
    return _merge_ties(found)


def ignored_tensors(source: Source, ignore: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors that `find_tensors` leaves out because of `ignore`."""
    patterns = tuple(ignore)
    return {
        entry.names[0]: entry.tensor
        for entry in (_walk(source) if patterns else ())
        if any(fnmatchcase(entry.names[0], p) for p in patterns)
    }


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _walk(source: Source) -> Iterable[Entry]:
    if isinstance(source, torch.nn.Module):
        yield from _walk_module(source)
    elif isinstance(source, Mapping):
        for name, tensor in source.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise LayoutError(
                    f"a state dict maps names to tensors; {name!r} maps to {type(tensor).__name__}"
                )
            yield Entry((name,), Box.whole(tensor.shape), tuple(tensor.shape), source, name)
    else:
        shards = list(source)
        for shard in shards:
            _check_shard(shard)
        views = {number: shard.view for number, shard in enumerate(shards)}
        for number, shard in enumerate(shards):
            yield Entry((shard.name,), shard.box, tuple(shard.shape), views, number)


def _walk_module(module: torch.nn.Module) -> Iterable[Entry]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        transient = child._non_persistent_buffers_set
        homes: list[MutableMapping[str, Any]] = [child._parameters, child._buffers]
        for home in homes:
            for key, tensor in home.items():
                if tensor is not None and key not in transient:
                    name = f"{prefix}.{key}" if prefix else key
                    yield Entry((name,), Box.whole(tensor.shape), tuple(tensor.shape), home, key)


def _check_shard(shard: Shard) -> None:
    if not isinstance(shard, Shard):
        raise LayoutError(
            f"expected weightsync.Shard, got {type(shard).__name__}; pass a module, a state dict or shards"
        )
    inside = len(shard.box.start) == len(shard.box.stop) == len(shard.shape) and all(
        0 <= a <= b <= n for a, b, n in zip(shard.box.start, shard.box.stop, shard.shape, strict=True)
    )
    if not inside:
        raise LayoutError(
            f"{shard.name}: box {shard.box} lies outside the tensor's shape {list(shard.shape)}"
        )
    if tuple(shard.view.shape) != shard.box.shape:
        raise LayoutError(
            f"{shard.name}: the view's shape {list(shard.view.shape)} is not that of its box {shard.box}"
        )


def why_unfit(tensor: object) -> str | None:
    """Why a tensor can't be moved, in words that follow its name; None if it can."""
    if not isinstance(tensor, torch.Tensor):
        return f"is not a tensor, but {type(tensor).__name__}"
    if hasattr(tensor, "to_local"):
        return "is a DTensor; register its local shards (weightsync.Shard with the box that this rank holds)"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"has layout {tensor.layout}{' and is quantized' if tensor.is_quantized else ''}; only strided tensors move"
    if tensor.device.type != "cpu":
        return f"is on {tensor.device}; this release moves tensors in host memory"
    if dtype_name(tensor.dtype) not in DTYPES:
        return f"has dtype {tensor.dtype}; supported are {', '.join(sorted(DTYPES))}"
    if tensor.dim() > 8:
        return f"has {tensor.dim()} dimensions; at most 8 move"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate or negative view; call .resolve_conj().resolve_neg() first"
    return None


def _merge_ties(entries: list[Entry]) -> list[Entry]:
    """Entries that are the very same view of the same storage become one, named by the first."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        tensor = entry.tensor
        identity: Any = id(tensor)
        if tensor.numel():
            identity = (
                tensor.data_ptr(),
                tensor.dtype,
                tuple(tensor.shape),
                tensor.stride(),
                entry.box,
                entry.shape,
            )
        groups.setdefault(identity, []).append(entry)
    merged = []
    for group in groups.values():
        first = group[0]
        names = tuple(dict.fromkeys(entry.names[0] for entry in group))
        ties = tuple((entry.home, entry.key) for entry in group[1:])
        merged.append(Entry(names, first.box, first.shape, first.home, first.key, ties))
    return merged
