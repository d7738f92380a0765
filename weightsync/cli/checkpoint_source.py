"""Read a checkpoint: a safetensors file, or a Hugging Face folder with an index or a single file.

Tensors are views of memory-mapped files, so nothing is read before it is published. Everything that is wrong
with a checkpoint is found before the first byte moves, and is told in one error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import ConfigError

if TYPE_CHECKING:
    import torch

INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(slots=True)
class CheckpointFiles:
    """What a path turned out to hold: tensor names by file, in file order, and everything that is wrong."""

    root: Path
    names: dict[Path, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def refuse_problems(self) -> None:
        if self.problems:
            listed = "".join(f"\n  - {problem}" for problem in self.problems)
            raise ConfigError(f"{self.root} can't be published:{listed}")


def open_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor by name, mapped and not yet read. Raises ConfigError that lists all problems."""
    from safetensors import safe_open

    files = inspect_checkpoint(path)
    files.refuse_problems()
    tensors = {}
    for file, names in files.names.items():
        with safe_open(str(file), framework="pt", device="cpu") as content:
            tensors.update({name: content.get_tensor(name) for name in names})
    return tensors


def inspect_checkpoint(path: Path) -> CheckpointFiles:
    """Find the files and read their headers. Problems are collected in the result, not raised."""
    found = CheckpointFiles(path)
    if path.name.endswith(INDEX_SUFFIX) and path.is_file():
        _read_indexed(found, path)
    elif path.is_dir():
        _read_folder(found, path)
    elif path.is_file():
        _read_headers(found, [path])
    else:
        found.problems.append("no such file or folder")
    if not found.problems and not any(found.names.values()):
        found.problems.append("holds no tensors")
    return found


def _read_folder(found: CheckpointFiles, folder: Path) -> None:
    indexes = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    files = sorted(folder.glob("*.safetensors"))
    if len(indexes) == 1:
        _read_indexed(found, indexes[0])
    elif indexes:
        found.problems.append(
            f"has {len(indexes)} indexes ({_join(indexes)}); give the path of the one to publish"
        )
    elif len(files) == 1:
        _read_headers(found, files)
    elif files:
        found.problems.append(f"has {len(files)} safetensors files ({_join(files)}) and no *{INDEX_SUFFIX}")
    else:
        others = sorted(p for p in folder.glob("*") if p.suffix in {".bin", ".pt", ".pth"})
        hint = f"; {_join(others)}: convert to safetensors first" if others else ""
        found.problems.append(f"has neither *{INDEX_SUFFIX} nor a *.safetensors file{hint}")


def _read_indexed(found: CheckpointFiles, index: Path) -> None:
    weight_map = _weight_map(found, index)
    wanted: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        wanted.setdefault(file, []).append(name)
    present = []
    for file, names in wanted.items():
        if file != Path(file).name:
            found.problems.append(f"{index.name}: {file!r} points out of the folder")
        elif not (index.parent / file).is_file():
            found.problems.append(f"{file}: missing; the index puts {len(names)} of the tensors there")
        else:
            present.append(index.parent / file)
    _read_headers(found, sorted(present))
    for path, names in found.names.items():
        promised = set(wanted[path.name])
        if missing := sorted(promised - set(names)):
            found.problems.append(
                f"{path.name}: lacks {len(missing)} of the tensors that the index puts there: {_join(missing)}"
            )
        unlisted = [name for name in names if name not in weight_map]
        if unlisted:
            found.problems.append(
                f"{path.name}: holds {len(unlisted)} of its tensors without the index knowing: {_join(unlisted)}"
            )


def _weight_map(found: CheckpointFiles, index: Path) -> dict[str, str]:
    try:
        document, duplicates = _parse_json(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        found.problems.append(f"{index.name}: not readable as JSON: {error}")
        return {}
    if duplicates:
        found.problems.append(
            f"{index.name}: names {len(duplicates)} of the tensors twice: {_join(duplicates)}"
        )
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        found.problems.append(f'{index.name}: has no "weight_map" from tensor names to file names')
        return {}
    return weight_map


def _read_headers(found: CheckpointFiles, files: list[Path]) -> None:
    from safetensors import SafetensorError, safe_open

    first_file: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt", device="cpu") as content:
                names = list(content.keys())
        except (SafetensorError, OSError) as error:
            found.problems.append(f"{file.name}: truncated, corrupt, or not a safetensors file: {error}")
            continue
        if doubled := _doubled_in_header(file):
            found.problems.append(
                f"{file.name}: its header names {len(doubled)} of the tensors twice: {_join(doubled)}"
            )
        found.names[file] = names
        by_other: dict[Path, list[str]] = {}
        for name in names:
            other = first_file.setdefault(name, file)
            if other != file:
                by_other.setdefault(other, []).append(name)
        for other, doubled in by_other.items():
            found.problems.append(
                f"{file.name}: shares {len(doubled)} of its tensors with {other.name}: {_join(doubled)}"
            )


def _doubled_in_header(file: Path) -> list[str]:
    # the parser that made sure that the header is sound keeps the last of equal names and says nothing
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        return _parse_json(content.read(size))[1]


def _parse_json(text: bytes) -> tuple[Any, list[str]]:
    """The document, and every key that stands twice in one object of it."""
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for key, value in pairs:
            if key in content:
                duplicates.append(key)
            content[key] = value
        return content

    return json.loads(text, object_pairs_hook=unique), duplicates


def _join(items: list[Path] | list[str]) -> str:
    return ", ".join(item.name if isinstance(item, Path) else item for item in items)
