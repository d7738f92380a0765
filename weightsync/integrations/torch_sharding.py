"""Shards of torch's own sharding: DTensors (FSDP2, HSDP, tensor parallel and mixes), FSDP1, ZeRO-3, plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weightsync.errors import LayoutError
from weightsync.integrations.boxes import Interval, boxes_of_runs
from weightsync.integrations.flat import FlatTensor, flat_shards
from weightsync.integrations.names import canonical_names
from weightsync.types import Box, Shard

_DATA_PARALLEL = frozenset({"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"})


def torch_shards(
    source: torch.nn.Module | Mapping[str, torch.Tensor], *, rename: Callable[[str], str | None] | None = None
) -> list[Shard]:
    """The shards that this rank holds of a module or state dict, ready for `Publisher.register` on every rank.

    Views are of the parameters' own memory (fp32 masters stay fp32; `Publisher(wire_dtype=)` casts). A local tensor may
    be several boxes; one that is empty here has none. Names are checkpoint names, without the names of wrappers (see
    `canonical_names`); `rename` changes them further, and drops those for which it gives None. Tied tensors give shards
    of the same view under each name, which is an alias group. Call it when the model is on its final device and
    sharded; tensors that are moved or replaced later need a new call.

    Raises one LayoutError that lists every tensor with a pending reduction, every module whose parameters are gathered
    at the moment, and every name that two different tensors claim.
    """
    problems: list[str] = []
    if isinstance(source, torch.nn.Module):
        found = list(_in_module(source, problems))
        data_parallel = type(getattr(source, "_orig_mod", source)).__name__ in _DATA_PARALLEL
    else:
        found = [(name, _Held(tensor)) for name, tensor in source.items()]
        data_parallel = bool(source) and all(name.startswith("module.") for name in source)
    names = canonical_names((name for name, _ in found), data_parallel=data_parallel)
    owners: dict[str, tuple[str, _Held]] = {}
    shards: list[Shard] = []
    for original, held in found:
        name = names.get(original)
        if name is not None and rename is not None:
            name = rename(name)
        if name is None:
            continue
        other, owner = owners.setdefault(name, (original, held))
        if other != original:
            if owner.tensor is not held.tensor:
                problems.append(
                    f"{name}: both {other} and {original} would get this name; rename or drop one"
                )
            continue
        try:
            shards += held.shards(name)
        except LayoutError as error:
            problems.append(str(error))
    if problems:
        raise LayoutError(f"{len(problems)} problems with the sharded tensors:\n  " + "\n  ".join(problems))
    return shards


def placement_runs(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> list[list[Interval]]:
    """For each axis of a DTensor, the global intervals whose concatenation is the local axis at `coordinate`.

    Placements are applied from left to right, as DTensor defines them. Raises ValueError for any that isn't
    Shard, _StridedShard or Replicate.
    """
    runs: list[list[Interval]] = [[(0, n)] for n in shape]
    for placement, count, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, _StridedShard):  # in some releases a subclass of Shard
            parts = [
                _chunk(runs[placement.dim], int(placement.split_factor), i)
                for i in range(int(placement.split_factor))
            ]
            runs[placement.dim] = [run for part in parts for run in _chunk(part, count, index)]
        elif isinstance(placement, Split):
            runs[placement.dim] = _chunk(runs[placement.dim], count, index)
        elif not isinstance(placement, Replicate):
            raise ValueError(f"{placement} is not a way of storing a tensor")
    return [_joined(axis) for axis in runs]


def _chunk(runs: list[Interval], count: int, index: int) -> list[Interval]:
    """Chunk `index` of `count` of the concatenated `runs`, sized as torch.chunk does."""
    total = sum(b - a for a, b in runs)
    size = -(-total // count)
    first, last = min(index * size, total), min((index + 1) * size, total)
    chunk: list[Interval] = []
    at = 0
    for a, b in runs:
        begin, end = max(first, at), min(last, at + b - a)
        if begin < end:
            chunk.append((a + begin - at, a + end - at))
        at += b - a
    return chunk


def _joined(runs: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for a, b in runs:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return joined


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor as it was found; in FSDP1, the flat parameter that holds it."""

    tensor: torch.Tensor
    flat: FlatTensor | None = None
    start: int = 0

    def shards(self, name: str) -> list[Shard]:
        tensor = self.tensor.detach()
        if self.flat is not None:
            return flat_shards(tensor, self.start, [FlatTensor(name, self.flat.shape, self.flat.offset)])
        if isinstance(tensor, DTensor):
            return _of_dtensor(name, tensor)
        if hasattr(self.tensor, "ds_tensor"):
            return _of_zero3(name, self.tensor)
        return [Shard(name, Box.whole(tensor.shape), tensor, tuple(tensor.shape))]


