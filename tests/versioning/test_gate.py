"""The gate: who waits for whom, and that a swap never happens under a reader."""

import asyncio
import threading

import pytest

from weightsync.errors import SyncTimeoutError, UsageError
from weightsync.versioning.gate import Gate

DEADLINE_S = 10.0


class Model:
    """A version label and a count of readers, to catch a swap under one."""

    def __init__(self, drain_timeout_s: float = DEADLINE_S) -> None:
        self.version = 0
        self.torn = 0
        self.inside = 0
        self.lock = threading.Lock()
        self.gate = Gate(self._swap, drain_timeout_s)

    def _swap(self):
        self.torn += self.inside != 0
        self.version += 1
        return None

    def step(self):
        return self.gate.step(lambda: self.version)


def test_a_pending_swap_happens_on_entry():
    model = Model()
    with model.step() as before:
        model.gate.request_swap()
        assert before == 0
    with model.step() as after:
        assert after == 1


def test_a_step_inside_a_step_keeps_the_version_and_never_waits():
    model = Model()
    with model.step() as outer:
        model.gate.request_swap()
        with model.step() as inner:
            assert inner == outer == 0
    with model.step() as after:
        assert after == 1


def test_an_entrant_waits_for_the_readers_inside_and_then_swaps():
    model = Model()
    entered, leave, seen = threading.Event(), threading.Event(), []

    def reader():
        with model.step():
            entered.set()
            leave.wait(DEADLINE_S)

    def entrant():
        with model.step() as version:
            seen.append(version)

    first = threading.Thread(target=reader)
    first.start()
    assert entered.wait(DEADLINE_S)
    model.gate.request_swap()
    second = threading.Thread(target=entrant)
    second.start()
    second.join(0.1)
    assert second.is_alive() and not seen
    leave.set()
    for thread in (first, second):
        thread.join(DEADLINE_S)
    assert seen == [1]


def test_a_reader_that_never_leaves_puts_the_swap_off_but_stops_nobody():
    model = Model(drain_timeout_s=0.05)
    entered, leave, seen = threading.Event(), threading.Event(), []

    def reader():
        with model.step():
            entered.set()
            leave.wait(DEADLINE_S)

    def entrant():
        with model.step() as version:
            seen.append(version)

    stuck = threading.Thread(target=reader)
    stuck.start()
    assert entered.wait(DEADLINE_S)
    model.gate.request_swap()
    other = threading.Thread(target=entrant)
    other.start()
    other.join(DEADLINE_S)
    assert seen == [0] and model.gate.drains_missed == 1
    leave.set()
    stuck.join(DEADLINE_S)
    with model.step() as version:
        assert version == 1


def test_many_readers_and_many_swaps_never_tear():
    model = Model()
    stop = threading.Event()

    def reader():
        while not stop.is_set():
            with model.step() as version:
                with model.lock:
                    model.inside += 1
                if model.version != version:
                    model.torn += 1
                with model.lock:
                    model.inside -= 1

    threads = [threading.Thread(target=reader) for _ in range(4)]
    for thread in threads:
        thread.start()
    for wanted in range(1, 200):
        model.gate.request_swap()
        while model.version < wanted:
            model.gate.adopt_pending()
    stop.set()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert model.torn == 0


def test_steps_of_two_tasks_are_apart_and_those_of_one_nest():
    model = Model()

    async def main() -> list[int]:
        started, leave = asyncio.Event(), asyncio.Event()
        seen: list[int] = []

        async def reader():
            async with model.step():
                started.set()
                await leave.wait()
                async with model.step() as inner:
                    seen.append(inner)

        async def entrant():
            async with model.step() as version:
                seen.append(version)

        first = asyncio.create_task(reader())
        await started.wait()
        model.gate.request_swap()
        second = asyncio.create_task(entrant())
        await asyncio.sleep(0.02)
        assert seen == []
        leave.set()
        await asyncio.gather(first, second)
        return seen

    assert asyncio.run(main()) == [0, 1]


def test_exclusive_waits_for_readers_and_refuses_to_wait_for_itself():
    model = Model()
    with model.step():
        with pytest.raises(UsageError), model.gate.exclusive(0.01):
            pass
        failed: list[BaseException] = []

        def other():
            try:
                with model.gate.exclusive(0.05):
                    pass
            except SyncTimeoutError as error:
                failed.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(DEADLINE_S)
        assert "1 steps were still open" in str(failed[0])
    with model.gate.exclusive(0.05):
        pass


def test_a_step_can_not_be_entered_twice():
    model = Model()
    step = model.step()
    with step, pytest.raises(UsageError):
        step.__enter__()


def test_a_step_that_raises_lets_go():
    model = Model()
    with pytest.raises(RuntimeError), model.step():
        raise RuntimeError
    with model.gate.exclusive(0.05):
        pass
