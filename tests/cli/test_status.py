"""`weightsync status`: who is there, what is live, and how far behind."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cli.conftest import Call, Run
from tests.conftest import Child

TRAINER = """
import sys, threading, torch, weightsync as ws
address, wanted = sys.argv[1:]
with ws.Publisher(address, name="trainer") as publisher:
    publisher.register({"w": torch.ones(8), "b": torch.zeros(2)})
    publisher.wait_for_members(int(wanted))
    publisher.publish(wait="live")
    print("published", flush=True)
    threading.Event().wait(60)
"""
SERVERS = """
import sys, threading, torch, weightsync as ws
def serve(name):
    subscriber = ws.Subscriber(sys.argv[1], {"w": torch.ones(8), "b": torch.zeros(2)}, name=name)
    return subscriber.start()
servers = [serve(name) for name in sys.argv[2:]]
for server in servers:
    server.wait_for(1)
print("live", flush=True)
threading.Event().wait(60)
"""
NAMES = ["left", "right [red]x"]


@pytest.fixture
def fleet(spawn: Run, address: str) -> Iterator[Child]:
    """A trainer with version 1 live on two servers."""
    trainer = spawn("-c", TRAINER, address, len(NAMES))
    servers = spawn("-c", SERVERS, address, *NAMES)
    for child in (trainer, servers):
        child.wait_for("published|live")
    yield trainer
    for child in (trainer, servers):
        child.kill()


def test_members_are_shown_as_json_and_as_text(
    weightsync: Run, fleet: Child, address: str, call: Call
) -> None:
    document = json.loads(weightsync("status", address, "--json").join())
    assert {key: document[key] for key in ("address", "publisher", "version", "tensors", "size_bytes")} == {
        "address": address, "publisher": "trainer", "version": 1, "tensors": 2, "size_bytes": 40,
    }  # fmt: skip
    assert document["epoch"] > 0 and document["slots"] == 2
    servers = [member for member in document["members"] if member["role"] == "server"]
    assert sorted(member["name"] for member in servers) == NAMES
    keys = "name host pid role transport swap state live_version lag last_seen_s error"
    for member in servers:
        assert sorted(member) == sorted(keys.split())
        assert (member["live_version"], member["lag"], member["error"]) == (1, 0, None)
        assert member["swap"] == "remap" and member["transport"] == "shm" and member["pid"] > 0
    _, documented = call("status", "--help")
    assert all(key in documented for key in (*document, *servers[0]))

    said = weightsync("status", address).join()
    assert f"trainer at {address}: version 1" in said
    for name in NAMES:
        row = next(line for line in said.splitlines() if line.startswith(name))
        assert "remap" in row and "shm" in row


def test_watch_goes_on_until_interrupted_and_outlives_the_publisher(
    weightsync: Run, fleet: Child, address: str
) -> None:
    watching = weightsync("status", address, "--watch", "--json", "--interval", 0.1, "--timeout", 0.5)
    watching.wait_for(r"(\{.*\}\s+){2}")
    fleet.kill()
    watching.wait_for("no answer: ")
    watching.interrupt()
    said = watching.join()
    assert json.loads(said.splitlines()[0])["version"] == 1


def test_nobody_there_is_one_line_and_1(call: Call, address: str) -> None:
    code, said = call("status", address, "--timeout", "0.3")
    assert code == 1 and said.startswith("error: ") and address in said and said.count("\n") == 1


def test_a_malformed_address_shows_the_forms(call: Call) -> None:
    code, said = call("status", "127.0.0.1:7077")
    assert code == 1 and said.startswith("error: ") and "tcp://host:port" in said
