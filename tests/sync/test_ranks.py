"""Publishers of several ranks: any sharding reaches any other exactly, and a rank that fails costs at most one version."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weightsync as ws
from tests import roles, sharded
from tests.processes import Peer, eventually
from tests.sharded import MODEL, Ranks, assert_content, outcomes, shards_of, together
from weightsync import Box, Shard
from weightsync.errors import (
    AddressInUseError,
    FencedError,
    LayoutError,
    SyncTimeoutError,
    UsageError,
    VersionError,
    WeightSyncError,
)
from weightsync.integrations.flat import FlatTensor, flat_shards
from weightsync.wire import messages as m
from weightsync.wire.fleet import Fleet
from weightsync.wire.keys import new_keys

Peers = Callable[[], Peer]

# ---- the same, many ways


def open_ranks(peer: Peers, address: str, ranks: int, cut: str, **options: object) -> list[Peer]:
    """A process for each rank, all registered."""
    trainer = [peer() for _ in range(ranks)]
    for rank, process in enumerate(trainer):
        process.call(sharded.open_rank, address, rank, ranks, cut, **options)
    register(trainer)
    return trainer


def register(trainer: list[Peer]) -> None:
    for process in trainer:
        process.tell(sharded.register_rank)
    for process in trainer:
        process.reply()


def publish(trainer: list[Peer], number: int, **options: object) -> int:
    """All ranks publish this content at the same time; the version, which is the same for all."""
    for process in trainer:
        process.tell(sharded.publish_rank, number, **options)
    (version,) = {process.reply() for process in trainer}
    return int(version)


SERVERS = [
    ("whole", 1, {"swap": "remap", "transport": "shm"}),
    ("rows", 2, {"swap": "copy", "transport": "zmq"}),
    ("columns", 4, {"swap": "flip", "transport": "shm"}),
    ("rows", 2, {"swap": "remap", "transport": "zmq", "is_fused": True}),
]
"""Cut, number of ranks, and how they receive."""


@pytest.mark.parametrize(
    ("ranks", "cut"),
    [(1, "whole")]
    + [(2, cut) for cut in ("rows", "columns", "hybrid", "pipeline")]
    + [(4, cut) for cut in ("rows", "columns", "two ways", "hybrid", "pipeline")],
)
def test_every_server_gets_its_own_cut_of_every_version(
    peer: Peers, address: str, ranks: int, cut: str
) -> None:
    trainer = open_ranks(peer, address, ranks, cut)
    servers = [peer() for _ in SERVERS]
    for server, (wanted, of, options) in zip(servers, SERVERS, strict=True):
        server.tell(sharded.open_servers, address, wanted, range(of), of, **options)
    for server, (_, of, options) in zip(servers, SERVERS, strict=True):
        assert server.reply() == [options["transport"]] * of
    for version, number in ((1, 5), (2, 6), (3, 7)):
        assert publish(trainer, number, members=9) == version
        for server in servers:
            server.tell(sharded.await_content, version, number)
        for server in servers:
            server.reply()
        for process in trainer:
            assert set(process.call(sharded.await_ticket, "live").values()) == {None}


@pytest.mark.parametrize("swap", ["remap", "copy", "flip"])
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_servers_never_see_a_mixture_while_ranks_publish_at_their_own_pace(
    peer: Peers, address: str, swap: str, transport: str
) -> None:
    trainer = open_ranks(peer, address, 2, "columns")
    server = peer()
    server.call(sharded.open_servers, address, "rows", [1], 2, swap=swap, transport=transport)
    server.call(sharded.serve)
    for number in range(1, 9):
        for process in trainer:
            process.tell(sharded.publish_rank, number, members=1)
    for process in trainer:
        assert [process.reply() for _ in range(8)] == list(range(1, 9))
        process.call(sharded.await_ticket, "live")
    seen = server.call(roles.stop_serving)
    assert all(version == number for version, number in seen) and seen[-1] == (8, 8)
    assert seen == sorted(seen)


# ---- who comes late


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_who_comes_late_with_another_cut_gets_the_sealed_version_and_all_after_it(
    peer: Peers, address: str, transport: str
) -> None:
    trainer = open_ranks(peer, address, 2, "rows")
    early, late = peer(), peer()
    early.call(sharded.open_servers, address, "rows", range(2), 2, transport=transport)
    publish(trainer, 1, members=2)
    early.call(sharded.await_content, 1, 1)
    early.call(sharded.serve)
    late.call(sharded.open_servers, address, "columns", range(4), 4, transport=transport)
    late.call(sharded.await_content, 1, 1)  # nothing was published meanwhile
    for number in (2, 3, 4):
        assert publish(trainer, number, members=6) == number
        late.call(sharded.await_content, number, number)
    for process in trainer:
        process.call(sharded.await_ticket, "live")
    seen = early.call(roles.stop_serving)
    assert seen == sorted(seen) and seen[-1] == (4, 4) and all(v == n for v, n in seen)


def test_who_wants_what_nobody_holds_is_told_the_gap_and_others_go_on(address: str) -> None:
    held = [[Shard("a", Box((0, 0), (4, 6)), torch.ones(4, 6), (10, 6))],
            [Shard("a", Box((6, 0), (10, 6)), torch.ones(4, 6), (10, 6))]]  # fmt: skip
    fine = [Shard("a", Box((6, 2), (9, 6)), torch.zeros(3, 4), (10, 6))]
    greedy = [Shard("a", Box((3, 0), (7, 6)), torch.zeros(4, 6), (10, 6))]
    with Ranks(address, held).register() as trainer, ws.Subscriber(address, fine, timeout_s=20.0) as sub:
        trainer.publish(1)
        sub.wait_for(1, 20.0)
        with pytest.raises(LayoutError, match=r"a: .*\[4:6, 0:6\]"):
            ws.Subscriber(address, greedy).start(20.0)
        trainer.publish(2)[0].wait("ready", 20.0)
        sub.wait_for(2, 20.0)
        with sub.step():
            assert_content(fine, 2)


# ---- ranks with nothing


@pytest.mark.parametrize("empty", [0, 1])
def test_a_rank_without_tensors_takes_part(address: str, empty: int) -> None:
    held = [[], []]
    held[1 - empty] = shards_of(MODEL, "whole", 0, 1)
    wants = shards_of(MODEL, "columns", 1, 2)
    with Ranks(address, held).register() as trainer, ws.Subscriber(address, wants, timeout_s=20.0) as sub:
        for number in (1, 2):
            for ticket in trainer.publish(number):
                ticket.wait("ready", 20.0)
            sub.wait_for(number, 20.0)
            with sub.step():
                assert_content(wants, number)


# ---- ranks that fail


def test_a_rank_killed_while_it_stages_costs_that_version_only(peer: Peers, address: str) -> None:
    first, second, server = peer(), peer(), peer()
    first.call(sharded.be_impatient)
    second.call(roles.can_pause_staging)
    for rank, process in enumerate((first, second)):
        process.call(sharded.open_rank, address, rank, 2, "rows")
    register([first, second])
    server.call(sharded.open_servers, address, "columns", range(2), 2)
    assert publish([first, second], 1, members=2) == 1
    server.call(sharded.await_content, 1, 1)
    server.call(sharded.serve)

    second.call(roles.arm)
    second.tell(sharded.publish_rank, 2)
    assert first.call(sharded.publish_rank, 2) == 2
    assert second.await_pause() == "staging"
    pid = second.pid
    second.kill()
    with pytest.raises(VersionError, match=rf"version 2 .*rank 1 \(\S+:{pid}\)"):
        first.call(sharded.await_ticket, "staged")
    assert server.call(sharded.look, 1) == [1, 1]

    third = peer()
    third.call(sharded.open_rank, address, 1, 2, "rows")
    third.call(sharded.register_rank)
    assert publish([first, third], 3, members=2) == 3
    first.call(sharded.await_ticket, "live")
    server.call(sharded.await_content, 3, 3)
    seen = server.call(roles.stop_serving)
    assert {number for _, number in seen} <= {1, 3} and seen[-1] == (3, 3)


def test_a_rank_that_does_not_publish_is_named_and_may_catch_up(address: str) -> None:
    held = [shards_of(MODEL, "rows", rank, 3) for rank in range(3)]
    with Ranks(address, held).register() as trainer:
        for shards in held:
            sharded.fill(shards, 1)
        tickets = [pub.publish(timeout_s=5.0) for pub in trainer.pubs[:2]]
        with pytest.raises(SyncTimeoutError, match=r"not staged everywhere.*rank 2"):
            tickets[0].wait("staged", 0.2)
        for pub in trainer.pubs[:2]:
            with pytest.raises(
                SyncTimeoutError, match=r"version 2 waited 0.2 s for version 1, which rank 2 has not"
            ):
                pub.publish(timeout_s=0.2)
        assert trainer.pubs[2].publish().version == 1
        tickets[1].wait("staged", 10.0)
        assert [ticket.version for ticket in trainer.publish(2)] == [2, 2, 2]
        got = ws.pull(address, version=2, timeout_s=20.0)
        assert got[0] == 2
        assert all(torch.equal(got[1][name], sharded.content(name, MODEL[name], 2)) for name in MODEL)


@pytest.mark.parametrize("here", [[0], [0, 2], [1, 2], [2]])
def test_register_names_the_ranks_that_did_not_come(address: str, here: list[int]) -> None:
    pubs = [ws.Publisher(address, rank=rank, ranks=3) for rank in here]
    try:
        found = outcomes(
            *(lambda pub=pub: pub.register(shards_of(MODEL, "rows", 0, 3), timeout_s=1.0) for pub in pubs)
        )
        for error in found:
            assert isinstance(error, SyncTimeoutError)
            if 0 not in here:
                assert "no coordinator answered within 1 s" in str(error)
            assert 0 not in here or all(f"rank {rank}" in str(error) for rank in range(3) if rank not in here)
    finally:
        for pub in pubs[::-1]:
            pub.close()


def test_register_can_be_called_again_when_the_others_are_late(address: str) -> None:
    held = [shards_of(MODEL, "columns", rank, 2) for rank in range(2)]
    with Ranks(address, held) as trainer:
        for rank in (0, 1):
            with pytest.raises(SyncTimeoutError, match=f"missing: rank {1 - rank}"):
                trainer.pubs[rank].register(held[rank], timeout_s=0.5)
        trainer.register().publish(1)[1].wait("staged", 10.0)
        assert ws.pull(address, timeout_s=20.0)[0] == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_seat_is_taken_once(address: str, rank: int) -> None:
    held = [shards_of(MODEL, "rows", rank, 2) for rank in range(2)]
    with Ranks(address, held).register() as trainer:
        with (
            pytest.raises(AddressInUseError, match="alive"),
            ws.Publisher(address, rank=rank, ranks=2) as second,
        ):
            second.register(shards_of(MODEL, "rows", rank, 2), timeout_s=10.0)
        for ticket in trainer.publish(1):
            ticket.wait("staged", 10.0)
        assert ws.fetch_status(address).missing_ranks == []


def test_ranks_that_disagree_are_all_told(address: str) -> None:
    held = [[Shard("a", Box((0,), (2,)), torch.ones(2), (4,))],
            [Shard("a", Box((2,), (5,)), torch.ones(3), (5,))]]  # fmt: skip
    pubs = [ws.Publisher(address, rank=rank, ranks=2) for rank in range(2)]
    try:
        found = outcomes(
            *(
                lambda pub=pub, shards=shards: pub.register(shards, timeout_s=5.0)
                for pub, shards in zip(pubs, held, strict=True)
            )
        )
        assert all(isinstance(error, LayoutError) and "a: " in str(error) for error in found), found
    finally:
        for pub in pubs[::-1]:
            pub.close()


def test_when_rank_0_is_killed_the_others_get_an_error_and_a_new_set_of_ranks_is_followed(
    peer: Peers,
) -> None:
    first, second, server = peer(), peer(), peer()
    address = first.call(sharded.open_rank, "tcp://127.0.0.1:0", 0, 2, "rows")
    second.call(sharded.open_rank, address, 1, 2, "rows")
    register([first, second])
    server.call(sharded.open_servers, address, "columns", range(2), 2)
    publish([first, second], 1, members=2)
    server.call(sharded.await_content, 1, 1)
    first.kill()
    with pytest.raises(WeightSyncError, match=address):
        second.call(sharded.publish_rank, 2, timeout_s=0.5)
    assert server.call(sharded.look, 1) == [1, 1]
    server.call(sharded.serve)

    trainer = [peer(), peer()]
    trainer[0].call(sharded.open_rank, address, 0, 2, "columns")
    with pytest.raises(FencedError, match="another publisher took over"):  # the old rank 1 still runs
        second.call(sharded.await_end)
    trainer[1].call(sharded.open_rank, address, 1, 2, "columns")
    register(trainer)
    assert publish(trainer, 3, members=2) == 1
    for process in trainer:
        process.call(sharded.await_ticket, "live")
    with pytest.raises(FencedError):
        second.call(sharded.publish_rank, 4, timeout_s=0.5)
    assert publish(trainer, 5, members=2) == 2
    server.call(sharded.await_content, 2, 5)
    seen = server.call(roles.stop_serving)
    assert [number for _, number in seen][-1] == 5 and {number for _, number in seen} <= {1, 3, 5}


def test_what_a_ticket_waited_for_stays_true_when_rank_0_has_left(address: str) -> None:
    held = [shards_of(MODEL, "rows", rank, 2) for rank in range(2)]
    with Ranks(address, held).register() as trainer:
        tickets = trainer.publish(1)
        tickets[1].wait("staged", 10.0)
        trainer.pubs[0].close()
        assert tickets[1].report.version == 1  # without an error, and in bounded time


def test_who_asks_for_the_layout_too_early_is_answered_when_the_last_rank_has_come(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, receive = threading.Event(), Fleet.receive

    def watched(self: Fleet, route: bytes, message: m.FromMember, now: float) -> None:
        receive(self, route, message, now)
        if isinstance(message, m.AskLayout):
            asked.set()

    monkeypatch.setattr(Fleet, "receive", watched)
    trainer = Ranks(address, [shards_of(MODEL, "rows", rank, 2) for rank in range(2)])

    def register() -> None:
        assert asked.wait(10.0)
        trainer.register()

    with trainer:
        layout, _ = together(lambda: ws.fetch_layout(address, timeout_s=4.0), register)
        assert {spec.name for spec in layout.tensors} == set(MODEL)


# ---- options that all ranks share


def test_keys_guard_every_rank(tmp_path: Path) -> None:
    keys, other = tmp_path / "keys", tmp_path / "other"
    new_keys(keys)
    new_keys(other)
    (other / "publisher.key").write_text((keys / "publisher.key").read_text())
    held = [shards_of(MODEL, "rows", rank, 2) for rank in range(2)]
    wants = shards_of(MODEL, "columns", 0, 2)
    with Ranks("tcp://127.0.0.1:0", held, keys=keys).register() as trainer:
        for transport in ("zmq", "shm"):
            with ws.Subscriber(trainer.address, wants, keys=keys, transport=transport, timeout_s=20.0) as sub:
                (version, *_) = {ticket.version for ticket in trainer.publish(7)}
                sub.wait_for(version, 20.0)
                with sub.step():
                    assert_content(wants, 7)
        for folder in (None, other):
            with pytest.raises(SyncTimeoutError, match="key"):
                ws.Subscriber(trainer.address, shards_of(MODEL, "rows", 0, 2), keys=folder).start(1.0)
            with (
                ws.Publisher(trainer.address, rank=1, ranks=2, keys=folder) as stranger,
                pytest.raises(WeightSyncError),
            ):
                stranger.register(shards_of(MODEL, "rows", 1, 2), timeout_s=1.0)
        trainer.publish(8)[1].wait("staged", 10.0)


def test_ranks_skip_the_same_versions(peer: Peers, address: str) -> None:
    server = peer()
    server.call(roles.can_pause_reading, "shm")
    held = [shards_of(MODEL, "rows", rank, 2) for rank in range(2)]
    with Ranks(address, held, when_full="skip").register() as trainer:
        server.call(sharded.open_servers, address, "columns", [0], 2, transport="shm")
        server.call(roles.arm)
        trainer.pubs[0].wait_for_members(1, 20.0)
        assert [ticket.skipped for ticket in trainer.publish(1)] == [False, False]
        server.await_pause()  # holds slot one
        assert [ticket.skipped for ticket in trainer.publish(2)] == [False, False]
        for version in (3, 4):
            tickets = trainer.publish(version)
            assert [(t.skipped, t.version) for t in tickets] == [(True, version)] * 2
        server.resume()
        server.call(sharded.await_content, 2, 2)
        tickets = trainer.publish(5)
        assert [(t.skipped, t.version) for t in tickets] == [(False, 5)] * 2
        server.call(sharded.await_content, 5, 5)


def test_versions_may_be_given_as_long_as_all_ranks_give_the_same(address: str) -> None:
    held = [shards_of(MODEL, "rows", rank, 2) for rank in range(2)]
    with Ranks(address, held).register() as trainer:
        assert [ticket.version for ticket in trainer.publish(1, version=10)] == [10, 10]
        assert [ticket.version for ticket in trainer.publish(2)] == [11, 11]
        for pub in trainer.pubs:
            with pytest.raises(UsageError, match="version 11 is not newer than 11"):
                pub.publish(version=11)
        one, two = outcomes(
            lambda: trainer.pubs[0].publish(version=20, timeout_s=1.0),
            lambda: trainer.pubs[1].publish(version=21, timeout_s=1.0),
        )
        assert sorted(isinstance(found, SyncTimeoutError) for found in (one, two)) == [False, True]
        lost = one if isinstance(one, SyncTimeoutError) else two
        assert "rank" in str(lost) and "has not staged" in str(lost)


def test_slots_of_two_ranks_can_not_be_adopted(address: str) -> None:
    held = [shards_of(MODEL, "rows", rank, 2) for rank in range(2)]
    with Ranks(address, held).register() as trainer:
        with pytest.raises(LayoutError, match=r"swap='adopt' needs one publisher rank.*2 ranks hold"):
            ws.Subscriber(address, shards_of(MODEL, "whole", 0, 1), swap="adopt").start(20.0)
        trainer.publish(1)[0].wait("staged", 10.0)


# ---- wrong bytes


def test_a_flipped_bit_in_one_ranks_slot_is_refused_by_name(peer: Peers, address: str) -> None:
    first, second, server = peer(), peer(), peer()
    second.call(roles.can_flip_before_sealing)
    for rank, process in enumerate((first, second)):
        process.call(sharded.open_rank, address, rank, 2, "rows")
    register([first, second])
    server.call(sharded.open_servers, address, "columns", range(2), 2)
    publish([first, second], 1, members=2)
    server.call(sharded.await_content, 1, 1)
    second.call(roles.flip_next, "o", 3)
    publish([first, second], 2)
    with pytest.raises(VersionError, match=r"version 2 was refused.*do not match their digests: o"):
        first.call(sharded.await_ticket, "ready")
    # each element of o is in one of the two halves: that one refused it, the other may have gone on
    eventually(lambda: "o" in server.call(sharded.refusals), "a server refuses it")
    assert publish([first, second], 3) == 3
    server.call(sharded.await_content, 3, 3)
    first.call(sharded.await_ticket, "live")


def expert_by_expert(shards: list[Shard]) -> list[Shard]:
    """Each expert a shard of its own."""
    found = []
    for s in shards:
        pieces = s.view.split(1) if s.name == "experts" else [s.view]
        for number, view in enumerate(pieces):
            first = s.box.start[0] + number if s.box.start else 0
            box = Box((first, *s.box.start[1:]), (first + 1, *s.box.stop[1:])) if len(pieces) > 1 else s.box
            found.append(Shard(s.name, box, view, s.shape))
    return found


@pytest.mark.parametrize(
    ("how", "name"), [("places", "experts"), ("ranks", "experts"), ("ranks", "q"), ("shift", "o")]
)
def test_slices_that_were_exchanged_on_the_way_are_refused_by_name(
    peer: Peers, address: str, how: str, name: str
) -> None:
    server = peer()
    held = [expert_by_expert(shards_of(MODEL, "rows", rank, 2)) for rank in range(2)]
    with Ranks(address, held).register() as trainer:
        server.call(sharded.open_servers, address, "whole", [0], 1)
        trainer.publish(1)
        server.call(sharded.await_content, 1, 1)
        server.call(sharded.misread, how, name)
        tickets = trainer.publish(2)
        error = server.call(sharded.await_refusal)
        assert name in error.partition("do not match their digests: ")[2].split(", ")
        with pytest.raises(VersionError, match=name):
            tickets[1].wait("ready", 20.0)
        assert server.call(sharded.look, 1) == [1]


# ---- any mesh to any cut


def runs(size: int, places: list[tuple[int, int]]) -> tuple[int, int]:
    """What is left of an axis that was cut into `count` chunks at each `(index, count)`."""
    at = np.arange(size)
    for index, count in places:
        step = -(-len(at) // count) if len(at) else 0
        at = at[index * step : (index + 1) * step]
    return (int(at[0]), int(at[-1]) + 1) if len(at) else (0, 0)


@st.composite
def trainers(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], list[list[Shard]]]:
    """Shapes, and the shards of every rank of a mesh: each tensor is placed in its own way, or lies in a flat buffer."""
    mesh = draw(
        st.lists(st.integers(1, 3), min_size=1, max_size=2).filter(lambda sizes: math.prod(sizes) <= 4)
    )
    shapes = {
        f"t{n}": tuple(shape)
        for n, shape in enumerate(
            draw(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=4))
        )
    }
    ranks: list[list[Shard]] = [[] for _ in range(math.prod(mesh))]
    for name, shape in shapes.items():
        dtype = sharded.dtype_of(name)
        if draw(st.booleans()):
            share = -(-math.prod(shape) // len(ranks))
            for rank, shards in enumerate(ranks):
                shards += flat_shards(
                    torch.zeros(share, dtype=dtype), rank * share, [FlatTensor(name, shape)]
                )
            continue
        axes = [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]
        for rank, shards in enumerate(ranks):
            coordinate = np.unravel_index(rank, mesh)
            places = [
                [(int(coordinate[d]), mesh[d]) for d, axis in enumerate(axes) if axis == a]
                for a in range(len(shape))
            ]
            bounds = [runs(size, at) for size, at in zip(shape, places, strict=True)]
            box = Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
            if box.size or not shape:
                shards.append(Shard(name, box, torch.zeros(box.shape, dtype=dtype), shape))
    return shapes, ranks


@st.composite
def wishes(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]]) -> list[Shard]:
    """Up to two boxes of each tensor, some in memory of another order."""
    wants = []
    for name, shape in shapes.items():
        for _ in range(draw(st.integers(1, 2))):
            start = tuple(draw(st.integers(0, size - 1)) for size in shape)
            stop = tuple(draw(st.integers(a + 1, size)) for a, size in zip(start, shape, strict=True))
            box = Box(start, stop)
            view = torch.zeros(box.shape[::-1], dtype=sharded.dtype_of(name))
            view = (
                view.permute(list(range(len(shape)))[::-1])
                if draw(st.booleans())
                else view.reshape(box.shape)
            )
            wants.append(Shard(name, box, sharded.alone(view), shape))
    return wants


@given(st.data())
@settings(max_examples=40)
def test_any_mesh_reaches_any_cut(data: st.DataObject) -> None:
    shapes, held = data.draw(trainers())
    servers = data.draw(st.lists(wishes(shapes), min_size=1, max_size=2))
    late = data.draw(wishes(shapes))
    transport = data.draw(st.sampled_from(["shm", "zmq"]))
    swap = data.draw(st.sampled_from(["remap", "copy", "flip"]))
    address = f"ipc://@weightsync-test-{uuid.uuid4().hex}"
    reference = {name: sharded.content(name, shape, 2) for name, shape in shapes.items()}

    def follow(wants: list[Shard]) -> ws.Subscriber:
        return ws.Subscriber(address, wants, swap=swap, transport=transport, timeout_s=20.0).start()

    with Ranks(address, held).register() as trainer:
        subs = [follow(wants) for wants in servers]
        try:
            for number in (1, 2):
                tickets = trainer.publish(number)
                for sub in subs:
                    sub.wait_for(number, 20.0)
                tickets[-1].wait("live", 20.0)
            subs.append(follow(late))
            for sub, wants in zip(subs, [*servers, late], strict=True):
                sub.wait_for(2, 20.0)
                with sub.step():
                    assert not sub.check()
                    for shard in wants:
                        place = tuple(map(slice, shard.box.start, shard.box.stop))
                        expected = reference[shard.name].to(torch.float64).numpy()[place]
                        assert np.array_equal(shard.view.to(torch.float64).numpy(), expected), shard
        finally:
            for sub in subs:
                sub.close()
