"""NIXL without us: bare READs between agents in two processes, in the fastest setting found on hosts without RDMA (no
progress thread, chunks of 4 MiB, descriptors prepared once)."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from weightsync.cli.bench.yardstick import aligned_buffer

_CHUNK = 4 << 20


def _agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {})
    return agent


def _hold(connection: Connection, size: int) -> None:
    agent, buffer = _agent("holder"), aligned_buffer(size)
    agent.register_memory([(buffer.ctypes.data, size, 0, "")], "DRAM")
    connection.send((agent.get_agent_metadata(), buffer.ctypes.data))
    while not connection.poll(0.0005):
        agent.get_new_notifs()


class RawNixl:
    """Another process with `size` bytes; `read_seconds()` READs them all into a buffer of this one."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(target=_hold, args=(child, size), daemon=True)
        self._process.start()
        metadata, remote = self._connection.recv()
        self._agent, self._buffer = _agent("reader"), aligned_buffer(size)
        local = self._buffer.ctypes.data
        self._agent.register_memory([(local, size, 0, "")], "DRAM")
        peer = self._agent.add_remote_agent(metadata)
        ranges = [(offset, min(_CHUNK, size - offset)) for offset in range(0, size, _CHUNK)]
        sides = [
            self._agent.prep_xfer_dlist(
                name, [(base + offset, length, 0) for offset, length in ranges], "DRAM"
            )
            for name, base in (("NIXL_INIT_AGENT", local), (peer, remote))
        ]
        every = list(range(len(ranges)))
        self._transfer = self._agent.make_prepped_xfer("READ", sides[0], every, sides[1], every)

    def read_seconds(self) -> float:
        started = time.perf_counter()
        state = self._agent.transfer(self._transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._transfer)
        assert state == "DONE", state
        return time.perf_counter() - started

    def __enter__(self) -> RawNixl:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.send("end")
        self._process.join(10)
