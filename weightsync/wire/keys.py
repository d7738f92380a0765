"""CURVE keys of a fleet: a folder that says who may publish and who may read.

    DIR/publisher.key          public key of the publisher      copy to subscribers
    DIR/publisher.key_secret   its secret                       stays with the publisher
    DIR/subscriber.key         public key of the subscribers    copy to the publisher
    DIR/subscriber.key_secret  their secret                     stays with the subscribers

Every other `NAME.key` in the folder of the publisher is a subscriber that may connect too.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth

from weightsync.errors import ConfigError

PUBLISHER = "publisher"
SUBSCRIBER = "subscriber"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys one side uses: its own pair, the publisher's public key, and (publisher) who may connect."""

    public: bytes
    secret: bytes
    publisher: bytes
    allowed: frozenset[bytes] = frozenset()

    def protect_server(self, socket: zmq.Socket[Any]) -> None:
        """Make a binding socket prove who it is, encrypt, and (where its context has an authenticator) accept only peers that
        are allowed. Call before bind."""
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_server = True
        socket.zap_domain = b"weightsync"

    def protect_client(self, socket: zmq.Socket[Any], server: bytes | None = None) -> None:
        """Make a connecting socket prove who it is and check who answers: `server`, by default the publisher. Call before
        connect."""
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_serverkey = server or self.publisher


def new_keys(directory: str | os.PathLike[str]) -> list[Path]:
    """Make the publisher's and the subscribers' key pairs. Raises ConfigError if there are keys already."""
    folder = Path(directory)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return [path for name in (PUBLISHER, SUBSCRIBER) for path in _write_pair(folder, name)]


def add_subscriber(directory: str | os.PathLike[str], name: str) -> list[Path]:
    """Make one more subscriber pair, so that it can be withdrawn alone by deleting its `.key` at the publisher."""
    folder = Path(directory)
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"{name!r}: use letters, digits, - and _ for a key's name")
    if not (folder / f"{PUBLISHER}.key").exists():
        raise ConfigError(f"{folder} holds no keys yet; make them with `weightsync keys new {folder}`")
    return _write_pair(folder, name)


def load_publisher_keys(directory: str | os.PathLike[str]) -> Keys:
    """The publisher's side of a key folder."""
    folder = Path(directory)
    public, secret = _load_secret(folder, PUBLISHER)
    allowed = frozenset(_load_public(path) for path in sorted(folder.glob("*.key")))
    return Keys(public, secret, public, allowed)


def load_subscriber_keys(directory: str | os.PathLike[str], name: str = SUBSCRIBER) -> Keys:
    """A subscriber's side of a key folder."""
    folder = Path(directory)
    public, secret = _load_secret(folder, name)
    return Keys(public, secret, _load_public(folder / f"{PUBLISHER}.key"))


def _write_pair(folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}.key", folder / f"{name}.key_secret"]
    taken = [str(path) for path in paths if path.exists()]
    if taken:
        raise ConfigError(
            f"{', '.join(taken)} exists already; keys are never overwritten, choose another folder"
        )
    public, secret = zmq.curve_keypair()
    with contextlib.ExitStack() as undo:
        for path, mode, lines in (
            (paths[0], 0o644, f'curve\n    public-key = "{public.decode()}"\n'),
            (
                paths[1],
                0o600,
                f'curve\n    public-key = "{public.decode()}"\n    secret-key = "{secret.decode()}"\n',
            ),
        ):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            undo.callback(path.unlink, missing_ok=True)
            with os.fdopen(fd, "w") as file:
                file.write(lines)
        undo.pop_all()
    return paths


def _load_secret(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}.key_secret"
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path} can be read by other users; run `chmod 600 {path}`")
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no secret key at {path} ({error}); make keys with `weightsync keys new {folder}`"
        ) from error
    if secret is None:
        raise ConfigError(f"{path} holds no secret key")
    return public, secret


def _load_public(path: Path) -> bytes:
    try:
        public, _ = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no public key at {path}: {error}") from error
    return public
