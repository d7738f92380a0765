"""The command line as users run it: a process of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import Child
from weightsync.cli import main

Run = Callable[..., Child]
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def weightsync(spawn: Run) -> Run:
    """`weightsync("pull", address, ...)` starts the command."""
    return lambda *arguments, **env: spawn("-m", "weightsync.cli", *arguments, **{"COLUMNS": "200", **env})


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """A tensor of every kind that a checkpoint may hold, with bits that no arithmetic would keep."""
    random = torch.Generator().manual_seed(11)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)

    return {
        "model.embed.weight": noise(257, 128).view(torch.bfloat16),
        "model.layers.0.q_proj.weight": noise(64, 512).view(torch.float32),
        "model.layers.0.k_proj.weight": noise(64, 96).view(torch.float16),
        "model.layers.0.scale": noise(5, 24).view(torch.float64),
        "model.layers.0.fp8.weight": noise(33, 17).view(torch.float8_e4m3fn),
        "model.layers.0.fp8_wide.weight": noise(7, 9).view(torch.float8_e5m2),
        "model.layers.0.quantised": noise(19).view(torch.int8),
        "model.layers.0.mask": noise(31) > 127,
        "model.layers.0.empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "model.step": torch.tensor(-(2**40), dtype=torch.int64),
        "lm_head.weight": noise(300, 256).view(torch.bfloat16),
    }


@pytest.fixture
def file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`call("pull", ...)` runs the command in this process, for what needs none of its own: (exit code, output)."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["weightsync", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(logging.root, "level", logging.root.level)  # put back what --verbose sets
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        return int(end.value.code or 0), output.out + output.err

    return run
