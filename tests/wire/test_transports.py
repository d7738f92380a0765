"""The built-in transports pass the shipped conformance suite."""

import pytest

from weightsync.testing.transport_conformance import TransportConformance


class TestShm(TransportConformance):
    name = "shm"


class TestZmq(TransportConformance):
    name = "zmq"


class TestNixl(TransportConformance):
    name = "nixl"

    @pytest.fixture(autouse=True)
    def _needs_nixl(self) -> None:
        pytest.importorskip("nixl", reason="the package nixl is not installed")
