"""Shards of DTensors and flat parameters, from real processes, against the unsharded tensors."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.integrations.reference import assemble
from weightsync import Box, Shard
from weightsync.errors import LayoutError
from weightsync.integrations.flat import FlatTensor, flat_shards
from weightsync.integrations.names import canonical_names
from weightsync.integrations.torch_sharding import placement_runs, torch_shards
from weightsync.tensors import find_tensors

DEADLINE_S = 90.0

# ---- without processes


def chunks(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    found = list(tensor.chunk(count)) if len(tensor) else []
    return found + [tensor[:0]] * (count - len(found))


@settings(deadline=None)
@given(
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 2, 3])), min_size=1, max_size=3),
)
def test_runs_are_what_dtensor_keeps_at_every_coordinate(size: int, mesh: list[tuple[int, int]]) -> None:
    """The second number of a mesh dimension: 0 replicates, 1 shards, more is the factor of a strided shard."""
    kinds: dict[int, Placement] = {0: Replicate(), 1: Split(0)}
    placements = [kinds.get(kind) or _StridedShard(0, split_factor=kind) for _, kind in mesh]
    mesh_shape = [count for count, _ in mesh]
    for coordinate in torch.cartesian_prod(*map(torch.arange, mesh_shape)).reshape(-1, len(mesh)).tolist():
        kept = torch.arange(size)
        for placement, count, index in zip(placements, mesh_shape, coordinate, strict=True):
            if isinstance(placement, _StridedShard):
                kept = placement._split_tensor(kept, count, with_padding=False)[0][index]
            elif isinstance(placement, Split):
                kept = chunks(kept, count)[index]
        (runs,) = placement_runs((size,), placements, mesh_shape, coordinate)
        assert [i for a, b in runs for i in range(a, b)] == kept.tolist()
        assert all(b < c for (_, b), (c, _) in itertools.pairwise(runs)), "neighbours are joined"


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4), st.integers(1, 5))
def test_a_flat_parameter_in_any_number_of_parts_is_complete(
    shapes: list[tuple[int, int]], parts: int
) -> None:
    checkpoint = {str(n): torch.randn(shape) for n, shape in enumerate(shapes)}
    tensors, offset = [], 0
    for name, tensor in checkpoint.items():
        tensors.append(FlatTensor(name, tuple(tensor.shape), offset))
        offset += tensor.numel() + 3  # aligned
    whole = torch.cat([torch.cat([t.reshape(-1), torch.full((3,), math.nan)]) for t in checkpoint.values()])
    size = -(-len(whole) // parts)
    buffers = [whole[n * size : (n + 1) * size].clone() for n in range(parts)]
    ranks = [flat_shards(buffer, n * size, tensors) for n, buffer in enumerate(buffers)]
    for held in assemble(ranks, checkpoint).values():
        assert (held == 1).all()
    memory = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    assert all(s.view.untyped_storage().data_ptr() in memory for shards in ranks for s in shards)


def test_a_flat_buffer_must_be_flat() -> None:
    with pytest.raises(LayoutError, match=r"this one has shape \[4\] and strides \[2\]"):
        flat_shards(torch.zeros(8)[::2], 0, [FlatTensor("a", (4,))])


def test_wrappers_leave_no_trace_in_names() -> None:
    name = "module._orig_mod.model._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.mlp.weight"
    assert canonical_names([name], data_parallel=True) == {name: "model.layers.0.mlp.weight"}
    assert canonical_names(["module.weight", "own.module.weight"]) == {
        "module.weight": "module.weight",
        "own.module.weight": "own.module.weight",
    }


def test_peft_names_are_those_of_the_base_checkpoint() -> None:
    names = {
        "base_model.model.model.layers.0.q_proj.base_layer.weight": "model.layers.0.q_proj.weight",
        "base_model.model.model.layers.0.q_proj.lora_A.default.weight": "model.layers.0.q_proj.lora_A.default.weight",
        "base_model.model.lm_head.modules_to_save.default.weight": "lm_head.weight",
        "base_model.model.model.norm.weight": "model.norm.weight",
    }
    assert canonical_names([*names, "base_model.model.lm_head.original_module.weight"]) == names


def test_a_plain_module_is_whole_tensors_without_transient_buffers() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 3)), nn.BatchNorm1d(3))
    model[1].register_buffer("cache", torch.zeros(2), persistent=False)
    shards = torch_shards(torch.compile(model, backend="eager"))
    assert {s.name for s in shards} == {
        "0.weight",
        "0.bias",
        *(f"1.{name}" for name in model[1].state_dict()),
    }
    assert all(s.box == Box.whole(s.shape) for s in shards)
    assert {s.view.data_ptr() for s in shards if s.name == "0.weight"} == {model[0].weight.data_ptr()}


def test_a_state_dict_of_a_data_parallel_model_loses_its_prefix() -> None:
    assert [s.name for s in torch_shards({"module.a": torch.ones(1), "module.b": torch.ones(1)})] == [
        "a",
        "b",
    ]
    assert [s.name for s in torch_shards({"module.a": torch.ones(1), "b": torch.ones(1)})] == [
        "module.a",
        "b",
    ]


def test_two_tensors_with_one_name_are_an_error() -> None:
    with pytest.raises(LayoutError, match=r"a: both _orig_mod.a and a would get this name"):
        torch_shards({"_orig_mod.a": torch.ones(1), "a": torch.ones(1)})


def test_names_can_be_changed_and_dropped() -> None:
    shards = torch_shards({"a.x": torch.ones(1), "b": torch.ones(1)}, rename={"a.x": "x"}.get)
    assert [s.name for s in shards] == ["x"]


# ---- with processes

Case = Callable[[int, int], dict[str, Any]]


def _work(rank: int, size: int, folder: str, case: Case) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        torch.save(case(rank, size), f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def on_ranks(case: Case, size: int, folder: Path) -> list[dict[str, Any]]:
    """What `case(rank, size)` returns in each of `size` real processes of a gloo group."""
    children = mp.spawn(_work, (size, str(folder), case), nprocs=size, join=False)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not children.join(timeout=max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                pytest.fail(f"{case.__name__} did not end within {DEADLINE_S:g} s")
    finally:
        for process in children.processes:
            if process.is_alive():
                process.kill()
            process.join(10)
    assert [process.exitcode for process in children.processes] == [0] * size
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def kept(shards: list[Shard]) -> list[Shard]:
    return [Shard(s.name, s.box, s.view.clone(), s.shape) for s in shards]


def noise(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def network() -> nn.Sequential:
    """Uneven everywhere, the last layer tied to the first."""
    model = nn.Sequential(
        nn.Linear(6, 10, bias=False), nn.Linear(10, 7), nn.LayerNorm(7), nn.Linear(6, 10, bias=False)
    )
    for name, parameter in model.named_parameters():
        parameter.data.copy_(noise(name, *parameter.shape))
    model[3].weight = model[0].weight
    return model


def reference() -> Mapping[str, torch.Tensor]:
    return network().state_dict()


PLACED: dict[str, tuple[tuple[int, ...], tuple[Placement, ...], int]] = {
    "rows then rows": ((13, 3), (Split(0), Split(0)), 1),
    "rows and columns": ((5, 7), (Split(0), Split(1)), 1),
    "columns, replicated": ((5, 7), (Replicate(), Split(1)), 2),
    "replicated": ((2, 3), (Replicate(), Replicate()), 4),
    "fewer rows than ranks": ((1, 3), (Split(0), Split(0)), 1),
    "a scalar": ((), (Replicate(), Replicate()), 4),
    "strided": ((13, 3), (_StridedShard(0, split_factor=2), Split(0)), 1),
    "nothing": ((0, 3), (Split(0), Replicate()), 0),
}
"""Shape, placements on a mesh of 2 x 2, and by how many ranks each element is held."""


def _four_ranks(rank: int, size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placed = {}
    for name, (shape, placements, _) in PLACED.items():
        placed[name] = distribute_tensor(noise(name, *shape), mesh, placements, src_data_rank=None)
        assert torch.equal(placed[name].full_tensor(), noise(name, *shape))
    mixed = network()
    mixed[3] = nn.Identity()
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(mixed, mesh["tp"], plan)
    for layer in mixed[:3]:
        fully_shard(layer, mesh=mesh["dp"])
    hybrid = network()
    fully_shard(hybrid, mesh=mesh)
    halves = init_device_mesh("cpu", (4,))
    flat = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)
    return {
        "placed": kept(torch_shards(placed)),
        "mixed": kept(torch_shards(mixed)),
        "strided": any(isinstance(p, _StridedShard) for t in mixed.parameters() for p in t.placements),
        "hybrid": kept(torch_shards(hybrid.state_dict())),
        "flat": kept(torch_shards(flat)),
        "outside": kept(torch_shards({"a": DTensor.from_local(torch.ones(2), halves, [Split(0)])})),
    }


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(_four_ranks, 4, tmp_path_factory.mktemp("four"))


def test_every_placement_holds_each_element_as_often_as_it_replicates(four: list[dict[str, Any]]) -> None:
    checkpoint = {name: noise(name, *shape) for name, (shape, _, _) in PLACED.items()}
    held = assemble((rank["placed"] for rank in four), checkpoint)
    assert {name: set(count.unique().tolist()) - {0} for name, count in held.items() if count.numel()} == {
        name: {times} for name, (_, _, times) in PLACED.items() if times
    }
    assert all((held[name] == times).all() for name, (_, _, times) in PLACED.items())
    assert [len([s for s in rank["placed"] if s.name == "nothing"]) for rank in four] == [1] * 4


def test_fsdp2_over_tensor_parallel_holds_each_element_once(four: list[dict[str, Any]]) -> None:
    assert all(rank["strided"] for rank in four), "the case lost its strided shards"
    checkpoint = {name: tensor for name, tensor in reference().items() if not name.startswith("3.")}
    held = assemble((rank["mixed"] for rank in four), checkpoint)
    sharded = {"0.weight", "1.weight"}
    assert {name: set(count.unique().tolist()) for name, count in held.items()} == {
        name: {1} if name in sharded else {2} for name in checkpoint
    }


def test_hsdp_holds_each_element_once_for_each_replica(four: list[dict[str, Any]]) -> None:
    held = assemble((rank["hybrid"] for rank in four), reference())
    assert all((count == 2).all() for count in held.values())


def test_fsdp1_with_original_parameters_is_complete(four: list[dict[str, Any]]) -> None:
    held = assemble((rank["flat"] for rank in four), reference())
    assert all((count == 1).all() for count in held.values())


def _two_ranks(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = network()
    model[1] = checkpoint_wrapper(model[1])
    fully_shard(model, mesh=mesh)
    shards = torch_shards(model)
    found["names"] = [entry.names for entry in find_tensors(shards)]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    found["trained"] = kept(shards)

    model.unshard()
    found["gathered"] = _message(lambda: torch_shards(model))
    model.reshard()
    found["resharded"] = len(torch_shards(model)) == len(shards)

    sums = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    found["partial"] = _message(lambda: torch_shards({"a": sums, "b": sums, "c": torch.ones(1)}))
    part = init_device_mesh("cpu", (2,))
    found["padded"] = _message(
        lambda: torch_shards(
            {"p": DTensor.from_local(torch.ones(4), part, [Split(0)], shape=(5,), stride=(1,))}
        )
    )
    flat = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=False)
    found["flat"] = kept(torch_shards(flat))
    found["flat names"] = [entry.names for entry in find_tensors(torch_shards(flat))]

    class Partitioned(nn.Module):  # as DeepSpeed leaves a parameter in ZeRO-3
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(0))
            self.weight.ds_shape, self.weight.ds_process_group = (3, 3), dist.group.WORLD
            self.weight.ds_tensor = torch.cat([noise("zero", 3, 3).view(-1), torch.zeros(1)]).chunk(2)[rank]
            self.weight.ds_tensor.ds_numel = 5

    found["zero"] = kept(torch_shards(Partitioned()))
    return found


def _message(call: Callable[[], object]) -> str:
    with pytest.raises(LayoutError) as caught:
        call()
    return str(caught.value)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(_two_ranks, 2, tmp_path_factory.mktemp("two"))


def test_shards_follow_the_optimizer_because_they_are_views(two: list[dict[str, Any]]) -> None:
    trained = {name: tensor - 0.5 for name, tensor in reference().items()}
    held = assemble((rank["trained"] for rank in two), trained)
    assert all((count == 1).all() for count in held.values())


def test_tied_tensors_are_one_alias_group(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert ("0.weight", "3.weight") in rank["names"]
        assert all(("0.weight" in names) == ("3.weight" in names) for names in rank["flat names"])


def test_gathered_parameters_are_an_error(two: list[dict[str, Any]]) -> None:
    assert (
        "the model: its parameters are gathered right now; call .reshard() on it first" in two[0]["gathered"]
    )
    assert all(rank["resharded"] for rank in two)


def test_partial_sums_are_an_error_that_says_what_to_do(two: list[dict[str, Any]]) -> None:
    text = two[1]["partial"]
    assert text.startswith("2 problems")
    assert "a: holds partial sums over mesh dimension dp" in text
    assert "redistribute(placements=[Replicate()])" in text


def test_a_local_tensor_of_another_size_is_an_error(two: list[dict[str, Any]]) -> None:
    assert "means a local shape [2] at [1], got [4]; is the local tensor padded" in two[1]["padded"]


def test_fsdp1_with_flat_parameters_only_is_complete(two: list[dict[str, Any]]) -> None:
    held = assemble((rank["flat"] for rank in two), reference())
    assert all((count == 1).all() for count in held.values())


def test_zero3_partitions_are_complete(two: list[dict[str, Any]]) -> None:
    held = assemble((rank["zero"] for rank in two), {"weight": noise("zero", 3, 3)})
    assert (held["weight"] == 1).all()
