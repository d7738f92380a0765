"""The examples run as their first lines say, and come to an end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import Child

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_fsdp2_to_tensor_parallel(spawn: Callable[..., Child]) -> None:
    child = spawn(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, EXAMPLES / "fsdp2_to_tp.py",
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    try:
        shown = child.join(timeout_s=60.0)
    finally:
        if child.process.poll() is None:
            child.process.terminate()  # passed on to the ranks
            child.process.wait(20.0)
    for rank in (0, 1):
        assert f"server rank {rank} answered as the trainer does in versions [1, 2, 3, 4, 5]" in shown


def test_every_example_is_run_here() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"fsdp2_to_tp.py"}
    assert all(len((EXAMPLES / name).read_text().splitlines()) < 60 for name in names)
