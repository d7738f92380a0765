"""Shards of Megatron-style models, by declaration: a table says how each parameter is cut and what it is called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.errors import ConfigError, LayoutError
from weightsync.integrations.megatron_cuts import Cut, Dimensions, Part
from weightsync.types import Shard


@dataclass(frozen=True, slots=True)
class Grid:
    """Where one rank stands. `etp`: tensor parallelism inside experts; `vpp`: model chunks of each rank."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    vpp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1

    def __post_init__(self) -> None:
        for kind in ("tp", "pp", "ep", "etp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if not 0 <= rank < size:
                raise ConfigError(f"{kind}_rank={rank} is not below {kind}_size={size}")


@dataclass(frozen=True, slots=True)
class Rule:
    """Parameters whose local name is `local` are cut by `cut` and belong to `names`.

    `{layer}` and `{expert}` stand for numbers: local ones on the left, global ones on the right. `is_expert`: cut by
    expert-tensor instead of tensor parallelism.
    """

    local: str
    cut: Cut
    names: tuple[str, ...]
    is_expert: bool = False

    def match(self, name: str) -> dict[str, int] | None:
        """The numbers in `name`, None if it is not a name of this rule."""
        pattern = (
            re.escape(self.local)
            .replace(r"\{layer\}", r"(?P<layer>\d+)")
            .replace(r"\{expert\}", r"(?P<expert>\d+)")
        )
        found = re.fullmatch(pattern, name)
        return None if found is None else {key: int(value) for key, value in found.groupdict().items()}


def megatron_shards(
    chunks: Sequence[torch.nn.Module | Mapping[str, torch.Tensor]],
    family: Sequence[Rule],
    dimensions: Dimensions,
    grid: Grid,
) -> list[Shard]:
    """The shards of one Megatron rank under Hugging Face checkpoint names.

    `chunks`: the rank's model chunks, one without virtual pipelining; modules or their parameters by name. `family`: a
    table of `megatron_families`, or your own. Views are of the parameters' memory. Data-parallel and other `module.`
    prefixes and Transformer Engine's `_extra_state` are dropped. Replicated tensors are held by every rank that has
    them. Raises one LayoutError that lists every parameter without a rule or with a shape that its rule can't have.
    """
    if len(chunks) != grid.vpp_size:
        raise LayoutError(
            f"{len(chunks)} model chunks were given, vpp_size={grid.vpp_size} means {grid.vpp_size}"
        )
    shards: list[Shard] = []
    problems: list[str] = []
    experts = _experts(dimensions, grid)
    for number, chunk in enumerate(chunks):
        first_layer = _first_layer(dimensions, grid, number)
        for name, tensor in _parameters(chunk):
            found = next(((rule, m) for rule in family if (m := rule.match(name)) is not None), None)
            if found is None:
                problems.append(f"{name}: no rule of this family matches it; add a Rule to its table")
                continue
            rule, numbers = found
            try:
                names = _checkpoint_names(rule, numbers, first_layer, experts)
                rank, size = (
                    (grid.etp_rank, grid.etp_size) if rule.is_expert else (grid.tp_rank, grid.tp_size)
                )
                shards += rule.cut(Part(tensor, names, rank, size, dimensions))
            except (ValueError, RuntimeError) as error:
                problems.append(f"{name}: shape {list(tensor.shape)} does not fit its rule: {error}")
    if problems:
        raise LayoutError(f"{len(problems)} parameters can't be laid out:\n  " + "\n  ".join(problems))
    return shards


def _parameters(chunk: torch.nn.Module | Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    items: Any = (
        chunk.items() if isinstance(chunk, Mapping) else [*chunk.named_parameters(), *chunk.named_buffers()]
    )
    for name, tensor in items:
        if not name.endswith("_extra_state") and isinstance(tensor, torch.Tensor):
            yield re.sub(r"^(module\.)+", "", name), tensor.detach()


def _first_layer(dimensions: Dimensions, grid: Grid, chunk: int) -> int:
    """Number of the first layer of a model chunk in the whole model."""
    count = grid.pp_size * grid.vpp_size
    stages = dimensions.stages or (dimensions.layers // count,) * count
    if len(stages) != count or sum(stages) != dimensions.layers:
        raise LayoutError(
            f"{dimensions.layers} layers in {count} stages (pp_size * vpp_size): expected as many layers in each, or "
            f"stages= with {count} numbers that add up; got {list(stages)}"
        )
    return sum(stages[: chunk * grid.pp_size + grid.pp_rank])


def _experts(dimensions: Dimensions, grid: Grid) -> tuple[int, ...]:
    """The expert in each local place of this rank."""
    if dimensions.experts is not None:
        return dimensions.experts
    count, left = divmod(dimensions.expert_count, grid.ep_size)
    if left:
        raise LayoutError(
            f"{dimensions.expert_count} experts do not divide by ep_size={grid.ep_size}; say experts= for each rank"
        )
    return tuple(range(grid.ep_rank * count, (grid.ep_rank + 1) * count))


def _checkpoint_names(
    rule: Rule, numbers: Mapping[str, int], first_layer: int, experts: Sequence[int]
) -> tuple[str, ...]:
    """Global names; where a parameter stacks experts, each name of the rule once for each local expert, in turn."""
    layer = numbers.get("layer", 0) + first_layer
    place = numbers.get("expert")
    if place is not None and place >= len(experts):
        raise ValueError(f"this rank has {len(experts)} experts, none in place {place}")
    local = experts if place is None else [experts[place]]
    return tuple(
        name.format(layer=layer, expert=expert)
        for name in rule.names
        for expert in (local if "{expert}" in name else [0])
    )
