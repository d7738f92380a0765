"""Several hosts on one: network namespaces on a bridge, each with a link of limited rate. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_NETWORK = "10.77.0"


def why_not() -> str | None:
    """Why there can be no namespaces here."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    done = subprocess.run(["ip", "netns", "add", f"ws{os.getpid()}-try"], capture_output=True, text=True)
    if done.returncode:
        return f"no network namespaces here: {done.stderr.strip()}"
    _ip("netns", "del", f"ws{os.getpid()}-try")
    return None


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace; `address` is that of its one interface."""

    name: str
    address: str

    def command(self, *argv: str) -> list[str]:
        """What runs `argv` there, with a host name of its own."""
        inner = f'hostname {self.name} && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", inner, "sh", *argv]

    def bytes_out(self) -> int:
        """Sent by its interface so far."""
        argv = ["ip", "netns", "exec", self.name, "cat", "/sys/class/net/eth0/statistics/tx_bytes"]
        return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)

    def set_link(self, up: bool) -> None:
        """Pull or plug its cable."""
        _ip("-n", self.name, "link", "set", "eth0", "up" if up else "down")


@contextlib.contextmanager
def hosts(count: int, *, mbit: int | None = None) -> Iterator[list[Host]]:
    """`count` hosts on one switch; `mbit`: what each can send and receive per second."""
    ours = f"ws{os.getpid()}"  # interface names have 15 characters at most
    made = [Host(f"{ours}-{number}", f"{_NETWORK}.{number + 1}") for number in range(count)]
    with contextlib.ExitStack() as undo:
        _ip("link", "add", ours, "type", "bridge")
        undo.callback(_ip, "link", "del", ours)
        _ip("link", "set", ours, "up")
        for number, host in enumerate(made):
            cable = f"{ours}-{number}"
            _ip("netns", "add", host.name)
            undo.callback(_ip, "netns", "del", host.name)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", cable, "master", ours, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")
            if mbit is not None:
                limit = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
                _run("tc", "qdisc", "add", "dev", cable, *limit)
                _run("tc", "-n", host.name, "qdisc", "add", "dev", "eth0", *limit)
        yield made


def _ip(*argv: str) -> None:
    _run("ip", *argv)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
