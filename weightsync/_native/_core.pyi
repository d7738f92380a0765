"""The compiled core; `weightsync._native.pure` is its twin."""

import numpy as np
import numpy.typing as npt

class Program:
    """A table of strided moves, compiled once and replayed for every version.

    `moves`: int64 [n, 38], columns as in `weightsync._native.layout`. Raises ValueError that names the first bad row.
    May be run by several threads at once.
    """

    def __init__(self, moves: npt.NDArray[np.int64]) -> None: ...
    @property
    def moves(self) -> int:
        """Rows of the table."""
    @property
    def size_bytes(self) -> int:
        """Bytes written by one run."""
    @property
    def units(self) -> int:
        """Steps of a run: what is handed to a thread, and the grain of watermarks."""
    def run(
        self,
        src: npt.NDArray[np.uint64],
        dst: npt.NDArray[np.uint64] | None,
        digests: npt.NDArray[np.uint64] | None,
        *,
        threads: int = 1,
        progress: int = 0,
        follow: int = 0,
        generation: int = 0,
        timeout_s: float = 30.0,
        cancel: int = 0,
    ) -> int:
        """Copy, cast and digest each move; returns a status code. The GIL is released.

        `src`, `dst`: absolute address of each move's first element; without `dst` nothing is written. `digests`: out,
        one sum for each move, of the destination's bits. After a status other than OK, what was written is undefined.
        `progress`: address of a u64 that gets the watermark: slot bytes below it are done.
        `follow`: address of {u64 generation, u64 watermark}; a unit starts when the generation has come and its source
        bytes are below the watermark. EVICTED if the generation is or becomes newer, TIMEOUT if neither advances for
        that long. Whoever writes them clears the watermark before the generation grows.
        `cancel`: address of a u32; nonzero ends the run before the next unit.
        """

def exchange(a: int, b: int, scratch: int, size: int) -> float:
    """Exchange the pages of two mappings; returns the seconds it took. The GIL is held.

    `scratch`: a reserved range of `size` bytes, reserved again afterwards. On failure everything is where it was, and
    OSError names the step.
    """

def populate(address: int, size: int, *, write: bool) -> None:
    """Fill the page tables of a range, contents unchanged. Raises OSError. The GIL is released."""

def memory_copy(dst: int, src: int, size: int, threads: int = 1) -> None:
    """A plain copy, as fast as we can: the yardstick of benchmarks. The GIL is released."""

def features() -> dict[str, bool]:
    """Which fast paths are in use on this CPU."""
