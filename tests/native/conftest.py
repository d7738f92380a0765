"""The compiled core and its pure twin: most tests here run on both."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def compiled() -> ModuleType:
    try:
        return importlib.import_module("weightsync._native._core")
    except ImportError:
        if os.environ.get("WEIGHTSYNC_NATIVE") == "require":
            raise
        pytest.skip("the native core is not built")


@pytest.fixture(scope="session")
def pure() -> ModuleType:
    return importlib.import_module("weightsync._native.pure")


@pytest.fixture(scope="session", params=["compiled", "pure"])
def core(request: pytest.FixtureRequest) -> ModuleType:
    twin: ModuleType = request.getfixturevalue(request.param)
    return twin
