"""From the publish() call to live on a server in another process, next to a plain copy."""

from __future__ import annotations

import shutil
import subprocess
import time
from importlib.util import find_spec

import numpy as np
import pytest

import weightsync as ws
from benchmarks.peer import Peer
from benchmarks.raw_nixl import RawNixl
from benchmarks.shapes import change, llama_like, make_state, many_small, one_large, size_of
from benchmarks.yardstick import PlainCopyOf, record
from weightsync.wire.transports.zmq import STREAMS

ROUNDS = 9
needs_nixl = pytest.mark.skipif(not find_spec("nixl"), reason="the package nixl is not installed")


def measure(benchmark, shapes, *, rounds=ROUNDS, **options):
    """Publish `rounds` changed versions; each is timed next to one plain copy, and checked outside the timed part."""
    state = make_state(shapes, seed=1)
    size = size_of(state)
    copy = PlainCopyOf(state)
    times, stages, copies = [], [], []
    offered = ("shm", "zmq", "nixl") if options.get("transport") == "nixl" else None
    with ws.Publisher("tcp://127.0.0.1:0", transports=offered, timeout_s=60) as publisher:
        publisher.register(state)
        with Peer(publisher.address, shapes, **options) as peer:
            version = 0

            def prepare():
                nonlocal version
                version += 1
                change(state)
                peer.follow(version)
                time.sleep(0.02)
                copies.append(min(copy.seconds() for _ in range(2)))
                return (), {}

            def sync():
                started = time.perf_counter()
                ticket = publisher.publish()
                staged = time.perf_counter()
                ticket.wait("live", 60)
                times.append(time.perf_counter() - started)
                stages.append(staged - started)
                assert peer.arrived() == version

            def finish():
                if version in (1, rounds):
                    peer.assert_holds(state)

            def sync_and_check():
                sync()
                finish()

            benchmark.pedantic(sync_and_check, setup=prepare, rounds=rounds, iterations=1)
            pauses, reads, transport = peer.stats()
    times, stages, copies = times[1:], stages[1:], copies[1:]  # the first version warms both sides up
    record(
        benchmark, size, times, copies, tensors=len(shapes), transport=transport, stage_s=float(np.median(stages)),
        read_s=float(np.median(reads[1:])), pause_p50_us=float(np.median(pauses)) * 1e6,
        pause_p99_us=float(np.quantile(pauses, 0.99)) * 1e6,
    )  # fmt: skip
    return benchmark.extra_info


@pytest.mark.benchmark(group="sync 1 GiB, 147 tensors")
@pytest.mark.parametrize(
    "options",
    [
        {"swap": "remap"},
        {"swap": "adopt"},
        {"swap": "adopt", "verify": "full"},
        {"swap": "remap", "verify": "full"},
        {"swap": "copy"},
        {"swap": "flip"},
        {"swap": "remap", "transport": "zmq"},
        pytest.param({"swap": "remap", "transport": "nixl"}, marks=needs_nixl),
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_sync_of_a_gibibyte(benchmark, options):
    measure(benchmark, llama_like(), **options)


@pytest.mark.benchmark(group="sync 40 MiB")
@pytest.mark.parametrize("shape", ["10000x4KiB", "1x40MiB"])
def test_sync_of_many_small_tensors(benchmark, shape):
    shapes = many_small() if shape == "10000x4KiB" else one_large(10_000 * 4096)
    measure(benchmark, shapes, rounds=31)


@pytest.mark.skipif(shutil.which("iperf3") is None, reason="iperf3 is not installed")
@pytest.mark.benchmark(group="zmq against iperf3, loopback")
def test_zmq_against_iperf3_with_as_many_streams(benchmark):
    """Late joiners read a sealed slot: the transfer alone, verified, with iperf3 before each."""
    shapes = llama_like()
    state = make_state(shapes, seed=1)
    reads, limits = [], []
    with ws.Publisher("tcp://127.0.0.1:0", transports=("zmq",)) as publisher:
        publisher.register(state)
        publisher.publish()

        def join():
            with Peer(publisher.address, shapes) as peer:
                peer.follow(1)
                assert peer.arrived() == 1
                peer.assert_holds(state)
                reads.append(float(peer.stats()[1][0]))

        def limit():
            limits.append(iperf3_bytes_per_s(STREAMS) / 2**30)
            return (), {}

        benchmark.pedantic(join, setup=limit, rounds=5, iterations=1)
    speeds = size_of(state) / 2**30 / np.array(reads)
    benchmark.extra_info.update(
        bytes=size_of(state), read_gib_per_s=float(np.median(speeds)), iperf3_gib_per_s=float(np.median(limits)),
        of_iperf3=float(np.median(speeds / np.array(limits))), wrong=0,
    )  # fmt: skip


@needs_nixl
@pytest.mark.benchmark(group="nixl against its own engine")
def test_nixl_against_raw_nixl(benchmark):
    """Late joiners read a sealed slot, verified, next to bare READs of as many bytes between two agents."""
    shapes = llama_like()
    state = make_state(shapes, seed=1)
    reads, limits = [], []
    with ws.Publisher("tcp://127.0.0.1:0", transports=("nixl",)) as publisher, RawNixl(size_of(state)) as raw:
        publisher.register(state)
        publisher.publish()

        def join():
            with Peer(publisher.address, shapes, transport="nixl") as peer:
                peer.follow(1)
                assert peer.arrived() == 1
                peer.assert_holds(state)
                reads.append(float(peer.stats()[1][0]))

        def limit():
            limits.append(min(raw.read_seconds() for _ in range(3)))
            return (), {}

        benchmark.pedantic(join, setup=limit, rounds=5, iterations=1)
    benchmark.extra_info.update(
        bytes=size_of(state), read_s=float(np.median(reads)), raw_s=float(np.median(limits)),
        of_raw=float(np.median(np.array(limits) / np.array(reads))), wrong=0,
    )  # fmt: skip


def iperf3_bytes_per_s(streams: int) -> float:
    """What iperf3 moves over loopback with `streams` streams, in bytes per second."""
    import json

    port = "5299"
    server = subprocess.Popen(["iperf3", "-s", "-1", "-p", port], stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        client = subprocess.run(
            ["iperf3", "-c", "127.0.0.1", "-p", port, "-P", str(streams), "-t", "3", "-J"],
            capture_output=True, check=True, timeout=30,
        )  # fmt: skip
        server.wait(10)
    finally:
        server.kill()
    return float(json.loads(client.stdout)["end"]["sum_received"]["bits_per_second"]) / 8
