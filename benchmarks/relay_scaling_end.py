"""The processes of `relay_scaling`, each in a network namespace of its own."""

from __future__ import annotations

import json
import sys
import time

import weightsync as ws
from weightsync.cli.bench.content import Content

_TENSORS, _TIMEOUT_S = 128, 120.0


def send(address: str, mib: int, servers: int, relay: str) -> None:
    """Publishes when told to."""
    content = Content(mib << 20, _TENSORS)
    with ws.Publisher(address, insecure=True, relay=relay, timeout_s=_TIMEOUT_S) as publisher:  # type: ignore[arg-type]  # checked there
        publisher.register(content.state)
        while input() == "next":
            publisher.wait_for_members(servers, _TIMEOUT_S)
            content.go_to(publisher.version + 1)
            time.sleep(1.0)  # let the servers check what they have
            print("joined", flush=True)
            assert input() == "publish"
            report = publisher.publish().wait("ready", _TIMEOUT_S)
            errors = sum(member.error is not None for member in report.members.values())
            print(json.dumps({"ready_s": report.ready_s, "errors": errors}), flush=True)


def receive(address: str, mib: int, name: str) -> None:
    """Serves, and ends on a wrong element."""
    content = Content(mib << 20, _TENSORS)
    with ws.Subscriber(address, content.state, insecure=True, name=name, timeout_s=_TIMEOUT_S) as subscriber:
        version = 0
        while True:
            version = subscriber.wait_for(version + 1, _TIMEOUT_S)
            with subscriber.step() as version:
                if content.wrong(version):
                    sys.exit(f"{name}: wrong elements in version {version}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["send", address, mib, servers, relay]:
            send(address, int(mib), int(servers), relay)
        case ["receive", address, mib, name]:
            receive(address, int(mib), name)
