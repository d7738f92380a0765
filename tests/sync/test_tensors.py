"""Every kind of tensor arrives bit for bit, in every swap mode, over every transport."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import torch

import weightsync as ws
from weightsync.errors import LayoutError
from weightsync.types import DTYPES

WAYS = [
    ("remap", "shm"),
    ("copy", "shm"),
    ("flip", "shm"),
    ("adopt", "shm"),
    ("remap", "zmq"),
    ("copy", "zmq"),
]
ways = pytest.mark.parametrize(("swap", "transport"), WAYS)


@pytest.fixture
def publisher() -> Iterator[ws.Publisher]:
    with ws.Publisher(f"ipc://@{uuid.uuid4().hex}") as made:
        yield made


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern there is: NaNs with payloads, subnormals, infinities."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def zoo() -> dict[str, torch.Tensor]:
    """One of every dtype, and every odd shape."""
    state: dict[str, torch.Tensor] = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        state[f"{name}.matrix"] = random_bits((5, 7), dtype)
        state[f"{name}.scalar"] = random_bits((), dtype)
        state[f"{name}.empty"] = torch.empty((0, 3), dtype=dtype)
    state["transposed"] = random_bits((9, 4), torch.float32).t()
    state["sliced"] = random_bits((8, 10), torch.bfloat16)[::2, 1:7:3]
    state["column"] = random_bits((6, 6), torch.float64)[:, 2]
    state["channels_last"] = random_bits((2, 3, 4, 5), torch.float16).contiguous(
        memory_format=torch.channels_last
    )
    state["eight_dims"] = random_bits((1, 2, 1, 3, 2, 1, 2, 2), torch.int16)
    state["one"] = random_bits((1,), torch.int8)
    state["long"] = random_bits((300_001,), torch.bfloat16)  # several chunks, odd size
    return state


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other tensors with the same strides."""
    return {n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for n, t in state.items()}


@ways
def test_every_dtype_and_shape_is_bit_equal(publisher: ws.Publisher, swap: str, transport: str) -> None:
    torch.manual_seed(7)
    sent = zoo()
    mine = blank(sent)
    publisher.register(sent)
    options = {} if swap != "copy" else {"slots": 3}
    with ws.Subscriber(publisher.address, mine, swap=swap, transport=transport, **options).start(
        20
    ) as subscriber:
        for number in (1, 2, 3):
            fresh = zoo()
            for name, tensor in sent.items():
                tensor.copy_(fresh[name])
            publisher.publish()
            subscriber.wait_for(number, 20)
            with subscriber.step():
                assert not subscriber.check()
                wrong = [name for name in sent if not same(sent[name], mine[name])]
                assert not wrong
    wrong = [name for name in sent if not same(sent[name], mine[name])]
    assert not wrong, "the tensors keep their content after close"


