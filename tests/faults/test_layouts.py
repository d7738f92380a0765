"""Disagreement about names, shapes and dtypes is one error that lists everything, and costs nothing that serves."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
import torch

import weightsync as ws
from tests import roles
from tests.processes import Peer, eventually
from weightsync.errors import LayoutError, UsageError

State = dict[str, torch.Tensor]


@pytest.fixture
def publisher() -> Iterator[ws.Publisher]:
    with ws.Publisher(f"ipc://@{uuid.uuid4().hex}") as made:
        yield made


def subscribe(publisher: ws.Publisher, source: object, **options: object) -> ws.Subscriber:
    return ws.Subscriber(publisher.address, source, **options).start(10.0)


def test_every_disagreement_is_in_one_error(publisher: ws.Publisher) -> None:
    publisher.register(
        {
            "same": torch.ones(2),
            "shape": torch.ones(2, 3),
            "dtype": torch.ones(2),
            "only_there": torch.ones(1),
        }
    )
    mine: State = {
        "same": torch.zeros(2), "shape": torch.zeros(3, 2), "dtype": torch.zeros(2, dtype=torch.bfloat16),
        "only_here": torch.zeros(1),
    }  # fmt: skip
    with pytest.raises(LayoutError) as caught:
        subscribe(publisher, mine)
    text = str(caught.value)
    assert "4 tensors" in text
    for fact in ("[2, 3]", "[3, 2]", "float32", "bfloat16", "only_there", "only_here"):
        assert fact in text
    assert "same:" not in text
    assert all(not tensor.any() for tensor in mine.values())


def test_patterns_allow_what_may_differ(publisher: ws.Publisher) -> None:
    publisher.register({"a": torch.ones(2), "head.w": torch.ones(3), "head.b": torch.ones(3)})
    mine: State = {"a": torch.zeros(2), "lora.x": torch.full((2,), 5.0)}
    with pytest.raises(LayoutError):
        subscribe(publisher, mine, ignore=["head.*"])
    with pytest.raises(LayoutError):
        subscribe(publisher, mine, allow_missing=["lora.*"])
    with subscribe(publisher, mine, ignore=["head.*"], allow_missing=["lora.*"]) as subscriber:
        publisher.publish()
        subscriber.wait_for(1, 10.0)
        assert mine["a"].tolist() == [1, 1]
        assert mine["lora.x"].tolist() == [5, 5]


def test_tied_here_but_sent_apart_is_an_error_and_the_reverse_is_not(publisher: ws.Publisher) -> None:
    publisher.register({"in": torch.ones(4), "out": torch.full((4,), 2.0)})
    tied = torch.zeros(4)
    with pytest.raises(LayoutError, match="tied here"):
        subscribe(publisher, {"in": tied, "out": tied})
    with ws.Publisher(f"ipc://@{uuid.uuid4().hex}") as other:
        shared = torch.full((4,), 3.0)
        other.register({"in": shared, "out": shared})
        mine = {"in": torch.zeros(4), "out": torch.zeros(4)}
        try:
            subscriber = subscribe(other, mine)
        except LayoutError as error:
            assert "out" in str(error)  # refused by name, or filled twice; never half
        else:
            with subscriber:
                other.publish()
                subscriber.wait_for(1, 10.0)
                assert mine["in"].tolist() == mine["out"].tolist() == [3.0] * 4


UNFIT: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.ones(2, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "nine dimensions": lambda: torch.ones([1] * 9),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_can_not_be_moved_is_named_on_both_sides(publisher: ws.Publisher, kind: str) -> None:
    state = {"good": torch.ones(2), "bad": UNFIT[kind](), "worse": UNFIT[kind]()}
    for side in (publisher.register, lambda source: ws.Subscriber(publisher.address, source)):
        with pytest.raises(LayoutError, match=r"(?s)2 tensors.*bad:.*worse:"):
            side(state)
    publisher.register({"good": torch.ones(2)})  # the failed attempt is forgotten
    publisher.publish()


@pytest.mark.filterwarnings("ignore")
def test_a_dtensor_is_refused_with_the_way_out(publisher: ws.Publisher) -> None:
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(LayoutError, match=r"w: is a DTensor; .*local shards"):
            publisher.register({"w": tensor})
    finally:
        distributed.destroy_process_group()


def test_a_state_dict_of_a_module_is_refused_where_its_storage_would_move(publisher: ws.Publisher) -> None:
    publisher.register(roles.model())
    for swap in ("remap", "flip", "adopt"):
        served = roles.model()
        with pytest.raises(LayoutError, match=r"Pass the module itself.*swap=\"copy\""):
            subscribe(publisher, served.state_dict(), swap=swap)
    served = roles.model()
    with subscribe(publisher, served.state_dict(), swap="copy") as subscriber:
        publisher.publish()
        subscriber.wait_for(1, 10.0)
        assert not subscriber_differs(subscriber)


def subscriber_differs(subscriber: ws.Subscriber) -> list[str]:
    with subscriber.step():
        return subscriber.check()


def test_views_of_fused_parameters_are_written_in_place_with_copy(publisher: ws.Publisher) -> None:
    parts = {"q": torch.full((2, 4), 1.0), "k": torch.full((2, 4), 2.0), "v": torch.full((2, 4), 3.0)}
    publisher.register(parts)
    fused = torch.zeros(6, 4)
    views = {"q": fused[:2], "k": fused[2:4], "v": fused[4:]}
    with pytest.raises(LayoutError, match="share their storage"):
        subscribe(publisher, views)
    with subscribe(publisher, views, swap="copy") as subscriber:
        publisher.publish()
        subscriber.wait_for(1, 10.0)
        assert fused[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
        assert not subscriber_differs(subscriber)


def test_overlapping_destinations_are_refused(publisher: ws.Publisher) -> None:
    publisher.register({"a": torch.ones(4), "b": torch.ones(4)})
    base = torch.zeros(6)
    with pytest.raises(LayoutError, match="overlaps: b"):
        subscribe(publisher, {"a": base[:4], "b": base[2:]}, swap="copy")


def test_views_of_one_buffer_with_different_dtypes_are_received(publisher: ws.Publisher) -> None:
    publisher.register({"f": torch.full((6,), 1.5), "i": torch.full((4,), 7, dtype=torch.int64)})
    flat = torch.zeros(56, dtype=torch.uint8)
    for first in ("f", "i"):
        views = {"f": flat[:24].view(torch.float32), "i": flat[24:].view(torch.int64)}
        ordered = {first: views.pop(first), **views}
        with subscribe(publisher, ordered, swap="copy") as subscriber:
            publisher.publish()
            subscriber.wait_for(publisher.version, 10.0)
            assert ordered["f"].tolist() == [1.5] * 6
            assert ordered["i"].tolist() == [7] * 4


def test_a_parameter_that_was_replaced_after_registration_is_what_is_sent(publisher: ws.Publisher) -> None:
    trained, served = roles.model(), roles.model()
    publisher.register(trained)
    with subscribe(publisher, served) as subscriber:
        trained[2].weight = torch.nn.Parameter(torch.full((64, 64), 4.0))
        trained[3].weight.data = torch.full((64, 64), 5.0).t()  # other strides
        publisher.publish()
        subscriber.wait_for(1, 10.0)
        assert set(served[2].weight.flatten().tolist()) == {4.0}
        assert set(served[3].weight.flatten().tolist()) == {5.0}


def good() -> torch.Tensor:
    return torch.ones(64, 64)


def another_shape() -> torch.Tensor:
    return torch.ones(64, 32)


def an_integer() -> torch.Tensor:
    return torch.ones(64, 64, dtype=torch.int32)


def meta() -> torch.Tensor:
    return torch.ones(64, 64, device="meta")


def sparse() -> torch.Tensor:
    return torch.ones(64, 64).to_sparse()


def nothing() -> None:
    return None


CHANGES = [another_shape, an_integer, meta, sparse, nothing]


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_is_unfit_at_publish_is_named_and_the_next_publish_works(
    peer: Callable[[], Peer], change: Callable[[], torch.Tensor | None]
) -> None:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    server.call(roles.open_subscriber, address)
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    publisher.call(roles.replace, "2", "weight", change)
    with pytest.raises(LayoutError, match=r"2\.weight"):
        publisher.call(roles.publish_as_is)
    assert server.call(roles.look) == (1, 10)
    publisher.call(roles.replace, "2", "weight", good)
    assert publisher.call(roles.publish, 30) == 2
    assert server.call(roles.await_version, 2) == (2, 30)


def test_freed_storage_is_named_and_not_read(peer: Callable[[], Peer]) -> None:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    server.call(roles.open_subscriber, address)
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    publisher.call(roles.free_storage, "2", "weight")
    with pytest.raises(LayoutError, match=r"2\.weight"):
        publisher.call(roles.publish_as_is)
    publisher.call(roles.replace, "2", "weight", good)
    publisher.call(roles.publish, 30)
    assert server.call(roles.await_version, 2) == (2, 30)


def test_a_failed_publish_ends_what_waits_for_it(publisher: ws.Publisher) -> None:
    state = {"w": torch.ones(4)}
    publisher.register(state)
    mine = {"w": torch.zeros(4)}
    with subscribe(publisher, mine) as subscriber:
        state["w"] = torch.ones(5)
        with pytest.raises(LayoutError, match=r"w: registered as \[4\], now \[5\]"):
            publisher.publish()
        state["w"] = torch.full((4,), 2.0)
        ticket = publisher.publish()
        subscriber.wait_for(ticket.version, 10.0)
        assert mine["w"].tolist() == [2] * 4


def test_a_new_publisher_with_another_layout_is_refused_and_the_right_one_followed(
    peer: Callable[[], Peer],
) -> None:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    server.call(roles.open_subscriber, address)
    publisher.call(roles.publish, 10, members=1)
    assert server.call(roles.await_version, 1) == (1, 10)
    publisher.kill()
    stranger = peer()
    stranger.call(roles.open_publisher, address, size={"width": 32})
    stranger.call(roles.publish, 66, wait="staged")
    with pytest.raises(LayoutError, match=r"\[32, 32\]"):
        server.call(roles.await_error)
    assert server.call(roles.look) == (1, 10)
    stranger.kill()
    right = peer()
    right.call(roles.open_publisher, address)
    right.call(roles.publish, 30, wait="staged", members=1)
    assert server.call(roles.await_content, 30) == (1, 30)


@pytest.mark.parametrize("swap", ["remap", "copy", "flip"])
def test_a_new_publisher_may_send_in_another_order_and_more(swap: str) -> None:
    address = f"ipc://@{uuid.uuid4().hex}"
    mine = {"a": torch.zeros(4), "b": torch.zeros(2, 2), "late": torch.zeros(3)}
    with ws.Publisher(address) as first:
        first.register({"a": torch.full((4,), 1.0), "b": torch.full((2, 2), 2.0)})
        subscriber = subscribe(first, mine, swap=swap, allow_missing=["late"])
        first.publish()
        subscriber.wait_for(1, 10.0)
    with subscriber, ws.Publisher(address) as second:
        second.register(
            {"late": torch.full((3,), 9.0), "b": torch.full((2, 2), 8.0), "a": torch.full((4,), 7.0)}
        )
        second.wait_for_members(1, 10.0)
        eventually(
            lambda: subscriber._plan is not None and len(subscriber._plan.names) == 3, "the new plan is made"
        )
        assert not subscriber_differs(subscriber), "the old version is still checked by its own manifest"
        second.publish(2)
        subscriber.wait_for(2, 10.0)
        assert [set(tensor.flatten().tolist()) for tensor in mine.values()] == [{7.0}, {8.0}, {9.0}]
        assert not subscriber_differs(subscriber)


def test_registering_twice_or_nothing_is_an_error(publisher: ws.Publisher) -> None:
    for nothing in ({}, [], torch.nn.Identity()):
        with pytest.raises(LayoutError, match="nothing to publish"):
            publisher.register(nothing)
    with pytest.raises(UsageError, match="register"):
        publisher.publish()
    publisher.register({"w": torch.ones(1)})
    with pytest.raises(UsageError, match="before"):
        publisher.register({"w": torch.ones(1)})


def test_versions_only_grow(publisher: ws.Publisher) -> None:
    publisher.register({"w": torch.ones(1)})
    publisher.publish(5)
    with pytest.raises(UsageError, match="not newer"):
        publisher.publish(5)
    assert publisher.publish().version == 6
