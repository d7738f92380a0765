"""Live memory whose pages can be exchanged: one fixed address range, several contents.

Exchanging moves page tables, not bytes, so it takes the same few microseconds at any size. Legal only while nobody
touches the live range: between steps.
"""

from __future__ import annotations

from collections.abc import Hashable

from weightsync import _native
from weightsync.segment import Segment, reserve, unmap


class Pages:
    """The live range starts out mapping `segment` under `key`. Tensors on `live` keep the range alive after `close()`."""

    def __init__(self, key: Hashable, segment: Segment) -> None:
        self.size = segment.size
        self.live = segment.map(writable=True)
        self._live_key = key
        self._spares: dict[Hashable, int] = {}
        self._scratch = reserve(self.size)

    def add(self, key: Hashable, segment: Segment, *, writable: bool) -> None:
        """Make another content available; its page tables are filled now, not in the swap."""
        self._spares[key] = segment.map_range(writable=writable)

    def drop(self, key: Hashable) -> None:
        """Forget a content that is not live."""
        unmap(self._spares.pop(key), self.size)

    def spare_keys(self) -> set[Hashable]:
        """Contents that are not live."""
        return set(self._spares)

    @property
    def live_key(self) -> Hashable:
        return self._live_key

    def show(self, key: Hashable) -> None:
        """Make `key` the content of the live range. Raises OSError and changes nothing if the kernel refuses."""
        if key == self._live_key:
            return
        spare = self._spares[key]
        _native.exchange(self.live.address, spare, self._scratch, self.size)
        del self._spares[key]
        self._spares[self._live_key] = spare
        self._live_key = key

    def close(self) -> None:
        """Give back everything but the live range, which goes with its last tensor."""
        for key in self.spare_keys():
            self.drop(key)
        if self._scratch:
            unmap(self._scratch, self.size)
            self._scratch = 0
        self.live.close()
