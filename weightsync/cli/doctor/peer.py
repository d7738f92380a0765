"""The second process of the doctor's roundtrip: subscribes, compares each bit, answers."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 30.0


@dataclass(slots=True)
class Answer:
    """What the second process saw."""

    error: str = ""
    different: list[str] = field(default_factory=list)
    tensors: int = 0
    size_bytes: int = 0
    read_s: float = 0.0

    @classmethod
    def from_json(cls, text: str) -> Answer:
        return cls(**json.loads(text))


def sample_tensors() -> dict[str, torch.Tensor]:
    """The same tensors in every process: a few dtypes, odd sizes, 0-d, empty, and not contiguous."""
    import torch

    random = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)

    return {
        "weight": noise(1024, 16384).view(torch.bfloat16),
        "transposed": noise(64, 1028).view(torch.float32).T,
        "quantised": noise(33, 77).view(torch.float8_e4m3fn),
        "mask": noise(129) > 127,
        "step": torch.tensor(1234567890123),
        "empty": torch.empty(0, 8),
    }


def compare(address: str, transport: str) -> Answer:
    """Subscribe over `transport`, wait for a version, compare."""
    import torch

    import weightsync as ws
    from weightsync.errors import WeightSyncError

    wanted = sample_tensors()
    got = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    try:
        with ws.Subscriber(
            address, got, swap="copy", transport=transport, name="doctor-peer", timeout_s=TIMEOUT_S
        ) as subscriber:
            subscriber.wait_for(1, timeout_s=TIMEOUT_S)
            with subscriber.step():
                different = [name for name in wanted if _bits(got[name]) != _bits(wanted[name])]
            read_s = sum(subscriber.stats.read_s)
    except WeightSyncError as error:
        return Answer(error=str(error))
    size_bytes = sum(tensor.nbytes for tensor in wanted.values())
    return Answer(different=different, tensors=len(wanted), size_bytes=size_bytes, read_s=read_s)


def _bits(tensor: torch.Tensor) -> bytes:
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    print(json.dumps(asdict(compare(sys.argv[1], sys.argv[2]))))
