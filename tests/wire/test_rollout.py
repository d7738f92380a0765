"""Which replicas may switch, under each policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weightsync.errors import ConfigError
from weightsync.wire.rollout import Policy, ReplicaView, Rollout, parse_policy

READY = ReplicaView(is_present=True, target=2, is_ready=True, decided=1)
READING = replace(READY, is_ready=False)
DONE = ReplicaView(is_present=True, target=None, is_ready=False, decided=2)
IDLE = replace(DONE, decided=1)
GONE = replace(IDLE, is_present=False)


def rollout(text: str) -> Rollout:
    return Rollout(parse_policy(text))


@pytest.mark.parametrize("text", ["each", "together", "canary=1", "canary=12", "manual"])
def test_a_policy_reads_as_it_is_written(text: str) -> None:
    assert str(parse_policy(text)) == text


@pytest.mark.parametrize(
    "text", ["", "Each", "canary", "canary=", "canary=0", "canary=-1", "canary=²", "each=1"]
)
def test_an_unknown_policy_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="choose each, together"):
        parse_policy(text)


def test_each_replica_goes_when_it_is_ready() -> None:
    verdict = Rollout(Policy()).decide({"a": READY, "b": READING, "c": GONE})
    assert verdict.permit == {"a": 2} and not verdict.reject


def test_together_waits_for_every_replica_that_is_present() -> None:
    fleet = rollout("together")
    assert not fleet.decide({"a": READY, "b": READING, "c": GONE}).permit
    assert not fleet.decide({"a": READY, "b": IDLE}).permit
    assert fleet.decide({"a": READY, "b": READY, "c": GONE}).permit == {"a": 2, "b": 2}


def test_together_lets_late_replicas_follow_once_it_was_released() -> None:
    fleet = rollout("together")
    fleet.decide({"a": READY, "b": READY})
    assert fleet.decide({"a": DONE, "b": READY, "c": READING}).permit == {"b": 2}
    assert fleet.decide({"a": DONE, "b": DONE, "c": READY}).permit == {"c": 2}


def test_together_nobody_goes_to_a_version_that_one_replica_refused() -> None:
    refusal = replace(IDLE, refused=frozenset({2}))
    verdict = rollout("together").decide({"a": READY, "b": refusal, "c": READING})
    assert not verdict.permit and verdict.reject == {"a": 2, "c": 2}
    gone = replace(refusal, is_present=False)
    assert rollout("together").decide({"a": READY, "b": gone}).permit == {"a": 2}


def test_together_a_version_that_another_replica_skipped_is_given_up() -> None:
    ahead = replace(READING, target=3)
    verdict = rollout("together").decide({"a": READY, "b": ahead})
    assert not verdict.permit and verdict.reject == {"a": 2}


def test_canaries_go_at_once_and_the_rest_when_promoted() -> None:
    fleet = rollout("canary=2")
    views = {"c": READY, "a": READY, "b": READY}
    assert fleet.decide(views).permit == {"a": 2, "b": 2}
    assert fleet.promote(2, {1, 2}) is None
    assert fleet.decide(views).permit == {"a": 2, "b": 2, "c": 2}


def test_an_absent_canary_is_not_replaced_by_another() -> None:
    assert not rollout("canary=1").decide({"a": GONE, "b": READY}).permit


def test_promoting_a_newer_version_ends_the_wait_for_an_older_one() -> None:
    fleet = rollout("canary=1")
    assert fleet.promote(3, {2, 3}) is None
    verdict = fleet.decide({"a": READY, "b": READY})
    assert verdict.permit == {"a": 2} and verdict.reject == {"b": 2}


def test_manual_waits_for_promote() -> None:
    fleet = rollout("manual")
    assert not fleet.decide({"a": READY}).permit
    assert fleet.promote(2, {2}) is None
    assert fleet.decide({"a": READY, "b": READING}).permit == {"a": 2}
    assert not fleet.decide({"a": replace(READY, target=3)}).permit


def test_a_promotion_that_makes_no_sense_is_explained() -> None:
    fleet = rollout("manual")
    assert "unknown" in str(fleet.promote(9, {1, 2}))
    assert fleet.promote(2, {1, 2}) is None
    assert "older than 2" in str(fleet.promote(1, {1, 2}))
    fleet.withdraw(3)
    assert "withdrawn" in str(fleet.promote(3, {1, 2, 3}))
    assert "promotes by itself" in str(rollout("each").promote(1, {1}))


@pytest.mark.parametrize("text", ["each", "together", "canary=1", "manual"])
def test_a_withdrawn_version_is_never_permitted_again(text: str) -> None:
    fleet = rollout(text)
    if text in ("canary=1", "manual"):
        fleet.promote(2, {2})
    assert fleet.decide({"a": READY}).permit == {"a": 2}
    fleet.withdraw(2)
    verdict = fleet.decide({"a": READY})
    assert not verdict.permit and verdict.reject == {"a": 2}
