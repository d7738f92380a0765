"""`weightsync promote` and `weightsync rollback`: an operator decides which version serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import weightsync as ws
from tests.cli.conftest import Call
from tests.processes import eventually


@pytest.fixture(params=[False, True], ids=["open", "keys"])
def keys(request: pytest.FixtureRequest, call: Call, tmp_path: Path) -> list[str]:
    """Options of the commands."""
    if not request.param:
        return []
    call("keys", "new", tmp_path / "keys")
    return ["--keys", str(tmp_path / "keys")]


@pytest.fixture
def fleet(keys: list[str], address: str) -> Iterator[tuple[ws.Publisher, ws.Subscriber]]:
    folder = keys[1] if keys else None
    with ws.Publisher(address, policy="manual", keys=folder) as publisher:
        publisher.register({"w": torch.ones(4)})
        with ws.Subscriber(address, {"w": torch.zeros(4)}, slots=3, keys=folder, initial_version=0) as server:
            yield publisher, server


def serves(server: ws.Subscriber, version: int) -> bool:
    with server.step() as live:
        return live == version


def test_versions_go_live_when_promoted_and_back_when_rolled_back(
    call: Call, fleet: tuple[ws.Publisher, ws.Subscriber], address: str, keys: list[str]
) -> None:
    publisher, server = fleet
    for version in (1, 2):
        publisher.publish(wait="ready")
        assert not serves(server, version)
        code, said = call("promote", address, *([] if version == 1 else [2]), *keys)
        assert (code, said) == (0, f"version {version} is promoted: every server goes to it\n")
        eventually(lambda version=version: serves(server, version), f"version {version} is live", 10.0)
    code, said = call("rollback", address, *keys)
    assert code == 0 and said.startswith("version 2 is rolled back")
    eventually(lambda: serves(server, 1), "version 1 is live again", 10.0)


def test_what_can_not_be_is_one_line(
    call: Call, fleet: tuple[ws.Publisher, ws.Subscriber], address: str, keys: list[str]
) -> None:
    for command in ("promote", "rollback"):
        code, said = call(command, address, *keys)
        assert code == 1 and said == f"error: {address}: nothing was published yet\n"
    fleet[0].publish(wait="ready")
    for command in ("promote", "rollback"):
        code, said = call(command, address, 7, *keys)
        assert code == 1 and "version 7 is unknown" in said and said.count("\n") == 1


def test_a_servers_key_gives_no_orders(call: Call, tmp_path: Path, address: str) -> None:
    from weightsync.wire import messages as m
    from weightsync.wire.address import parse_address
    from weightsync.wire.keys import load_subscriber_keys
    from weightsync.wire.query import ask

    call("keys", "new", tmp_path / "keys")
    thief = load_subscriber_keys(tmp_path / "keys")
    with ws.Publisher(address, policy="manual", keys=tmp_path / "keys") as publisher:
        publisher.register({"w": torch.ones(4)})
        publisher.publish()
        for order in (m.Promote, m.Rollback):
            reply = ask(parse_address(address), order(publisher.epoch, 1, 1), keys=thief, timeout_s=5.0)
            assert isinstance(reply, m.Refused) and "publisher's own key" in reply.reason
        publisher.promote()  # it was not rolled back


@pytest.mark.parametrize("command", ["promote", "rollback"])
def test_nobody_there_is_one_line_and_help_has_an_example(call: Call, command: str, address: str) -> None:
    code, said = call(command, address, "--timeout", 0.3)
    assert code == 1 and said.startswith("error: ") and address in said and said.count("\n") == 1
    code, said = call(command, "--help")
    assert code == 0 and said.count(f"weightsync {command}") >= 2
