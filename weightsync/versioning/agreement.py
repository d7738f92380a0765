"""Which ballot all ranks of a lockstep server are at, agreed upon at every step boundary."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import TYPE_CHECKING

from weightsync.errors import SyncTimeoutError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def place_in(group: dist.ProcessGroup, replica: str | None) -> tuple[str, int, int]:
    """Name of the replica (by default one that the ranks agree upon), this rank, number of ranks."""
    import torch.distributed as dist

    name = [replica or f"replica-{secrets.token_hex(4)}"]
    dist.broadcast_object_list(name, src=dist.get_global_rank(group, 0), group=group)
    return name[0], dist.get_rank(group), dist.get_world_size(group)


class Agreement:
    """Over a gloo process group of the replica's ranks, of which nothing else makes use at the same time. Every rank calls
    `boundary` before every step; one thread at a time. A group that lost a rank is over: the ranks form a new one.

    The highest proposal at one boundary is what all ranks get at the next, so its round trip overlaps the step between.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._round: tuple[dist.Work, torch.Tensor] | None = None
        self._boundary = 0
        self._dead: str | None = None

    def boundary(self, proposal: int) -> int:
        """The highest number that any rank proposed at the boundary before; 0 for none. Equal on all ranks.

        Propose the newest ballot known to be committed, live or not. The first call waits for all ranks' proposals, so that
        nobody serves before all are at the same ballot. Raises SyncTimeoutError; from then on every call does, and some rank
        may have got what others did not.
        """
        if self._dead is not None:
            raise SyncTimeoutError(self._dead)
        self._boundary += 1
        try:
            work, value = self._round or self._start(proposal)
            work.wait(timedelta(seconds=self._timeout_s))
            agreed = int(value.item())
            self._round = self._start(proposal)
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            self._dead = (
                f"step boundary {self._boundary}: the ranks did not agree (deadline: {self._timeout_s:g} s): {cause}; "
                "form a new group"
            )
            raise SyncTimeoutError(self._dead) from error
        return agreed

    def _start(self, proposal: int) -> tuple[dist.Work, torch.Tensor]:
        import torch
        import torch.distributed as dist

        value = torch.tensor([proposal], dtype=torch.int64)
        work = dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        if work is None:
            raise RuntimeError("this process is not in the group")
        return work, value
