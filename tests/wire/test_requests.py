"""Questions that wait: answered once, when it has come true or by the deadline."""

import pytest

from weightsync.errors import UsageError
from weightsync.wire import messages as m
from weightsync.wire.requests import Request, Requests

EPOCH = 7


class Asked:
    """Requests with what was sent; `facts` are the numbers that have come true."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, m.Answer]] = []
        self.facts: set[int] = set()
        self.requests = Requests(EPOCH, lambda route, answer: self.sent.append((route, answer)))

    def ask(self, number: int, deadline: float, route: bytes = b"a") -> None:
        def attempt(now: float) -> m.Answer | None:
            return m.Answer(EPOCH, number, slot=0) if number in self.facts else None

        self.requests.add(Request(route, number, deadline, attempt, lambda: f"nobody did {number}"))


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_an_answer_comes_when_it_is_true_and_only_once(asked):
    asked.ask(1, 5.0)
    asked.requests.settle(0.0)
    assert asked.sent == []
    asked.facts.add(1)
    for _ in range(2):
        asked.requests.settle(1.0)
    assert asked.sent == [(b"a", m.Answer(EPOCH, 1, slot=0))]


def test_a_deadline_is_answered_with_who_was_missing_and_only_once(asked):
    asked.ask(1, 5.0)
    asked.requests.settle(4.9)
    assert asked.sent == []
    for now in (5.0, 6.0):
        asked.requests.settle(now)
    assert asked.sent == [(b"a", m.Answer(EPOCH, 1, error=("SyncTimeoutError", "nobody did 1")))]


def test_what_has_come_true_by_the_deadline_is_no_timeout(asked):
    asked.ask(1, 5.0)
    asked.facts.add(1)
    asked.requests.settle(9.0)
    assert asked.sent == [(b"a", m.Answer(EPOCH, 1, slot=0))]


def test_what_an_attempt_raises_goes_to_whoever_asked(asked):
    def attempt(now: float) -> m.Answer | None:
        raise UsageError("versions only grow")

    asked.requests.add(Request(b"a", 1, 5.0, attempt, lambda: ""))
    asked.ask(2, 5.0)
    asked.facts.add(2)
    asked.requests.settle(0.0)
    assert asked.sent == [
        (b"a", m.Answer(EPOCH, 1, error=("UsageError", "versions only grow"))),
        (b"a", m.Answer(EPOCH, 2, slot=0)),
    ]


def test_the_next_deadline_is_the_nearest_that_is_still_waited_for(asked):
    assert asked.requests.next_deadline() is None
    asked.ask(1, 9.0)
    asked.ask(2, 5.0)
    assert asked.requests.next_deadline() == 5.0
    asked.requests.settle(5.0)
    assert asked.requests.next_deadline() == 9.0


def test_whoever_is_gone_is_answered_nothing(asked):
    asked.ask(1, 5.0, b"gone")
    asked.ask(2, 5.0, b"here")
    asked.requests.forget(b"gone")
    asked.requests.settle(5.0)
    assert [route for route, _ in asked.sent] == [b"here"]
