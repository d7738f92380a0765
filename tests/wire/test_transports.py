"""Both built-in transports pass the shipped conformance suite."""

from weightsync.testing.transport_conformance import TransportConformance


class TestShm(TransportConformance):
    name = "shm"


class TestZmq(TransportConformance):
    name = "zmq"
