"""Moving a model's tensors into memory of ours, so that their content can be exchanged under them.

Whole storages move, so views, strides and ties inside the model stay as they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightsync.config import TENSOR_ALIGNMENT
from weightsync.errors import LayoutError
from weightsync.segment import Mapping, round_up
from weightsync.tensors import Entry


@dataclass(frozen=True, slots=True)
class _Block:
    """One storage and its place in the arena."""

    storage: torch.UntypedStorage
    offset: int


class Arena:
    """A byte-for-byte image of all storages behind `entries`. Raises LayoutError if one can't be moved safely."""

    def __init__(self, entries: list[Entry], ignored: dict[str, torch.Tensor]) -> None:
        self._entries = entries
        self._blocks: dict[int, _Block] = {}
        offset = 0
        for entry in entries:
            storage = entry.tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._blocks:
                self._blocks[storage.data_ptr()] = _Block(storage, offset)
                offset = round_up(offset + storage.nbytes(), TENSOR_ALIGNMENT)
        self.size = max(offset, TENSOR_ALIGNMENT)
        self._refuse_outside_views(ignored)

    def offset_of(self, entry: Entry) -> int:
        """Where the entry's first element lies in the arena, in bytes."""
        tensor = entry.tensor
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        return 0 if block is None else block.offset + int(tensor.storage_offset()) * tensor.element_size()

    def copy_to(self, mapping: Mapping) -> None:
        """Write the present content of every storage to its place."""
        for block in self._blocks.values():
            target = torch.frombuffer(
                mapping.buffer, dtype=torch.uint8, count=block.storage.nbytes(), offset=block.offset
            )
            target.copy_(torch.empty(0, dtype=torch.uint8).set_(block.storage))

    def views(self, mapping: Mapping) -> list[torch.Tensor | None]:
        """For each entry the tensor of equal shape and strides in `mapping`; None for one without elements."""
        storages = {
            pointer: torch.frombuffer(
                mapping.buffer, dtype=torch.uint8, count=block.storage.nbytes(), offset=block.offset
            ).untyped_storage()
            for pointer, block in self._blocks.items()
        }
        views: list[torch.Tensor | None] = []
        for entry in self._entries:
            tensor = entry.tensor
            storage = storages.get(tensor.untyped_storage().data_ptr())
            view = None
            if storage is not None and tensor.numel():
                empty = torch.empty(0, dtype=tensor.dtype)
                view = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
            views.append(view)
        return views

    def release(self) -> None:
        """Let go of the original storages, so that their memory returns to the system."""
        self._blocks = {}

    def _refuse_outside_views(self, ignored: dict[str, torch.Tensor]) -> None:
        """A tensor outside the source on a storage that moves would keep the old memory and never change again."""
        shared = [
            n for n, t in ignored.items() if t.numel() and t.untyped_storage().data_ptr() in self._blocks
        ]
        if shared:
            raise LayoutError(
                f"ignored, but they share storage with tensors that are synced: {', '.join(shared)}; "
                'do not ignore them, or use swap="copy"'
            )
        known: dict[int, set[int]] = {}
        for entry in self._entries:
            for tensor in entry.objects:
                known.setdefault(tensor.untyped_storage().data_ptr(), set()).add(id(tensor))
        outside = [
            entry.names[0]
            for entry in self._entries
            if entry.tensor.numel()
            and self._holders(entry) > len(known[entry.tensor.untyped_storage().data_ptr()])
        ]
        if outside:
            raise LayoutError(
                f"{len(outside)} tensors share their storage with tensors outside what was passed, which would keep the old "
                f"weights for ever: {', '.join(outside[:10])}{', …' if len(outside) > 10 else ''}. Pass the module itself "
                '(not its state_dict(), not views of fused parameters), or use swap="copy", which writes in place'
            )

    def _holders(self, entry: Entry) -> int:
        """Tensors (of any kind) that hold the entry's storage, without our own references."""
        block = self._blocks[entry.tensor.untyped_storage().data_ptr()]
        count: int = torch._C._storage_Use_Count(block.storage._cdata)
        return count - 1  # the storage object in our block


@torch.no_grad()
def rebind(entries: list[Entry], views: list[torch.Tensor | None]) -> None:
    """Point every tensor object of each entry at its new view."""
    for entry, view in zip(entries, views, strict=True):
        if view is not None:
            for tensor in entry.objects:
                tensor.data = view
