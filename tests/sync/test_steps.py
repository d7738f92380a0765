"""Steps pin one version; versions change between them, and only there."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import weightsync as ws
from tests import roles
from tests.processes import Peer, eventually
from weightsync.errors import NotReadyError, SyncTimeoutError, UsageError


@pytest.fixture
def trained() -> torch.nn.Module:
    return roles.model()


@pytest.fixture
def publisher(trained: torch.nn.Module) -> Iterator[ws.Publisher]:
    with ws.Publisher(f"ipc://@{uuid.uuid4().hex}") as made:
        made.register(trained)
        yield made


class Server:
    """A subscriber in the test's own process, and the model that it serves."""

    def __init__(self, publisher: ws.Publisher, **options: object) -> None:
        self.model = roles.model()
        roles.fill(self.model, -1)
        self.sub = ws.Subscriber(publisher.address, self.model, **options).start(20)

    def look(self) -> tuple[int, float]:
        with self.sub.step() as version:
            assert not self.sub.check()
            return version, roles.content_of(self.model)


@pytest.fixture
def serve(publisher: ws.Publisher) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(**options: object) -> Server:
        made.append(Server(publisher, **options))
        return made[-1]

    yield make
    for server in made:
        server.sub.close()


def send(publisher: ws.Publisher, trained: torch.nn.Module, content: float) -> None:
    """Publish, and wait until every member has it verified and will swap at its next step."""
    roles.fill(trained, content)
    publisher.publish().wait("ready", 20)


def pending(server: Server) -> None:
    eventually(lambda: server.sub._gate._is_pending, "a swap is pending")


def test_a_step_before_the_first_version_waits_and_then_gives_up(serve: Callable[..., Server]) -> None:
    server = serve(timeout_s=0.3)
    before = time.monotonic()
    with pytest.raises(NotReadyError, match="no verified version"):
        server.look()
    assert 0.2 < time.monotonic() - before < 10
    assert server.sub.version is None


def test_a_step_before_the_first_version_gets_the_first_version(
    publisher: ws.Publisher, trained: torch.nn.Module, serve: Callable[..., Server]
) -> None:
    for content in (10, 20, 30):
        with ThreadPoolExecutor(8) as pool:
            server = serve()
            looks = [pool.submit(server.look) for _ in range(8)]
            send(publisher, trained, content)
            assert {look.result(20)[1] for look in looks} <= {content, content - 10}
        server.sub.close()


def test_the_tensors_own_content_may_count_as_a_version(
    publisher: ws.Publisher, trained: torch.nn.Module, serve: Callable[..., Server]
) -> None:
    server = serve(initial_version=0)
    assert server.look() == (0, -1)
    send(publisher, trained, 10)
    assert server.sub.wait_for(1, 20) == 1
    assert server.look() == (1, 10)


def test_a_step_sees_one_version_while_newer_ones_arrive(
    publisher: ws.Publisher, trained: torch.nn.Module, serve: Callable[..., Server]
) -> None:
    server = serve()
    send(publisher, trained, 10)
    with server.sub.step() as version:
        send(publisher, trained, 20)
        pending(server)
        assert (version, server.sub.version, roles.content_of(server.model)) == (1, 1, 10)
        with server.sub.step() as inner:  # a step in a step never waits, and never swaps
            assert (inner, roles.content_of(server.model)) == (1, 10)
        with pytest.raises(UsageError, match="inside a step"):
            server.sub.wait_for(2, 0.1)
        with pytest.raises(UsageError, match="leave the step first"):
            server.sub.rollback()
    assert server.look() == (2, 20)


def test_a_step_object_is_not_entered_twice(
    publisher: ws.Publisher, trained: torch.nn.Module, serve: Callable[..., Server]
) -> None:
    server = serve()
    send(publisher, trained, 10)
    step = server.sub.step()
    with step, pytest.raises(UsageError, match="open already"), step:
        pass
    assert server.look() == (1, 10)


