"""`weightsync coordinator`: the address of a fleet, held by a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Call, Run
from tests.conftest import Child

TRAINER = """
import sys, threading, torch, weightsync as ws
address, wanted = sys.argv[1:3]
keys = sys.argv[3] if len(sys.argv) > 3 else None
with ws.Publisher(address, coordinator="external", name="trainer", keys=keys) as publisher:
    publisher.register({"w": torch.ones(8), "b": torch.zeros(2)}, timeout_s=20.0)
    while True:
        publisher.wait_for_members(int(wanted), 20.0)
        print("published", publisher.publish(wait="live").version, flush=True)
        sys.stdin.readline() or threading.Event().wait(60)
"""
SERVER = """
import sys, time, torch, weightsync as ws
with ws.Subscriber(sys.argv[1], {"w": torch.ones(8), "b": torch.zeros(2)}, name="server", timeout_s=20.0) as server:
    while True:
        with server.step() as version:
            pass
        time.sleep(0.01)
"""


def coordinate(weightsync: Run, address: str, *options: object) -> tuple[Child, str]:
    held = weightsync("coordinator", address, *options)
    return held, held.wait_for(r"coordinating at (\S+)")[1]


@pytest.fixture
def killed() -> Iterator[list[Child]]:
    """Children that do not end by themselves."""
    children: list[Child] = []
    yield children
    for child in children:
        child.kill()


def test_a_fleet_is_followed_line_by_line_and_survives_a_kill(
    weightsync: Run, spawn: Run, killed: list[Child]
) -> None:
    held, address = coordinate(weightsync, "tcp://127.0.0.1:0", "--name", "holder")
    killed += [spawn("-c", TRAINER, address, 1), spawn("-c", SERVER, address)]
    held.wait_for(r"publisher trainer: all ranks are there \(1\), epoch \d+")
    held.wait_for("version 1 is sealed")
    held.wait_for("server: version 1 is live")
    held.kill()
    held, again = coordinate(weightsync, address)
    assert again == address
    held.wait_for("publisher trainer: all ranks are there")
    held.wait_for("server: version 1 is live")
    held.interrupt()
    assert held.join().endswith("stopped\n")


def test_json_is_a_document_for_every_change(weightsync: Run, address: str) -> None:
    held = weightsync("coordinator", address, "--json")
    first = json.loads(held.wait_for(r"\{.*\}\n")[0])
    assert (first["address"], first["ranks"], first["missing_ranks"]) == (address, 0, ["every rank"])
    held.process.terminate()
    assert held.join().count("\n") == 1


def test_a_second_one_is_refused_and_takes_over_when_asked(weightsync: Run, call: Call, address: str) -> None:
    first, _ = coordinate(weightsync, address, "--name", "first")
    code, said = call("coordinator", address)
    assert code == 1 and "first" in said and "Traceback" not in said
    second, _ = coordinate(weightsync, address, "--takeover", "--name", "second")
    assert "taken over by" in first.join(1) and "second" in first.output
    second.interrupt()
    second.join()


def test_a_trainer_that_is_its_own_coordinator_does_not_share_the_address(
    weightsync: Run, call: Call, address: str, file: Path
) -> None:
    held, _ = coordinate(weightsync, address, "--name", "holder")
    code, said = call("publish", file, "--address", address)
    assert code == 1 and "holder" in said
    held.interrupt()
    held.join()


def test_keys_are_those_of_the_publisher(
    weightsync: Run, spawn: Run, call: Call, tmp_path: Path, killed: list[Child]
) -> None:
    for name in ("fleet", "strangers"):
        call("keys", "new", tmp_path / name)
    held, address = coordinate(weightsync, "tcp://127.0.0.1:0", "--keys", tmp_path / "fleet")
    killed.append(spawn("-c", TRAINER, address, 0, tmp_path / "fleet"))
    killed[0].wait_for("published 1")
    out = tmp_path / "got.safetensors"
    assert call("pull", address, "--out", out, "--timeout", 1, "--keys", tmp_path / "strangers")[0] == 1
    assert call("pull", address, "--out", out, "--keys", tmp_path / "fleet")[0] == 0
    held.interrupt()
    held.join()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tcp://0.0.0.0:0"], "keys=DIR"),
        (["127.0.0.1:7077"], "tcp://host:port"),
        (["ipc://@x", "--keys", "/nowhere"], "weightsync keys new"),
    ],
    ids=" ".join,
)
def test_what_can_not_work_is_one_line(call: Call, arguments: list[str], expected: str) -> None:
    code, said = call("coordinator", *arguments)
    assert code == 1 and said.startswith("error: ") and expected in said and said.count("\n") == 1


def test_help_teaches_with_examples(call: Call) -> None:
    code, said = call("coordinator", "--help")
    assert code == 0 and said.count("weightsync coordinator") >= 3 and 'coordinator="external"' in said
