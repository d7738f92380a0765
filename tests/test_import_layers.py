"""Imports go publisher -> wire <- subscriber -> versioning; nobody imports a leaf."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weightsync

ROOT = Path(weightsync.__file__).parent
BASE = {"errors", "types", "config", "segment", "standing", "tensors", "moves", "_native"}
MAY_IMPORT: dict[str, set[str]] = {
    **{name: BASE for name in BASE},
    "observability": BASE,
    "wire": BASE | {"observability"},
    "versioning": BASE | {"observability"},
    "publisher": BASE | {"observability", "wire"},
    "subscriber": BASE | {"observability", "wire", "versioning"},
    "models": BASE | {"wire"},
    "simulate": BASE | {"wire", "models"},
    "integrations": BASE | {"observability", "wire", "versioning", "publisher", "subscriber"},
    "testing": BASE | {"observability", "wire", "versioning", "publisher", "subscriber"},
    "cli": BASE | {"observability", "wire", "versioning", "publisher", "subscriber", "models", "simulate"},
}
"""For each module or package of weightsync: which others it may import, at run time or for types alike."""


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imported_parts(source: str) -> Iterator[str]:
    """The first name below `weightsync` of every import, and `""` for the root itself."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "weightsync":
            names = [
                f"weightsync.{alias.name}" if alias.name in MAY_IMPORT else "weightsync"
                for alias in node.names
            ]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            head, _, rest = name.partition(".")
            if head == "weightsync":
                yield rest.partition(".")[0]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert part in MAY_IMPORT, f"{part} is new: say in MAY_IMPORT what it may import"
    allowed = MAY_IMPORT[part] | {part}
    if part in {"cli", "integrations", "testing"}:
        allowed = allowed | {""}  # leaves use the public names
    wrong = {name or "weightsync" for name in imported_parts(path.read_text()) if name not in allowed}
    assert not wrong, f"{path.relative_to(ROOT)} may not import {sorted(wrong)}"


def test_imports_are_absolute() -> None:
    relative = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative, "the layer test reads absolute imports only"


def test_the_layer_test_sees_every_form_of_import() -> None:
    source = """
import weightsync.wire.plan
from weightsync import Publisher, _native
from weightsync.publisher.ticket import Ticket
def later():
    from weightsync.cli import main
"""
    assert sorted(imported_parts(source)) == ["", "_native", "cli", "publisher", "wire"]


def loaded_after(statement: str, *names: str) -> list[str]:
    script = f"{statement}\nimport sys\nprint(*[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split("\n")[-2].split()


def test_importing_weightsync_loads_nothing_heavy() -> None:
    heavy = (
        "torch",
        "numpy",
        "zmq",
        "msgspec",
        "rich",
        "typer",
        "weightsync._native",
        "weightsync._native._core",
    )
    assert loaded_after("import weightsync", *heavy) == []
    assert loaded_after("import weightsync.types, torch", "torch") == ["torch"]


def test_the_command_line_starts_without_torch() -> None:
    statement = (
        "import sys; sys.argv = ['weightsync', '--help']\n"
        "from weightsync.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code"
    )
    assert loaded_after(statement, "torch", "numpy", "zmq", "safetensors", "weightsync._native", "typer") == [
        "typer"
    ]


def test_every_public_name_resolves() -> None:
    missing = [name for name in weightsync.__all__ if not hasattr(weightsync, name)]
    assert not missing