def test_a_reader_that_never_leaves_costs_the_others_the_drain_time_and_the_new_version(
    publisher: ws.Publisher, trained: torch.nn.Module, serve: Callable[..., Server]
) -> None:
    server = serve(drain_timeout_s=0.3)
    send(publisher, trained, 10)
    entered, leave = threading.Event(), threading.Event()

    def sit() -> None:
        with server.sub.step():
            entered.set()
            assert leave.wait(20)

    sitter = threading.Thread(target=sit)
    sitter.start()
    assert entered.wait(20)
    send(publisher, trained, 20)
    pending(server)
    before = time.monotonic()
    assert server.look() == (1, 10)
    assert 0.2 < time.monotonic() - before < 10
    with pytest.raises(SyncTimeoutError, match="live is 1"):
        server.sub.wait_for(2, 0.2)
    with pytest.raises(SyncTimeoutError, match="1 steps were still open"):
        server.sub.rollback(0.1)
    leave.set()
    sitter.join(20)
    assert server.look() == (2, 20)


def test_overlapping_readers_can_not_put_a_swap_off_for_ever(
    publisher: ws.Publisher, trained: torch.nn.Module, serve: Callable[..., Server]
) -> None:
    server = serve()
    send(publisher, trained, 1)
    over = threading.Event()
    seen: list[set[tuple[int, float]]] = [set() for _ in range(4)]

    def read(number: int) -> None:
        while not over.is_set():
            seen[number].add(server.look())

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, number) for number in range(4)]
        for content in range(2, 12):
            roles.fill(trained, content)
            publisher.publish().wait("live", 20)
        over.set()
        for reader in readers:
            reader.result(20)
    assert all(version == content for one in seen for version, content in one)
    assert server.look() == (11, 11)
    assert server.sub._gate.drains_missed == 0


def test_asyncio_steps_do_not_block_the_loop(
    publisher: ws.Publisher, trained: torch.nn.Module, serve: Callable[..., Server]
) -> None:
    server = serve()
    send(publisher, trained, 10)

    async def main() -> None:
        assert await server.sub.wait_for_async(1, 20) == 1
        entered, leave = asyncio.Event(), asyncio.Event()

        async def sit() -> None:
            async with server.sub.step() as version:
                entered.set()
                await leave.wait()
                assert (version, roles.content_of(server.model)) == (1, 10)

        sitter = asyncio.create_task(sit())
        await entered.wait()
        await asyncio.to_thread(send, publisher, trained, 20)
        await asyncio.to_thread(pending, server)

        async def enter() -> int:
            async with server.sub.step() as version:
                async with server.sub.step() as inner:
                    assert inner == version
                return version

        waiting = [asyncio.create_task(enter()) for _ in range(5)]
        done, _ = await asyncio.wait(waiting, timeout=0.05)
        assert not done, "they wait for the swap"
        cancelled = waiting.pop()
        cancelled.cancel()
        leave.set()
        await sitter
        assert await asyncio.gather(*waiting) == [2] * 4
        assert cancelled.cancelled() or cancelled.cancelling()

    asyncio.run(main())
    assert server.look() == (2, 20)


@pytest.mark.parametrize(("swap", "slots"), [("remap", 3), ("flip", 3), ("copy", 4), ("adopt", 3)])
def test_a_rollback_serves_the_version_before_until_a_newer_one_comes(
    trained: torch.nn.Module, swap: str, slots: int
) -> None:
    with ws.Publisher(f"ipc://@{uuid.uuid4().hex}", slots=4) as publisher:
        publisher.register(trained)
        server = Server(publisher, swap=swap, slots=slots)
        with pytest.raises(NotReadyError):
            server.sub.rollback()
        for number in (1, 2):
            send(publisher, trained, 10 * number)
            server.sub.wait_for(number, 20)
        assert server.sub.rollback() == 1
        assert server.look() == (1, 10)
        with pytest.raises(UsageError, match="no version before 1"):
            server.sub.rollback()
        assert server.look() == (1, 10)
        roles.fill(trained, 30)
        publisher.publish()
        assert server.sub.wait_for(3, 20) == 3
        assert server.look() == (3, 30)
        server.sub.close()


