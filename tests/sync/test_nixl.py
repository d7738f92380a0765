"""The nixl transport end to end: cuts of other fleets, its place in `auto`, and a publisher without the package."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

import weightsync as ws
from tests import roles
from tests.processes import Peer
from tests.transports import offering
from weightsync import Box, Shard
from weightsync.errors import ConfigError, TransportError
from weightsync.wire import registry
from weightsync.wire.transports import nixl

pytestmark = pytest.mark.skipif(
    "nixl" not in registry.transport_names(), reason="the package nixl is not installed"
)


def test_versions_arrive_over_nixl(peer: Callable[[], Peer]) -> None:
    publisher, server = peer(), peer()
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0", **offering("nixl"))
    server.call(roles.open_subscriber, address, transport="nixl")
    server.call(roles.serve)
    publisher.call(roles.publish_many, range(10, 20), wait="live")
    assert server.call(roles.stop_serving)[-1] == (10, 19)


def halves(whole: torch.Tensor, axis: int) -> list[Shard]:
    """Two wanted boxes, one after the other along an axis."""
    found = []
    for rank, part in enumerate(whole.chunk(2, axis)):
        start = tuple(rank * part.shape[axis] if d == axis else 0 for d in range(whole.dim()))
        stop = tuple(a + n for a, n in zip(start, part.shape, strict=True))
        found.append(Shard("w", Box(start, stop), torch.zeros_like(part), tuple(whole.shape)))
    return found


def test_a_late_joiner_with_other_cuts_reads_what_was_registered_later() -> None:
    state = {"w": torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)}
    early, late = {"w": torch.zeros(1024, 1024)}, halves(state["w"], 1)
    with (
        ws.Publisher("tcp://127.0.0.1:0", transports=("nixl",)) as publisher,
        ws.Subscriber(publisher_address(publisher, state), early, transport="nixl", timeout_s=10) as first,
    ):
        publisher.publish(wait="ready")
        with ws.Subscriber(publisher.address, late, transport="nixl", timeout_s=10) as second:
            assert second.wait_for(1, 10) == 1
            assert torch.equal(torch.cat([shard.view for shard in late], 1), state["w"])
            state["w"].neg_()
            publisher.publish(wait="ready")
            assert first.wait_for(2, 10) == second.wait_for(2, 10) == 2
            assert torch.equal(torch.cat([shard.view for shard in late], 1), state["w"])
            assert torch.equal(early["w"], state["w"])


def publisher_address(publisher: ws.Publisher, state: dict[str, torch.Tensor]) -> str:
    publisher.register(state)
    return publisher.address


def test_auto_says_why_it_passes_nixl_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "has_rdma", lambda: False)
    state = {"w": torch.ones(8)}
    with (
        caplog.at_level(logging.INFO, "weightsync"),
        ws.Publisher("tcp://127.0.0.1:0", transports=("nixl", "zmq")) as publisher,
        ws.Subscriber(publisher_address(publisher, state), {"w": torch.zeros(8)}, timeout_s=10),
    ):
        assert "transport zmq" in caplog.text and "no RDMA device on both sides" in caplog.text


def test_auto_takes_nixl_where_there_is_a_device_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "has_rdma", lambda: True)
    state = {"w": torch.ones(8)}
    with (
        ws.Publisher("tcp://127.0.0.1:0") as publisher,
        ws.Subscriber(
            publisher_address(publisher, state), {"w": torch.zeros(8)}, transport="nixl", timeout_s=10
        ),
    ):
        pass
    assert registry.default_transports() == ("shm", "nixl", "zmq")


@pytest.mark.parametrize("change", [
    {"agent": "no base64!"}, {"agent": ""}, {"token": "zz"}, {"places": "1:2"}, {"places": "x"}, {"agent": "AAAA"},
])  # fmt: skip
def test_an_offer_that_makes_no_sense_is_a_clear_error(change: dict[str, str]) -> None:
    reader = registry.make_reader("nixl", environment_of_a_reader())
    offer = {
        "agent": "AAAA",
        "token": "00" * 16,
        "places": "1000:1000,2000:1000,3000:1000",
        "rdma": "0",
    } | change
    with pytest.raises(TransportError):
        reader.connect(offer, 2.0)
    reader.close()


def environment_of_a_reader() -> registry.Environment:
    return registry.Environment(None, None, "127.0.0.1", "reader", 1, lambda name: None)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"installed are shm, zmq"):
        ws.Publisher("tcp://127.0.0.1:0", transports=("nixl",))
