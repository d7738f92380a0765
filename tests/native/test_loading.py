"""WEIGHTSYNC_NATIVE: at import which twin is taken, at build time whether a failure ends it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_CORE = "import sys; sys.modules['weightsync._native._core'] = None; "
ASK = "from weightsync import _native; print(_native.IS_NATIVE, _native.Program.__module__)"


def python(code: str, mode: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "WEIGHTSYNC_NATIVE": mode}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_off_takes_the_pure_twin() -> None:
    assert python(ASK, "off").stdout.split() == ["False", "weightsync._native.pure"]


def test_auto_takes_the_pure_twin_where_there_is_no_core() -> None:
    assert python(NO_CORE + ASK, "auto").stdout.split() == ["False", "weightsync._native.pure"]


@pytest.mark.usefixtures("compiled")
def test_auto_and_require_take_the_core() -> None:
    for mode in ("auto", "require"):
        assert python(ASK, mode).stdout.split() == ["True", "weightsync._native._core"]


def test_require_without_a_core_is_an_error_that_says_how_to_get_it() -> None:
    done = python(NO_CORE + ASK, "require")
    assert done.returncode != 0
    assert "Build it with g++ by WEIGHTSYNC_NATIVE=require pip install" in done.stderr


def test_another_value_is_an_error() -> None:
    assert "WEIGHTSYNC_NATIVE is 'yes'; expected auto, require or off" in python(ASK, "yes").stderr


@pytest.mark.parametrize(("mode", "is_error"), [("auto", False), ("require", True), ("off", False)])
def test_a_compiler_that_fails_ends_only_a_build_that_was_asked_for(
    tmp_path: Path, mode: str, is_error: bool
) -> None:
    pytest.importorskip("pybind11")
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc", ignore=shutil.ignore_patterns("build"))
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "README.md").touch()
    env = {**os.environ, "WEIGHTSYNC_NATIVE": mode, "CC": "false", "CXX": "false"}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode != 0) == is_error, done.stderr
    assert ("THE NATIVE CORE COULD NOT BE BUILT" in done.stderr) == (mode == "auto")
