"""Text that ships with Python: its license, its help topics and its own sources, as bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_EVERY = 10  # every tenth document is never trained on
LIMIT_BYTES = 3 << 20


@dataclass(frozen=True, slots=True)
class Text:
    """Two 1-d `uint8` tensors. The split is by document and the same in every process of one Python."""

    train: Tensor
    heldout: Tensor


def load_text(limit_bytes: int = LIMIT_BYTES) -> Text:
    train, heldout = bytearray(), bytearray()
    for number, document in enumerate(_documents()):
        (heldout if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else train).extend(document)
        if len(train) + len(heldout) >= limit_bytes:
            break
    return Text(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(heldout, dtype=torch.uint8))


def _documents() -> Iterator[bytes]:
    """Prose first, then sources; a Python that ships no sources still has the help topics."""
    from pydoc_data.topics import topics

    library = Path(os.__file__).parent
    for name in sorted(topics):
        yield topics[name].encode()
    for path in (library / "LICENSE.txt", *sorted(library.glob("*.py"))):
        if path.is_file():
            yield path.read_bytes()


def draw_windows(data: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """`(rows, length)` int64 byte values from random places in `data`."""
    starts = torch.randint(len(data) - length, (rows, 1), generator=generator)
    return data[starts + torch.arange(length)].long()


def spaced_windows(data: Tensor, rows: int, length: int) -> Tensor:
    """As `draw_windows`, from evenly spaced places: the same windows in every process."""
    starts = torch.linspace(0, len(data) - length - 1, rows).long().unsqueeze(1)
    return data[starts + torch.arange(length)].long()
