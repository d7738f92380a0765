"""What the README shows is run: Python blocks as they stand, commands down to each option they name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
SHELL = {"sh", "bash", "shell", "console"}
DEADLINE_S = 100.0


def blocks(language: set[str]) -> list[tuple[int, str]]:
    """Fenced blocks with their line numbers; the language is the first word behind the fence."""
    text = README.read_text() if README.exists() else ""
    found = []
    for match in re.finditer(r"^```(\w+)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if match[1] in language:
            found.append((text.count("\n", 0, match.start()) + 1, match[2]))
    return found


def commands() -> list[tuple[str, list[str]]]:
    """Lines of shell blocks, without prompts, comments and what they print, continued lines joined."""
    found = []
    for line_number, block in blocks(SHELL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words and words[0] in {"weightsync", "make"}:
                found.append((f"line {line_number}: {' '.join(words)}", words))
    return found


def run(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_the_readme_shows_both_ways_in() -> None:
    assert blocks({"python"}), "no ```python block in the README"
    assert {words[0] for _, words in commands()} == {"weightsync", "make"}


@pytest.mark.parametrize(("line", "source"), blocks({"python"}), ids=lambda value: f"line{value}"[:12])
def test_a_python_block_runs(line: int, source: str, tmp_path: Path) -> None:
    done = run(sys.executable, "-W", "error", "-c", source, cwd=tmp_path)
    assert done.returncode == 0, f"README.md:{line}\n{source}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    ("label", "words"), commands(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_command_and_its_options_exist(label: str, words: list[str]) -> None:
    if words[0] == "make":
        arguments = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        for target in arguments:
            assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), label
        passed_on = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
        if arguments != ["demo"] or not passed_on:
            return
        words = ["weightsync", "demo", *shlex.split(passed_on[0])]
    path = []
    for word in words[1:3]:
        if word.startswith("-") or (path and path[0] != "keys"):
            break
        path.append(word)
    shown = run(sys.executable, "-m", "weightsync.cli", *path, "--help", cwd=ROOT)
    assert shown.returncode == 0, f"{label}\n{shown.stderr}"
    for option in (word.partition("=")[0] for word in words[1:] if word.startswith("--")):
        assert re.search(rf"{re.escape(option)}\b", shown.stdout), (
            f"{label}: no option {option}\n{shown.stdout}"
        )