class Tied(torch.nn.Module):
    """Tied embeddings, a shared layer, buffers of both kinds, and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.body = torch.nn.ModuleList([torch.nn.Linear(6, 6), torch.nn.LayerNorm(6)])
        self.again = self.body[0]
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counter", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.body[1].weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.body[1](self.body[0](self.embed(tokens)))))


@ways
def test_a_module_with_ties_and_buffers_computes_the_same(
    publisher: ws.Publisher, swap: str, transport: str
) -> None:
    torch.manual_seed(1)
    trained, served = Tied(), Tied()
    served.scratch.fill_(5)
    tokens = torch.arange(11)
    publisher.register(trained)
    with ws.Subscriber(publisher.address, served, swap=swap, transport=transport).start(20) as subscriber:
        for number in (1, 2):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(torch.randn_like(parameter))
            trained.counter += 1
            trained.mask.logical_not_()
            publisher.publish()
            subscriber.wait_for(number, 20)
            with subscriber.step(), torch.no_grad():
                assert torch.equal(served(tokens), trained(tokens))
                assert served.head.weight.data_ptr() == served.embed.weight.data_ptr()
                assert served.head.weight is served.embed.weight
                assert int(served.counter) == 3 + number
                assert torch.equal(served.mask, trained.mask)
                assert served.scratch.tolist() == [5] * 4
                assert [p.requires_grad for p in served.parameters()] == [
                    p.requires_grad for p in trained.parameters()
                ]
    with torch.no_grad():
        assert torch.equal(served(tokens), trained(tokens))
        served.embed.weight.zero_()  # writable again, and still tied
        assert not served.head.weight.any()


@pytest.mark.parametrize("swap", ["remap", "copy", "adopt"])
def test_addresses_of_weights_do_not_change(publisher: ws.Publisher, swap: str) -> None:
    trained, served = Tied(), Tied()
    publisher.register(trained)
    with ws.Subscriber(publisher.address, served, swap=swap).start(20) as subscriber:
        before = [parameter.data_ptr() for parameter in served.parameters()]
        for number in (1, 2, 3):
            publisher.publish()
            subscriber.wait_for(number, 20)
        assert [parameter.data_ptr() for parameter in served.parameters()] == before


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_cast_on_the_wire_rounds_as_torch_does(publisher: ws.Publisher, transport: str) -> None:
    torch.manual_seed(2)
    with ws.Publisher(f"ipc://@{uuid.uuid4().hex}", wire_dtype=torch.bfloat16) as publisher:
        exact = random_bits((257, 129), torch.float32).nan_to_num(0.0)
        sent = {
            "w": exact,
            "half": torch.randn(33).half(),
            "count": torch.arange(9),
            "same": torch.randn(5).bfloat16(),
        }
        publisher.register(sent)
        mine = {
            name: torch.zeros(t.shape, dtype=t.dtype if name == "count" else torch.bfloat16)
            for name, t in sent.items()
        }
        with ws.Subscriber(publisher.address, mine, transport=transport).start(20) as subscriber:
            publisher.publish()
            subscriber.wait_for(1, 20)
            for name, tensor in sent.items():
                wanted = tensor if name == "count" else tensor.to(torch.bfloat16)
                assert same(mine[name], wanted), name
            with subscriber.step():
                assert not subscriber.check()


def test_a_cast_by_pattern_and_one_that_is_none() -> None:
    with ws.Publisher(f"ipc://@{uuid.uuid4().hex}", wire_dtype={"*.w": torch.float16}) as publisher:
        publisher.register({"a.w": torch.full((3,), 1.5), "a.b": torch.full((3,), 2.5)})
        mine = {"a.w": torch.zeros(3, dtype=torch.float16), "a.b": torch.zeros(3)}
        with ws.Subscriber(publisher.address, mine).start(20) as subscriber:
            publisher.publish()
            subscriber.wait_for(1, 20)
        assert mine["a.w"].tolist() == [1.5] * 3
        assert mine["a.b"].tolist() == [2.5] * 3
    with (
        ws.Publisher(f"ipc://@{uuid.uuid4().hex}", wire_dtype={"*": torch.int8}) as publisher,
        pytest.raises(LayoutError, match="w: can't send float32 as int8"),
    ):
        publisher.register({"w": torch.ones(3)})


@ways
def test_what_is_scribbled_right_after_publish_is_not_sent(
    publisher: ws.Publisher, swap: str, transport: str
) -> None:
    state = {f"w{n}": torch.zeros(64, 1024) for n in range(8)}
    mine = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    publisher.register(state)
    with ws.Subscriber(publisher.address, mine, swap=swap, transport=transport).start(20) as subscriber:
        for number in range(1, 6):
            for tensor in state.values():
                tensor.fill_(number)
            publisher.publish()
            for tensor in state.values():
                tensor.fill_(-1)
            subscriber.wait_for(number, 20)
            with subscriber.step():
                assert {float(v) for tensor in mine.values() for v in (tensor.min(), tensor.max())} == {
                    number
                }


def test_a_pull_gets_the_tensors_with_their_ties(publisher: ws.Publisher) -> None:
    trained = Tied()
    publisher.register(trained)
    publisher.publish()
    for transport in ("shm", "zmq"):
        version, state = ws.pull(publisher.address, transport=transport, timeout_s=20)
        assert version == 1
        wanted = trained.state_dict()
        assert state.keys() == wanted.keys()
        assert all(same(state[name], wanted[name]) for name in wanted)
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
