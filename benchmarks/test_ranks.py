"""Several ranks on both sides: from publish() to live, by trainer ranks, server ranks and tensors; and what a commit costs."""

from __future__ import annotations

import time

import numpy as np
import pytest

import weightsync as ws
from benchmarks.peer import Peer, TrainerRank, checksum
from benchmarks.shapes import Cut, change, llama_like, make_state, many_small, size_of
from benchmarks.yardstick import PlainCopyOf, record

ROUNDS, SEED, STEP_S = 7, 3, 0.0002
SHAPES = {"75 tensors": llama_like(8), "2000 tensors": many_small(2000, 64 << 10)}


@pytest.mark.benchmark(group="sync by ranks")
@pytest.mark.parametrize("tensors", SHAPES)
@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (4, 4)])
def test_sync_by_ranks(benchmark, trainers, servers, tensors):
    """Trainer ranks hold rows, server ranks want columns, so each server rank reads from every trainer rank."""
    shapes = SHAPES[tensors]
    whole = make_state(shapes, seed=SEED)
    copy = PlainCopyOf(whole)
    mine = Cut(0, trainers, 0).shards(whole)
    times, copies, version = [], [], 0
    with ws.Publisher("tcp://127.0.0.1:0", ranks=trainers, timeout_s=60) as publisher:
        others = [
            TrainerRank(publisher.address, SEED, shapes, Cut(rank, trainers, 0))
            for rank in range(1, trainers)
        ]
        publisher.register(mine)
        for other in others:
            other.await_word("joined")
        peers = [Peer(publisher.address, shapes, Cut(rank, servers, 1)) for rank in range(servers)]

        def prepare():
            nonlocal version
            version += 1
            for peer in peers:
                peer.follow(version)
            time.sleep(0.02)
            copies.append(min(copy.seconds() for _ in range(2)))
            return (), {}

        def sync():
            started = time.perf_counter()
            for other in others:
                other.publish()
            publisher.publish().wait("live", 60)
            times.append(time.perf_counter() - started)
            for other in others:
                other.await_word("published")
            for peer in peers:
                assert peer.arrived() == version
                if version in (1, ROUNDS):
                    peer.assert_holds(whole)
            change(whole)
            change({shard.name: shard.view for shard in mine})

        benchmark.pedantic(sync, setup=prepare, rounds=ROUNDS, iterations=1)
        moved = sum(peer.received() for peer in peers)
        for peer in peers:
            peer.__exit__(None, None, None)
        for other in others:
            other.close()
    record(
        benchmark, size_of(whole), times[1:], copies[1:], tensors=len(shapes), trainers=trainers, servers=servers,
        moved_over_needed=moved / (size_of(whole) * version),
    )  # fmt: skip


@pytest.mark.benchmark(group="replica commit")
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_commit_latency(benchmark, ranks):
    """A tiny model, so that what is left is the control plane: to `ready` on all ranks, and from there to all switched by an
    engine that looks for a decision every `STEP_S`."""
    state = make_state({"t": (64,)}, seed=SEED)
    ready, switched = [], []
    with ws.Publisher("tcp://127.0.0.1:0", timeout_s=60) as publisher:
        publisher.register(state)
        copies = [make_state({"t": (64,)}) for _ in range(ranks)]
        policy = {"replica": "r", "ranks": ranks}
        members = [
            ws.Subscriber(
                publisher.address, copy, name=f"r{rank}", rank=rank, **(policy if ranks > 1 else {})
            ).start()
            for rank, copy in enumerate(copies)
        ]
        publisher.wait_for_members(ranks)

        decided = 0

        def sync():
            nonlocal decided
            change(state)
            started = time.perf_counter()
            ticket = publisher.publish(wait="ready")
            ready.append(time.perf_counter() - started)
            if ranks == 1:
                members[0].wait_for(ticket.version)
            else:
                while len({member.version for member in members} | {ticket.version}) > 1:
                    number = min(member.proposal for member in members)
                    if number == decided:
                        time.sleep(STEP_S)
                        continue
                    decided = number
                    for member in members:
                        member.switch(number)
            switched.append(time.perf_counter() - started - ready[-1])
            assert {checksum(copy) for copy in copies} == {checksum(state)}

        benchmark.pedantic(sync, rounds=50, iterations=1)
        for member in members:
            member.close()
    benchmark.extra_info.update(
        ranks=ranks, ready_ms=float(np.median(ready[5:])) * 1e3, commit_ms=float(np.median(switched[5:])) * 1e3,
        commit_p99_ms=float(np.quantile(switched[5:], 0.99)) * 1e3, wrong=0,
    )  # fmt: skip