def _of_dtensor(name: str, tensor: DTensor) -> list[Shard]:
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    pending = [dim for dim, placement in zip(names, tensor.placements, strict=True) if placement.is_partial()]
    if pending:
        raise LayoutError(
            f"{name}: holds partial sums over mesh dimension {', '.join(pending)} ({tensor.placements}), "
            "expected Shard or Replicate; reduce it first, e.g. tensor.redistribute(placements=[Replicate()])"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    with torch.no_grad():
        local = tensor.to_local().detach()
    if 0 in shape:
        return [Shard(name, Box.whole(shape), local.view(shape), shape)]
    runs = placement_runs(shape, tensor.placements, tuple(mesh.shape), coordinate)
    expected = tuple(sum(b - a for a, b in axis) for axis in runs)
    if tuple(local.shape) != expected:
        raise LayoutError(
            f"{name}: {tensor.placements} on mesh {tuple(mesh.shape)} means a local shape {list(expected)} at "
            f"{list(coordinate)}, got {list(local.shape)}; is the local tensor padded or was it replaced?"
        )
    return [
        Shard(name, box, local[tuple(slice(a, b) for a, b in zip(here.start, here.stop, strict=True))], shape)
        for box, here in boxes_of_runs(runs)
    ]


def _of_zero3(name: str, parameter: Any) -> list[Shard]:
    """A ZeRO-3 parameter: rank r holds elements [r * n, (r + 1) * n) of it, the last rank's padded."""
    part, shape = parameter.ds_tensor.detach(), tuple(parameter.ds_shape)
    rank = torch.distributed.get_rank(parameter.ds_process_group)
    if part.numel() != parameter.ds_tensor.ds_numel:
        raise LayoutError(
            f"{name}: its ZeRO-3 partition is swapped out; publish with NVMe parameter offload disabled"
        )
    return flat_shards(part.view(-1), rank * part.numel(), [FlatTensor(name, shape)])


def _in_module(module: torch.nn.Module, problems: list[str]) -> Iterator[tuple[str, _Held]]:
    """Parameters and persistent buffers under their full names; those inside flat parameters under their own."""
    taken: set[tuple[int, str]] = set()
    children = list(module.named_modules(remove_duplicate=False))
    for prefix, child in children:
        handle = getattr(child, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is not None:
            yield from _in_flat_parameter(prefix, flat, taken)
        if _is_gathered(child):
            problems.append(
                f"{prefix or 'the model'}: its parameters are gathered right now; call .reshard() on it first"
            )
    for prefix, child in children:
        for kind in (child._parameters, child._buffers):
            for key, tensor in kind.items():
                transient = key in child._non_persistent_buffers_set
                if (
                    tensor is None
                    or transient
                    or (id(child), key) in taken
                    or hasattr(tensor, "_is_flat_param")
                ):
                    continue
                yield (f"{prefix}.{key}" if prefix else key), _Held(tensor)


def _in_flat_parameter(prefix: str, flat: Any, taken: set[tuple[int, str]]) -> Iterator[tuple[str, _Held]]:
    """FSDP1: original parameters, by the metadata that FlatParameter documents."""
    local = getattr(
        flat, "_local_shard", flat
    )  # set by the first forward pass; before it, the parameter is the shard
    by_place: dict[tuple[int, str], tuple[str, _Held]] = {}
    storage = zip(
        flat._shapes, flat._contiguities, flat._param_extensions, flat._shard_param_infos, strict=True
    )
    for info, fqn, (shape, contiguous, extension, part) in zip(
        flat._param_infos, flat._fqns, storage, strict=True
    ):
        name = f"{prefix}.{fqn}" if prefix else fqn
        if extension is not None or not contiguous:
            raise LayoutError(
                f"{name}: FSDP1 with tensor parallel or non-contiguous parameters isn't read; use fully_shard"
            )
        here = (
            slice(part.offset_in_shard, part.offset_in_shard + part.numel_in_shard)
            if part.in_shard
            else slice(0)
        )
        held = _Held(local.detach()[here], FlatTensor(name, tuple(shape)), part.intra_param_start_idx or 0)
        by_place[id(info.module), info.param_name] = (name, held)
        yield name, held
    for shared in flat._shared_param_infos:
        _, held = by_place[id(shared.prim_module), shared.prim_param_name]
        name = ".".join(filter(None, (prefix, shared.module_name, shared.param_name)))
        by_place[id(shared.module), shared.param_name] = (name, held)
        yield name, held
    taken.update(by_place)


def _is_gathered(module: torch.nn.Module) -> bool:
    """Whether FSDP2 has this module's own parameters unsharded, e.g. the root after a forward pass."""
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return any(group is not None and not group.is_sharded for group in groups)
