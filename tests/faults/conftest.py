"""Each test gets processes that end with it, and leaves no thread behind."""

from __future__ import annotations

import pytest

from tests.processes import nothing_is_left, peer

__all__ = ["nothing_is_left", "peer"]

pytestmark = pytest.mark.usefixtures("nothing_is_left")
