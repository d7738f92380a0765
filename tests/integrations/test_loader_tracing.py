"""Traced loaders: the shards, carried out by a reference executor, give what the loader itself gives with data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch import nn

from tests.integrations.reference import fill_from
from weightsync import Box, Shard
from weightsync.errors import LayoutError
from weightsync.integrations.loader_tracing import trace_loader
from weightsync.wire.layout import Catalogue, TensorSpec

Weights = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[dict[str, nn.Parameter], Weights], object]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def server(**tensors: torch.Tensor) -> nn.ParameterDict:
    return nn.ParameterDict({name: nn.Parameter(t, requires_grad=False) for name, t in tensors.items()})


def same_as_loading(
    load: Load, make: Callable[[], nn.Module], checkpoint: Mapping[str, torch.Tensor]
) -> list[Shard]:
    """Trace; carry out; compare with the loader run on data, bit for bit."""
    expected, traced = make(), make()
    load(dict(expected.named_parameters()), checkpoint.items())
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in checkpoint.items()}
    shards = trace_loader(lambda weights: load(dict(traced.named_parameters()), weights), traced, meta)
    fill_from(shards, checkpoint)
    for (name, want), (_, got) in zip(expected.named_parameters(), traced.named_parameters(), strict=True):
        assert torch.equal(want, got), name
    return shards


def test_a_plain_loader_gives_whole_tensors_that_are_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(4))
    shards = trace_loader(lambda weights: model.load_state_dict(dict(weights)), model, model.state_dict())
    assert [shard.name for shard in shards] == list(model.state_dict())
    for shard in shards:
        tensor = model.state_dict()[shard.name]
        assert shard.box == Box.whole(tensor.shape)
        assert (shard.view.data_ptr(), shard.view.stride()) == (tensor.data_ptr(), tensor.stride())


def test_tracing_leaves_the_parameters_as_they_are() -> None:
    model = nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace_loader(lambda weights: model.load_state_dict(dict(weights)), model, model.state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


HEADS, KV, DIM, HIDDEN = 8, 2, 4, 6
ATTENTION = {
    "q": noise(HEADS * DIM, HIDDEN),
    "k": noise(KV * DIM, HIDDEN),
    "v": noise(KV * DIM, HIDDEN + 1)[:, 1:].contiguous(),
}


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (3, 4)])
def test_fused_qkv_takes_its_heads_and_replicates_kv_heads_when_there_are_too_few(
    rank: int, size: int
) -> None:
    q_rows, kv_rows, kv_size = HEADS * DIM // size, max(1, KV // size) * DIM, min(KV, size)

    def load(parameters: dict[str, nn.Parameter], weights: Weights) -> None:
        place = {"q": (0, q_rows, rank), "k": (q_rows, kv_rows, rank * kv_size // size)}
        place["v"] = (q_rows + kv_rows, kv_rows, place["k"][2])
        for name, weight in weights:
            at, rows, part = place[name]
            parameters["qkv"].data.narrow(0, at, rows).copy_(weight.narrow(0, part * rows, rows))

    shards = same_as_loading(load, lambda: server(qkv=torch.zeros(q_rows + 2 * kv_rows, HIDDEN)), ATTENTION)
    head = min(rank * KV // size, KV - 1) if size > KV else rank * KV // size
    assert [str(s.box) for s in shards] == [
        f"[{rank * q_rows}:{(rank + 1) * q_rows}, 0:6]",
        *[f"[{head * DIM}:{head * DIM + kv_rows}, 0:6]"] * 2,
    ]


MLP = {"gate": noise(12, 5), "up": noise(12, 6)[:, 1:].contiguous(), "down": noise(5, 12)}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_gate_up_and_down_projections_in_tensor_parallel(rank: int) -> None:
    def load(parameters: dict[str, nn.Parameter], weights: Weights) -> None:
        for name, weight in weights:
            if name == "down":
                parameters["down"][...] = weight.chunk(3, dim=1)[rank]
            else:
                half = ("gate", "up").index(name)
                parameters["gate_up"].data.view(2, 4, 5)[half] = weight[rank * 4 : rank * 4 + 4]

    same_as_loading(load, lambda: server(gate_up=torch.zeros(8, 5), down=torch.zeros(5, 4)), MLP)


EXPERTS = {
    f"{expert}.{part}": noise(*shape) + number + 10 * expert
    for expert in range(4)
    for number, (part, shape) in enumerate({"gate": (6, 3), "up": (6, 3), "down": (3, 6)}.items())
}


def test_stacked_experts_written_one_by_one() -> None:
    local = {1: 0, 3: 1}  # expert placement is the server's business

    def load(parameters: dict[str, nn.Parameter], weights: Weights) -> None:
        for name, weight in weights:
            expert, part = name.split(".")
            if int(expert) not in local:
                continue
            mine = local[int(expert)]
            if part == "down":
                parameters["w2"].data[mine].copy_(weight[:, 2:4])
            else:
                half = parameters["w13"].data[mine].narrow(0, 0 if part == "gate" else 2, 2)
                half.copy_(weight.narrow(0, 2, 2))

    make = lambda: server(w13=torch.zeros(2, 4, 3), w2=torch.zeros(2, 3, 2))  # noqa: E731
    shards = same_as_loading(load, make, EXPERTS)
    assert {s.name for s in shards} == {f"{e}.{p}" for e in (1, 3) for p in ("gate", "up", "down")}


def test_stacked_experts_collected_stacked_and_concatenated() -> None:
    def load(parameters: dict[str, nn.Parameter], weights: Weights) -> None:
        kept = dict(weights)
        gate, up, down = (
            torch.stack([kept[f"{e}.{part}"] for e in range(4)]) for part in ("gate", "up", "down")
        )
        parameters["w13"].data.copy_(torch.cat([gate, up], dim=1))
        parameters["w2"].data.copy_(down.transpose(1, 2).contiguous().view(4, 6, 3))

    shards = same_as_loading(
        load, lambda: server(w13=torch.zeros(4, 12, 3), w2=torch.zeros(4, 6, 3)), EXPERTS
    )
    assert len(shards) == 12


def padded_by_fill(parameter: nn.Parameter, weight: torch.Tensor) -> None:
    parameter.data[: weight.shape[0]].copy_(weight)
    parameter.data[weight.shape[0] :].fill_(0)


def padded_by_zeroing_first(parameter: nn.Parameter, weight: torch.Tensor) -> None:
    parameter.data.zero_()
    parameter.data[: weight.shape[0]] = weight


def padded_by_function(parameter: nn.Parameter, weight: torch.Tensor) -> None:
    parameter.data.copy_(
        nn.functional.pad(weight, (0, 0, 0, parameter.shape[0] - weight.shape[0]), value=2.5)
    )


def padded_by_buffer(parameter: nn.Parameter, weight: torch.Tensor) -> None:
    buffer = torch.ones(parameter.shape)
    buffer[: weight.shape[0]] = weight
    parameter.data.copy_(buffer)


@pytest.mark.parametrize(
    "pad", [padded_by_fill, padded_by_zeroing_first, padded_by_function, padded_by_buffer]
)
def test_a_padded_vocabulary_takes_what_exists_and_keeps_the_loaders_padding(
    pad: Callable[..., None],
) -> None:
    def load(parameters: dict[str, nn.Parameter], weights: Weights) -> None:
        for _, weight in weights:
            pad(parameters["embed"], weight[4:])  # the last of two ranks: rows 4 to 7, of 7

    shards = same_as_loading(load, lambda: server(embed=torch.full((4, 3), -7.0)), {"embed": noise(7, 3)})
    assert [str(shard.box) for shard in shards] == ["[4:7, 0:3]"]


def tied_server() -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def test_a_tied_head_is_loaded_once() -> None:
    model = tied_server()
    checkpoint = {"embed.weight": noise(5, 3), "head.weight": noise(5, 3)}

    def load(weights: Weights) -> None:
        for name, weight in weights:
            if name != "head.weight":
                model["embed"].weight.data.copy_(weight)

    assert [shard.name for shard in trace_loader(load, model, checkpoint)] == ["embed.weight"]


def test_names_that_are_tied_in_the_checkpoint_may_go_to_one_place() -> None:
    model = tied_server()

    def load(weights: Weights) -> None:
        for _, weight in weights:
            model["embed"].weight.data.copy_(weight)

    checkpoint = {"embed.weight": noise(5, 3), "head.weight": noise(5, 3)}
    with pytest.raises(
        LayoutError, match=r'by embed.weight and by head.weight; if they are one tensor, say tied=\[\("'
    ):
        trace_loader(load, model, checkpoint)
    names = [s.name for s in trace_loader(load, model, checkpoint, tied=[("embed.weight", "head.weight")])]
    assert names == ["embed.weight", "head.weight"]
    spec = TensorSpec("embed.weight", "float32", (5, 3))
    catalogue = Catalogue((spec,), {"head.weight": "embed.weight"})
    assert [s.name for s in trace_loader(load, model, catalogue)] == names


def stored_transposed() -> nn.Module:
    return server(w=torch.zeros(4, 6).t())


def grouped(parameters: dict[str, nn.Parameter], weights: Weights) -> None:
    """Per group: two queries, one key; the checkpoint has all queries first."""
    (_, q), (_, k) = weights
    fused = torch.cat([q.view(3, 2, 4), k.view(3, 1, 4)], dim=1)
    parameters["w"].copy_(fused.reshape(9, 4))


def each(copy: Callable[[nn.Parameter, torch.Tensor], object]) -> Load:
    """A loader of one tensor into the parameter `w`."""
    return lambda parameters, weights: [copy(parameters["w"], weight) for _, weight in weights]


def one(*shape: int) -> Callable[[], nn.Module]:
    return lambda: server(w=torch.zeros(shape))


def between_parameters(parameters: dict[str, nn.Parameter], weights: Weights) -> None:
    for _, weight in weights:
        parameters["a"].data.copy_(weight)
        parameters["b"].data.copy_(parameters["a"].data.t())


HALF = torch.bfloat16
ROWS, MASK, SHIFT = (
    torch.tensor([4, 5, 0, 1, -3, 2]),
    torch.tensor([True, False, True]),
    torch.tensor([2, 0, 1]),
)
WAYS: dict[str, tuple[Load, Callable[[], nn.Module], tuple[int, ...]]] = {
    "transposed source": (each(lambda p, t: p.data.copy_(t.t())), one(4, 6), (6, 4)),
    "transposed storage": (each(lambda p, t: p.data.copy_(t)), stored_transposed, (6, 4)),
    "written through a transpose": (each(lambda p, t: p.data.t().copy_(t)), stored_transposed, (4, 6)),
    "flattened": (each(lambda p, t: p.data.view(-1).copy_(t.reshape(-1))), one(4, 6), (6, 4)),
    "a flat interval": (each(lambda p, t: p.copy_(t.reshape(-1)[3:17])), one(14), (6, 4)),
    "transposed, then flattened": (each(lambda p, t: p.copy_(t.t().reshape(-1))), one(24), (6, 4)),
    "permuted": (each(lambda p, t: p.copy_(t.view(2, 3, 4).permute(2, 0, 1).reshape(4, 6))), one(4, 6), (6, 4)),
    "rows by index": (each(lambda p, t: p.copy_(t[ROWS])), one(6, 4), (6, 4)),
    "rows by mask": (each(lambda p, t: p.copy_(t[MASK])), one(2, 4), (3, 4)),
    "columns by index_select": (each(lambda p, t: p.copy_(t.index_select(1, SHIFT))), one(6, 3), (6, 4)),
    "into rows by index": (each(lambda p, t: p.data.__setitem__(SHIFT, t)), one(3, 4), (3, 4)),
    "index_copy_": (each(lambda p, t: p.data.index_copy_(0, SHIFT, t)), one(3, 4), (3, 4)),
    "every second row": (each(lambda p, t: p.copy_(t[1::2])), one(3, 4), (6, 4)),
    "flipped": (each(lambda p, t: p.copy_(t.flip(0, 1))), one(3, 4), (3, 4)),
    "repeated": (each(lambda p, t: p.copy_(t.repeat_interleave(2, 0).repeat(1, 2))), one(6, 8), (3, 4)),
    "unbound and stacked": (each(lambda p, t: p.copy_(torch.stack(t.unbind(0)[::-1], 1))), one(4, 3), (3, 4)),
    "split": (each(lambda p, t: p.copy_(torch.cat(t.split([1, 3])[::-1]))), one(4, 3), (4, 3)),
    "a scalar": (each(lambda p, t: p.data.copy_(t)), one(), ()),
    "filled with an item": (each(lambda p, t: p.data.fill_(t.item())), one(1), (1,)),
    "an item assigned": (each(lambda p, t: p.data.__setitem__(slice(0, 2), t.item())), one(2), (1,)),
    "broadcast": (each(lambda p, t: p.data.copy_(t)), one(2, 3), (3,)),
    "narrowed once": (
        each(lambda p, t: p.copy_(t.to(HALF))), lambda: server(w=torch.zeros(3, 4, dtype=HALF)), (3, 4)
    ),
    "copied between parameters": (
        between_parameters, lambda: server(a=torch.zeros(2, 3), b=torch.zeros(3, 2)), (2, 3)
    ),
    "a temporary written over": (
        each(lambda p, t: p.data.copy_(torch.cat([t, t]).index_copy_(0, torch.tensor([0]), t[1:]))), one(4, 3), (2, 3)
    ),
    "a temporary filled by index": (
        each(lambda p, t: p.data.copy_(torch.zeros(5, 4).index_copy_(0, SHIFT, t)[:3])), one(3, 4), (3, 4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_way_of_loading_is_followed_exactly(way: str) -> None:
    load, make, shape = WAYS[way]
    same_as_loading(load, make, {"w": noise(*shape)})


def test_interleaved_groups_of_heads_are_followed_exactly() -> None:
    same_as_loading(grouped, one(9, 4), {"q": noise(6, 4), "k": noise(3, 4)})


def test_a_detour_through_a_wider_dtype_is_followed_exactly() -> None:
    load = each(lambda p, t: p.copy_(t.float().to(HALF)))
    same_as_loading(load, lambda: server(w=torch.zeros(3, 4, dtype=HALF)), {"w": noise(3, 4, dtype=HALF)})


def test_parameters_that_share_one_storage_are_told_apart() -> None:
    def make() -> nn.Module:
        arena = torch.zeros(5, 8)
        return server(left=arena[:, :3], right=arena[:, 3:])

    def load(parameters: dict[str, nn.Parameter], weights: Weights) -> None:
        for name, weight in weights:
            parameters[name].data.copy_(weight)

    same_as_loading(load, make, {"left": noise(5, 3), "right": noise(5, 5)})


def fused(rows: int = 6) -> nn.ParameterDict:
    return server(qkv=torch.zeros(rows, 4), norm=torch.zeros(4))


CHECKPOINT = {"q": noise(2, 4), "k": noise(2, 4), "v": noise(2, 4), "norm": noise(4), "scale": noise(1)}


def trace(loader: Callable[[nn.ParameterDict, dict[str, torch.Tensor]], object]) -> list[Shard]:
    model = fused()
    return trace_loader(lambda weights: loader(model, dict(weights)), model, CHECKPOINT)


def put(model: nn.ParameterDict, weights: dict[str, torch.Tensor], *parts: tuple[str, int]) -> None:
    for name, at in parts:
        model["qkv"].data[at : at + 2] = weights[name]
    model["norm"].data.copy_(weights["norm"])


def test_what_a_loader_forgets_is_listed() -> None:
    with pytest.raises(LayoutError, match=r"qkv: \[4:6, 0:4\] is never written"):
        trace(lambda model, weights: put(model, weights, ("q", 0), ("k", 2)))


def test_what_a_loader_writes_twice_is_listed() -> None:
    with pytest.raises(LayoutError, match=r"qkv: \[3:4, 0:4\] is written twice, by k and by v"):
        trace(lambda model, weights: put(model, weights, ("q", 0), ("k", 2), ("v", 4), ("v", 3)))
    with pytest.raises(LayoutError, match=r"qkv: \[0:2, 0:4\] is written twice, by q and by q$"):
        trace(lambda model, weights: put(model, weights, ("q", 0), ("k", 2), ("v", 4), ("q", 0)))


def test_a_constant_over_loaded_elements_is_an_overlap() -> None:
    with pytest.raises(
        LayoutError, match=r"qkv: \[5:6, 0:4\] is written twice, by v and by a value of the loader's own"
    ):
        trace(lambda m, w: (put(m, w, ("q", 0), ("k", 2), ("v", 4)), m["qkv"].data[5:].zero_()))


def test_all_gaps_and_overlaps_come_in_one_error() -> None:
    with pytest.raises(LayoutError) as caught:
        trace(lambda model, weights: model["qkv"].data.copy_(weights["q"].repeat(3, 1)[:, :1]))
    assert "exactly once (1)" in str(caught.value)
    with pytest.raises(LayoutError) as caught:
        trace(lambda model, weights: model["qkv"].data[1:3].copy_(weights["q"]))
    for fragment in (
        "exactly once (3)",
        "[0:1, 0:4] is never",
        "[3:6, 0:4] is never",
        "norm: [0:4] is never",
    ):
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (lambda m, w: m["norm"].data.copy_(w["norm"] * w["scale"]), r"^norm, scale: aten.mul.Tensor needs their data"),
        (lambda m, w: m["norm"].data.copy_(w["norm"] / w["norm"].abs().max().item()), r"^norm: aten.abs.default needs"),
        (lambda m, w: m["norm"].fill_(w["scale"].item() * 2), r"after it was given scale: TypeError: unsupported oper"),
        (lambda m, w: m["norm"].mul_(w["scale"].item()), r"^mul_ needs the value of a scalar of the checkpoint"),
        (lambda m, w: float(w["scale"]), r"^scale: aten._local_scalar_dense.default needs"),
        (lambda m, w: m["norm"].data.add_(w["norm"]), r"^norm: aten.add_.Tensor needs"),
        (lambda m, w: torch.stack([w["q"], w["k"]]).sum(), r"^q, k: aten.sum.default needs"),
        (lambda m, w: w["q"].view(torch.int32), r"^q: aten.view.dtype reads their bits as torch.int32"),
        (lambda m, w: w["q"].numpy(), r"the loader failed after it was given scale: TypeError"),
        (lambda m, w: w["absent"], r"the loader failed after it was given scale: KeyError"),
        (lambda m, w: setattr(m["norm"], "data", w["norm"]), r"the loader failed after it was given scale: RuntimeErr"),
    ],
)  # fmt: skip
def test_a_loader_that_needs_data_is_told_which_tensor_and_which_operation(
    loader: Callable[..., object], text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        trace(loader)


def test_an_error_that_the_loader_swallows_is_raised_all_the_same() -> None:
    def loader(model: nn.ParameterDict, weights: dict[str, torch.Tensor]) -> None:
        put(model, weights, ("q", 0), ("k", 2), ("v", 4))
        with contextlib.suppress(Exception):
            model["norm"].data.copy_(weights["norm"].exp())

    with pytest.raises(LayoutError, match=r"^norm: aten.exp.default needs"):
        trace(loader)


def test_a_replaced_parameter_is_an_error() -> None:
    def loader(model: nn.ParameterDict, weights: dict[str, torch.Tensor]) -> None:
        put(model, weights, ("q", 0), ("k", 2), ("v", 4))
        model["norm"] = nn.Parameter(weights["norm"])

    with pytest.raises(LayoutError, match="norm: the loader replaced this parameter; it must copy into it"):
        trace(loader)


def test_a_dtype_that_loses_bits_on_the_way_is_an_error() -> None:
    model = server(w=torch.zeros(3))
    load = lambda weights: [model["w"].data.copy_(w.half()) for _, w in weights]  # noqa: E731
    with pytest.raises(
        LayoutError, match=r"w: w is torch.float32 in the checkpoint and passes torch.float16 on its way"
    ):
        trace_loader(load, model, {"w": noise(3)})


def test_ignored_parameters_need_not_be_loaded() -> None:
    model = fused()
    load = lambda weights: put(model, dict(weights), ("q", 0), ("k", 2), ("v", 4))  # noqa: E731
    model["own"] = nn.Parameter(torch.ones(2))
    with pytest.raises(LayoutError, match=r"own: \[0:2\] is never written"):
        trace_loader(load, model, CHECKPOINT)
    assert {s.name for s in trace_loader(load, model, CHECKPOINT, ignore=["own"])} == {"q", "k", "v", "norm"}
