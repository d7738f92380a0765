"""The receiving end: follow some versions, check every element of each, tell what they took."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from weightsync.cli.bench.content import Content


@dataclass(frozen=True, slots=True)
class Received:
    """One version here: seconds to read and verify it, of the swap, and how many elements were wrong."""

    version: int
    transport: str
    read_s: float
    pause_s: float
    wrong: int


def receive(
    address: str, *, size_bytes: int, tensors: int, rounds: int, transport: str, swap: str, verify: str,
    keys: Path | None, insecure: bool, timeout_s: float,
) -> Iterator[Received]:  # fmt: skip
    """Become a server of the bench's weights at `address`, until it has seen the last version; yields each once it is
    checked."""
    import weightsync as ws

    content = Content(size_bytes, tensors)
    with ws.Subscriber(
        address, content.state, transport=transport, swap=swap, verify=verify, keys=keys, insecure=insecure,  # type: ignore[arg-type]  # checked there
        timeout_s=timeout_s,
    ) as subscriber:  # fmt: skip
        version = 0
        while version < rounds:
            version = subscriber.wait_for(version + 1, timeout_s)
            with subscriber.step() as version:
                wrong = content.wrong(version)
            stats = subscriber.stats
            yield Received(version, stats.transport, stats.read_s[-1], stats.swap_pauses_s[-1], wrong)


def main() -> None:
    """`python -m weightsync.cli.bench.reader ADDRESS JSON`: prints a JSON line for each version."""
    from weightsync.errors import WeightSyncError

    options = json.loads(sys.argv[2])
    options["keys"] = None
    try:
        for received in receive(sys.argv[1], **options):
            print(json.dumps(asdict(received)), flush=True)
    except WeightSyncError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
