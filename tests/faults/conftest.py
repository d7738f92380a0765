"""Each test gets processes that end with it, and leaves no thread behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from tests.processes import Peer, eventually, library_threads, peers


@pytest.fixture
def peer() -> Iterator[Callable[[], Peer]]:
    yield from peers()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After the test no thread of the library runs in the test's own process."""
    yield
    gc.collect()
    eventually(lambda: not library_threads(), "the library's threads end", 10.0)
