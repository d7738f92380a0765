"""The pause of a swap, and what a step costs when nothing is pending."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import weightsync as ws
from benchmarks.shapes import llama_like, make_state, many_small, one_large, size_of
from weightsync.tensors import find_tensors
from weightsync.versioning.swap.modes import MODES

SWAPS = 200


@pytest.mark.benchmark(group="swap pause, remap")
@pytest.mark.parametrize("model", ["1GiB-147-tensors", "4GiB-1-tensor", "40MiB-10000-tensors"])
def test_pause_of_remap(benchmark, model):
    shapes = {
        "1GiB-147-tensors": llama_like(),
        "4GiB-1-tensor": one_large(4 << 30),
        "40MiB-10000-tensors": many_small(),
    }[model]
    state = make_state(shapes)
    size = size_of(state)
    mode = MODES["remap"](find_tensors(state), {}, 2, 2)
    mode.bind({}, [])
    first = next(iter(state.values())).view(torch.int16).flatten()
    times = []
    for swap in range(SWAPS):
        first[:64] = swap % 2
        started = time.perf_counter()
        mode.activate(1 - swap % 2)
        times.append(time.perf_counter() - started)
    benchmark.pedantic(lambda: (mode.activate(1), mode.activate(0)), rounds=20)
    mode.close()
    benchmark.extra_info.update(
        bytes=size, tensors=len(shapes), pause_p50_us=float(np.median(times)) * 1e6,
        pause_p99_us=float(np.quantile(times, 0.99)) * 1e6,
    )  # fmt: skip


@pytest.mark.benchmark(group="step")
def test_step_without_a_pending_version(benchmark):
    state = make_state({"w": (64, 64)}, seed=1)
    with ws.Publisher("ipc://@weightsync-bench-step") as publisher:
        publisher.register(state)
        publisher.publish()
        with ws.Subscriber(publisher.address, make_state({"w": (64, 64)})) as subscriber:
            subscriber.wait_for(1)

            def step():
                with subscriber.step():
                    pass

            benchmark(step)