@pytest.mark.parametrize(("swap", "slots"), [("remap", 3), ("flip", 3), ("copy", 4), ("adopt", 3)])
def test_a_server_that_rolled_back_does_not_go_forward_when_it_joins_again(
    publisher: ws.Publisher, trained: torch.nn.Module, serve: Callable[..., Server], swap: str, slots: int
) -> None:
    server = serve(swap=swap, slots=slots)
    for number in (1, 2):
        send(publisher, trained, 10 * number)
        server.sub.wait_for(number, 20)
    server.sub.rollback()
    before = server.sub._receiver.session
    server.sub._rejoin()
    eventually(lambda: server.sub._receiver.session not in (before, None), "it has joined again")
    send(publisher, trained, 30)  # after whatever was read again
    publisher.rollback()
    eventually(lambda: server.look() == (1, 10), "it serves the version before")


def test_with_two_slots_a_rollback_works_or_says_what_it_takes(
    publisher: ws.Publisher, trained: torch.nn.Module, serve: Callable[..., Server]
) -> None:
    server = serve(slots=2)
    for number in (1, 2):
        send(publisher, trained, 10 * number)
        server.sub.wait_for(number, 20)
    try:
        assert server.sub.rollback() == 1
    except UsageError as error:
        assert "slots=3" in str(error)
        assert server.look() == (2, 20)
    else:
        assert server.look() == (1, 10)
    roles.fill(trained, 30)
    publisher.publish()
    server.sub.wait_for(3, 20)
    assert server.look() == (3, 30)


def test_two_servers_adopt_one_slot(peer: Callable[[], Peer]) -> None:
    publisher, servers = peer(), [peer(), peer()]
    address = publisher.call(roles.open_publisher, "tcp://127.0.0.1:0")
    for number, server in enumerate(servers):
        server.call(roles.open_subscriber, address, swap="adopt", name=f"server{number}")
        server.call(roles.serve)
    for content in range(1, 21):
        publisher.call(roles.publish, content, wait="live", members=2)
    for server in servers:
        assert server.call(roles.stop_serving) == [(n, n) for n in range(1, 21)]


def test_a_callback_that_raises_does_not_hold_the_gate(
    publisher: ws.Publisher, trained: torch.nn.Module, serve: Callable[..., Server]
) -> None:
    calls = []

    def on_live(version: int, pause_s: float) -> None:
        calls.append(version)
        if version == 1:
            raise ZeroDivisionError

    server = serve(on_live=on_live)
    send(publisher, trained, 10)
    pending(server)
    assert server.look() == (1, 10)  # logged; a pass is not lost for it
    send(publisher, trained, 20)
    server.sub.wait_for(2, 20)
    assert server.look() == (2, 20)
    assert calls == [1, 2]


def test_closing_twice_and_starting_twice(
    publisher: ws.Publisher, trained: torch.nn.Module, serve: Callable[..., Server]
) -> None:
    server = serve()
    with pytest.raises(UsageError, match="before"):
        server.sub.start()
    send(publisher, trained, 10)
    server.sub.wait_for(1, 20)
    send(publisher, trained, 20)
    pending(server)
    server.sub.close()
    server.sub.close()
    assert roles.content_of(server.model) == 10
    with pytest.raises(UsageError, match="before"):
        server.sub.start()
    assert server.look() == (1, 10), "what was pending at the end is not swapped in afterwards"
    publisher.close()
    publisher.close()
    with pytest.raises(UsageError, match="closed"):
        publisher.publish()


def test_calls_before_start_say_so(publisher: ws.Publisher) -> None:
    subscriber = ws.Subscriber(publisher.address, roles.model())
    for call in (subscriber.step, subscriber.rollback, lambda: subscriber.wait_for(1)):
        with pytest.raises(UsageError, match="start"):
            call()
    with pytest.raises(UsageError, match="inside"):
        subscriber.check()
    subscriber.close()
    subscriber.close()


@pytest.mark.parametrize("swap", ["remap", "copy", "flip"])
def test_an_idle_server_follows_and_its_next_step_serves_the_newest(publisher, trained, serve, swap):
    server = serve(swap=swap)
    for content in (1.0, 2.0, 3.0):
        roles.fill(trained, content)
        publisher.publish(wait="ready", timeout_s=20)
    assert server.sub.version is None
    assert server.look() == (3, 3.0)


def test_a_callback_that_raises_stops_nothing(publisher, trained, serve):
    def broken(*_: object) -> None:
        raise RuntimeError("a bug of the user's")

    server = serve(on_ready=broken, on_live=broken, on_failed=broken)
    for version in (1, 2):
        publisher.publish()
        assert server.sub.wait_for(version, 20) == version
