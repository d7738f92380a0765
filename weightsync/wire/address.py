"""Addresses: what is allowed without keys, and who answers there."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from weightsync.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed control address: `tcp://host:port`, `ipc:///path` or `ipc://@abstract-name`."""

    text: str
    scheme: str
    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Only processes of this host can reach it."""
        if self.scheme == "ipc" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """Parse an address; raises ConfigError that shows the forms."""
    forms = "use tcp://host:port, ipc:///path/to/socket or ipc://@name"
    scheme, _, rest = text.partition("://")
    if scheme == "ipc" and rest:
        return Address(text, "ipc", rest, 0)
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"address {text!r} is not understood; {forms}")
    host = host.strip("[]")
    return Address(text, "tcp", "0.0.0.0" if host == "*" else host, int(port))


def require_safe(address: Address, *, has_keys: bool, insecure: bool) -> None:
    """Refuse an address that other hosts can reach unless there are keys or the user said `insecure=True`."""
    if address.is_local or has_keys or insecure:
        return
    raise ConfigError(
        f"{address.text}: other hosts can reach this address, so anyone could read or replace the weights; "
        "pass keys=DIR (make them with `weightsync keys new DIR`), or insecure=True on a trusted network"
    )


def host_towards(address: Address) -> str:
    """The address of this host's interface that leads there. Raises ConfigError."""
    if address.scheme != "tcp":
        return "127.0.0.1"
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address.host, address.port or 1))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"{address.text}: no interface leads there: {error}") from error
