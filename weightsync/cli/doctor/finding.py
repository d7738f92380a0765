"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """`warn`: works, but slower or with less reach. `fail`: something of weightsync does not work here."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found; when it is not ok, also what that costs and how to mend it."""

    name: str
    state: State
    found: str
    cost: str = ""
    fix: str = ""
