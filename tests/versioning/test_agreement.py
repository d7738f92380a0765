"""Step-boundary agreement between real processes over gloo."""

from __future__ import annotations

import multiprocessing
import os
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from weightsync.errors import SyncTimeoutError
from weightsync.versioning.agreement import Agreement

JOIN_S = 60.0


def rank_main(rank: int, store: str, orders: Connection, timeout_s: float) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    group = dist.group.WORLD
    assert group is not None
    agreement = Agreement(group, timeout_s)
    while (proposal := orders.recv()) is not None:
        try:
            orders.send(agreement.boundary(proposal))
        except SyncTimeoutError as error:
            orders.send(str(error))
    os._exit(0)  # the round that is still under way has no peer to wait for


class Pair:
    """Two ranks; each does one boundary for every number sent to it."""

    def __init__(self, store: Path, timeout_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        self.processes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main, args=(rank, str(store), theirs, timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def answer(self, rank: int) -> int | str:
        assert self.pipes[rank].poll(JOIN_S), f"rank {rank} does not answer"
        answer: int | str = self.pipes[rank].recv()
        return answer

    def boundary(self, *proposals: int) -> tuple[int | str, int | str]:
        for pipe, proposal in zip(self.pipes, proposals, strict=True):
            pipe.send(proposal)
        return self.answer(0), self.answer(1)

    def end(self, *ranks: int) -> None:
        for rank in ranks:
            self.pipes[rank].send(None)
        for rank in ranks:
            self.processes[rank].join(JOIN_S)
            assert self.processes[rank].exitcode == 0


def test_all_ranks_get_the_newest_proposal_of_the_boundary_before(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "store", 20.0)
    assert pair.boundary(0, 0) == (0, 0)
    assert pair.boundary(0, 0) == (0, 0)
    assert pair.boundary(7, 0) == (0, 0), "what is proposed now is for the next boundary"
    assert pair.boundary(7, 9) == (7, 7), "one rank's knowledge is enough"
    assert pair.boundary(9, 9) == (9, 9)
    pair.end(0, 1)


def test_the_first_boundary_waits_until_all_are_at_one_ballot(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "store", 20.0)
    assert pair.boundary(3, 5) == (5, 5)
    pair.end(0, 1)


def test_no_rank_runs_ahead_by_more_than_one_boundary(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "store", 20.0)
    pair.boundary(0, 0)
    pair.pipes[0].send(4)
    assert pair.answer(0) == 0, "its peer was at the boundary before, so this one is free"
    pair.pipes[0].send(4)
    assert not pair.pipes[0].poll(0.2)
    pair.pipes[1].send(0)
    assert (pair.answer(0), pair.answer(1)) == (4, 0)
    pair.pipes[1].send(0)
    assert pair.answer(1) == 4, "the same answer at the same boundary"
    pair.end(0, 1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_whose_peer_is_gone_or_stopped_gets_an_error_by_its_deadline(
    tmp_path: Path, how: signal.Signals
) -> None:
    pair = Pair(tmp_path / "store", 1.0)
    pair.boundary(0, 0)
    pid = pair.processes[1].pid
    assert pid is not None
    os.kill(pid, how)
    answers: list[int | str] = []
    while len(answers) < 5 and not (answers and isinstance(answers[-1], str)):
        pair.pipes[0].send(6)
        answers.append(pair.answer(0))
    assert 6 not in answers, "a peer that is not there can't have agreed"
    assert isinstance(answers[-1], str) and "step boundary" in answers[-1]
    pair.pipes[0].send(6)
    assert "form a new group" in str(pair.answer(0))
    pair.end(0)
    pair.processes[1].kill()
    pair.processes[1].join(JOIN_S)
    assert pair.processes[1].exitcode == -signal.SIGKILL
