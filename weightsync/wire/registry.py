"""Finding transports by name: ours and third parties', through the entry-point group `weightsync.transports`.

An entry point names a module with `EXPORTER` and `READER`, the two classes of that transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

from weightsync.errors import ConfigError
from weightsync.wire.transport import Environment, Exporter, Reader

_BUILT_IN = {name: f"weightsync.wire.transports.{name}" for name in ("shm", "nixl", "zmq")}
_PACKAGES = {"nixl": "nixl"}
LADDER = ("shm", "nixl", "zmq")
"""Order in which `auto` tries what is offered; transports of others come first, in the order of the offer."""


def transport_names() -> list[str]:
    """Every transport installed here."""
    built_in = [name for name in _BUILT_IN if name not in _PACKAGES or find_spec(_PACKAGES[name])]
    others = (point.name for point in entry_points(group="weightsync.transports"))
    return sorted({*built_in, *(name for name in others if name not in _BUILT_IN)})


def default_transports() -> tuple[str, ...]:
    """What a publisher offers unless told otherwise: nixl only where there is a NIC that it is made for."""
    is_for_nixl = "nixl" in transport_names() and import_module(_BUILT_IN["nixl"]).has_rdma()
    return ("shm", "nixl", "zmq") if is_for_nixl else ("shm", "zmq")


def make_exporter(name: str, environment: Environment) -> Exporter:
    """The publisher's end of transport `name`."""
    exporter: Exporter = import_module(_home(name)).EXPORTER(environment)
    return exporter


def make_reader(name: str, environment: Environment) -> Reader:
    """The subscriber's end of transport `name`."""
    reader: Reader = import_module(_home(name)).READER(environment)
    return reader


def ladder(offered: Sequence[str]) -> list[str]:
    """The order in which to try what a publisher offers."""
    known = [name for name in offered if name in transport_names()]
    return [name for name in known if name not in LADDER] + [name for name in LADDER if name in known]


def _home(name: str) -> str:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    for point in entry_points(group="weightsync.transports"):
        if point.name == name:
            return point.value
    raise ConfigError(f"no transport is called {name!r}; installed: {', '.join(transport_names())}")
