"""Weights that both ends can make by themselves, so that every byte of every version can be checked."""

from __future__ import annotations

import numpy as np
import torch

_SEED = 20
_STEP = 0x9E37


class Content:
    """`tensors` bf16 tensors of `size_bytes` in all, as equal as can be; `go_to(v)` gives every element its value of version
    v, from a pattern that differs everywhere."""

    def __init__(self, size_bytes: int, tensors: int) -> None:
        elements = max(size_bytes // 2, tensors)
        borders = np.linspace(0, elements, tensors + 1).astype(np.int64)
        pattern = np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2**16, elements, np.uint16)
        self._pattern = torch.from_numpy(pattern.view(np.int16))
        self._spans = list(zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True))
        self.size_bytes = elements * 2
        self.state = {
            f"weight.{number}": torch.zeros(stop - start, dtype=torch.bfloat16)
            for number, (start, stop) in enumerate(self._spans)
        }

    def go_to(self, version: int) -> None:
        """Write the tensors."""
        for tensor, (start, stop) in zip(self.state.values(), self._spans, strict=True):
            torch.add(self._pattern[start:stop], _shift(version), out=tensor.view(torch.int16))

    def wrong(self, version: int) -> int:
        """How many elements are not what they should be."""
        found = 0
        for tensor, (start, stop) in zip(self.state.values(), self._spans, strict=True):
            found += int((tensor.view(torch.int16) - _shift(version) != self._pattern[start:stop]).sum())
        return found


def _shift(version: int) -> int:
    return version * _STEP % 2**15
