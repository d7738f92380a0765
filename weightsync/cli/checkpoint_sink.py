"""Write tensors as a safetensors file or a sharded Hugging Face folder, completely or not at all.

Everything is written under temporary names beside the target, flushed to the disk, and only then renamed.
When the target is a folder in use, its old index goes first and the new one comes last, so that a reader may
find no index for a moment, but never one that mixes two versions.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync.cli.progress import size_text
from weightsync.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
HEADER_BYTES_PER_TENSOR = 512


class CheckpointSink:
    """Where a checkpoint will be: a file when `out` ends in .safetensors, a folder otherwise."""

    def __init__(self, out: Path, *, shard_bytes: int) -> None:
        self.out = out
        self.is_file = out.suffix == ".safetensors"
        self._shard_bytes = shard_bytes

    def refuse_existing(self, *, force: bool) -> None:
        """Raise ConfigError when the target can't be written, or may not be overwritten."""
        if not self.out.parent.is_dir():
            raise ConfigError(f"{self.out.parent}: no such folder; make it first")
        if not os.access(self._home(), os.W_OK | os.X_OK):
            raise ConfigError(f"{self._home()}: no permission to write there")
        if self.is_file and self.out.is_dir():
            raise ConfigError(
                f"{self.out} is a folder; give a file's name, or a folder's name without .safetensors"
            )
        if not self.is_file and self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"{self.out} is a file; a path that doesn't end in .safetensors makes a folder")
        there = [self.out] if self.is_file and self.out.exists() else self._old_weights()
        if there and not force:
            raise ConfigError(f"{there[0]} exists already; pass --force to replace it")

    def refuse_full_disk(self, size_bytes: int, tensors: int) -> None:
        """Raise CapacityError when the disk can't hold what is coming beside what is there."""
        needed = size_bytes + tensors * HEADER_BYTES_PER_TENSOR
        free = shutil.disk_usage(self._home()).free
        if needed > free:
            raise CapacityError(f"{self.out}: needs {size_text(needed)} of disk, {size_text(free)} are free")

    def write(self, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> list[Path]:
        """Write, flush, rename; returns the files. CapacityError and ConfigError leave nothing new behind."""
        try:
            return (
                self._write_file(tensors, metadata) if self.is_file else self._write_folder(tensors, metadata)
            )
        except OSError as error:
            raise ConfigError(f"{self.out}: can't write: {error.strerror or error}") from error

    def _home(self) -> Path:
        return self.out if self.out.is_dir() and not self.is_file else self.out.parent

    def _old_weights(self) -> list[Path]:
        return [*sorted(self.out.glob("*.safetensors.index.json")), *sorted(self.out.glob("*.safetensors"))]

    def _write_file(self, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> list[Path]:
        with _temporary_folder(self.out.parent, self.out.name) as temporary:
            written = temporary / self.out.name
            _save(tensors, written, metadata)
            os.replace(written, self.out)
            _flush_folder(self.out.parent)
        return [self.out]

    def _write_folder(self, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> list[Path]:
        shards = _named_shards(split_shards(tensors, self._shard_bytes))
        with _temporary_folder(self._home(), self.out.name) as temporary:
            for file, names in shards.items():
                _save({name: tensors[name] for name in names}, temporary / file, metadata)
            _save_index(temporary / INDEX, shards, tensors)
            _flush_folder(temporary)
            self._put_in_place(temporary, list(shards))
        return [self.out / INDEX, *(self.out / file for file in shards)]

    def _put_in_place(self, temporary: Path, files: list[str]) -> None:
        if not self.out.exists():
            temporary.chmod(0o777 & ~_umask())
            os.rename(temporary, self.out)
        else:
            for old in self._old_weights():
                old.unlink()
            _flush_folder(self.out)
            for file in [*files, INDEX]:
                os.replace(temporary / file, self.out / file)
            _flush_folder(self.out)
        _flush_folder(self.out.parent)


def split_shards(tensors: dict[str, torch.Tensor], shard_bytes: int) -> list[list[str]]:
    """Names in order, cut so that a shard exceeds `shard_bytes` only when it holds a single tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    return shards


def _named_shards(shards: list[list[str]]) -> dict[str, list[str]]:
    count = len(shards)
    return {f"model-{number:05d}-of-{count:05d}.safetensors": names for number, names in enumerate(shards, 1)}


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(_without_aliases(tensors), str(path), metadata=metadata)
    except SafetensorError as error:
        if shutil.disk_usage(path.parent).free < sum(tensor.nbytes for tensor in tensors.values()):
            raise CapacityError(f"{path.name}: the disk is full") from error
        raise ConfigError(f"{path.name}: can't write: {error}") from error
    path.chmod(0o666 & ~_umask())
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _without_aliases(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # safetensors refuses tensors that share memory, as tied weights do
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        shares = tensor.numel() > 0 and tensor.data_ptr() in seen
        separate[name] = tensor.clone() if shares else tensor.contiguous()
        seen.add(tensor.data_ptr())
    return separate


def _save_index(path: Path, shards: dict[str, list[str]], tensors: dict[str, torch.Tensor]) -> None:
    document = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    with path.open("w") as file:
        json.dump(document, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _temporary_folder(parent: Path, name: str) -> Iterator[Path]:
    """A folder on the target's own disk, removed on the way out unless it was renamed."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=parent))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
