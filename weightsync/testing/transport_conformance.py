"""What every transport must do. Use it in a test module of your own:

from weightsync.testing.transport_conformance import TransportConformance

class TestMine(TransportConformance):
    name = "mine"
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from weightsync.config import HUGE_PAGE
from weightsync.errors import EvictedError, SyncTimeoutError, TransportError
from weightsync.publisher.staging import Staging
from weightsync.segment import Segment
from weightsync.tensors import find_tensors
from weightsync.types import Box
from weightsync.wire.arrangement import Arrangement
from weightsync.wire.plan import Plan, Want, make_plan, match_names
from weightsync.wire.registry import make_exporter, make_reader
from weightsync.wire.transport import Environment, Exporter, Reader, ReadJob

_TIMEOUT_S = 5.0


@dataclass
class _Bench:
    """Both ends of one transport in one process, a staged model, and a place to receive it."""

    staging: Staging
    exporter: Exporter
    reader: Reader
    plan: Plan
    target: np.ndarray
    places: np.ndarray
    arrangement: Arrangement
    target_number: int
    moves: Any
    gone: list[str] = field(default_factory=list)

    def of_moves(self, staged: np.ndarray) -> np.ndarray:
        """From the digests of staged cells those that the plan's moves must have."""
        digests = self.arrangement.digests(self.target_number, [staged.astype(np.int64)])
        return np.frombuffer(digests, "<u8")

    def read(self, job: ReadJob) -> None:
        self.reader.read(self.moves, job)

    def job(self, *, slot: int = 0, generation: int = 1, timeout_s: float = _TIMEOUT_S) -> ReadJob:
        base = np.uint64(self.target.ctypes.data)
        return ReadJob(
            slot, generation, self.places[self.plan.wants] + base, np.zeros(len(self.places), np.uint64), timeout_s,
            ctypes.c_uint64(0), ctypes.c_uint32(0),
        )  # fmt: skip

    def stage(self, slot: int, generation: int) -> np.ndarray:
        self.staging.headers.open(slot, generation)
        return np.frombuffer(self.staging.stage(slot, generation), "<u8")

    def received(self) -> list[torch.Tensor]:
        """The tensors as they lie in the target, undoing the transposed placement."""
        tensors = []
        for place, spec in zip(self.places.tolist(), self.staging.layout.tensors, strict=True):
            dtype = getattr(torch, spec.dtype)
            size = int(np.prod(spec.shape)) * dtype.itemsize
            raw = torch.from_numpy(self.target[place : place + size]).view(dtype)
            tensors.append(raw.view(spec.shape[::-1]).permute(*reversed(range(len(spec.shape)))))
        return tensors


def _model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {
        "large": (700, 1500),
        "row": (3_000_001,),
        "matrix": (64, 48),
        "scalar": (1,),
        "cube": (5, 7, 3),
    }
    model = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    model["half"] = torch.randn((333, 257), generator=generator).to(torch.bfloat16)
    model["bytes"] = torch.randint(0, 255, (1 << 21,), generator=generator, dtype=torch.uint8)
    return model


class TransportConformance:
    """Set `name` to the transport's registered name."""

    name: str

    @pytest.fixture
    def model(self) -> dict[str, torch.Tensor]:
        return _model()

    @pytest.fixture
    def bench(self, model: dict[str, torch.Tensor]) -> Iterator[_Bench]:
        staging = Staging(find_tensors(model), slots=2, wire_dtype=None, threads=2)
        arrangement = Arrangement([staging.layout], ["here"])
        staging.follow(arrangement.stage(1, 0))
        gone: list[str] = []
        with zmq.Context() as context:
            exporter = make_exporter(
                self.name, Environment(context, None, "127.0.0.1", "publisher", 2, gone.append)
            )
            exporter.register(staging.slots, staging.header)
            reader = make_reader(
                self.name, Environment(None, None, "127.0.0.1", "reader", 2, lambda name: None)
            )
            reader.connect(exporter.export(), _TIMEOUT_S)
            # received tensors lie transposed, so that a transport must honour strides
            places: list[int] = []
            wants: list[Want] = []
            end = 0
            for spec in staging.layout.tensors:
                itemsize = getattr(torch, spec.dtype).itemsize
                strides = tuple(
                    int(itemsize * np.prod(spec.shape[:d], dtype=np.int64)) for d in range(len(spec.shape))
                )
                wants.append(Want((spec.name,), spec.dtype, spec.shape, Box.whole(spec.shape), strides))
                places.append(end)
                end += -(-int(np.prod(spec.shape)) * itemsize // 64) * 64
            matches = match_names(arrangement.catalogue, wants)
            number = arrangement.want(matches.boxes, "here")
            arrangement.arrange(keep=True)
            said = arrangement.plan(1, number)
            plan = make_plan(
                arrangement.catalogue, wants, matches, said.boxes, said.ranks, said.wants, said.offsets
            )
            moves = reader.prepare(plan)
            target = np.zeros(end, np.uint8)
            yield _Bench(
                staging,
                exporter,
                reader,
                plan,
                target,
                np.array(places, np.uint64),
                arrangement,
                number,
                moves,
                gone,
            )
            reader.close()
            exporter.close()
            staging.close()

    def test_every_byte_arrives_where_the_plan_says(
        self, bench: _Bench, model: dict[str, torch.Tensor]
    ) -> None:
        expected = bench.stage(0, 1)
        job = bench.job()
        bench.read(job)
        for got, want in zip(bench.received(), model.values(), strict=True):
            assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
        assert np.array_equal(job.digests, bench.of_moves(expected))

    def test_the_plan_is_replayed_for_every_version_and_slot(
        self, bench: _Bench, model: dict[str, torch.Tensor]
    ) -> None:
        for generation in range(1, 5):
            model["large"].add_(1.0)
            slot = generation % 2
            expected = bench.stage(slot, generation)
            job = bench.job(slot=slot, generation=generation)
            bench.read(job)
            assert np.array_equal(job.digests, bench.of_moves(expected))
        assert torch.equal(bench.received()[0], model["large"])

    def test_a_changed_byte_changes_its_digest_and_no_other(self, bench: _Bench) -> None:
        expected = bench.of_moves(bench.stage(0, 1))
        victim = 3
        bench.staging.slots[0].mapping.array[int(bench.plan.offsets[victim])] ^= 0x10
        job = bench.job()
        bench.read(job)
        assert np.flatnonzero(job.digests != expected).tolist() == [victim]

    def test_reading_follows_the_watermark_of_a_slot_that_is_still_being_staged(self, bench: _Bench) -> None:
        bench.staging.headers.open(0, 1)
        job = bench.job()
        reading = threading.Thread(target=bench.read, args=(job,))
        reading.start()
        reading.join(0.1)
        assert reading.is_alive()
        expected = np.frombuffer(bench.staging.stage(0, 1), "<u8")
        reading.join(_TIMEOUT_S)
        assert not reading.is_alive()
        assert np.array_equal(job.digests, bench.of_moves(expected))

    def test_reading_may_begin_before_the_slot_is_opened(
        self, bench: _Bench, model: dict[str, torch.Tensor]
    ) -> None:
        bench.stage(0, 1)
        model["large"].add_(1.0)
        job = bench.job(generation=2)
        reading = threading.Thread(target=bench.read, args=(job,))
        reading.start()
        reading.join(0.1)
        assert reading.is_alive()
        expected = bench.stage(0, 2)
        reading.join(_TIMEOUT_S)
        assert not reading.is_alive()
        assert np.array_equal(job.digests, bench.of_moves(expected))
        assert torch.equal(bench.received()[0], model["large"])

    def test_a_slot_that_is_never_opened_ends_in_a_timeout(self, bench: _Bench) -> None:
        bench.stage(0, 1)
        with pytest.raises(SyncTimeoutError):
            bench.read(bench.job(generation=2, timeout_s=0.3))

    def test_a_reused_slot_is_an_eviction(self, bench: _Bench) -> None:
        bench.stage(0, 2)
        with pytest.raises(EvictedError):
            bench.read(bench.job(generation=1))
        job = bench.job(generation=2)
        bench.read(job)  # the path still works

    def test_a_stalled_publisher_ends_in_a_timeout(self, bench: _Bench) -> None:
        bench.staging.headers.open(0, 1)
        with pytest.raises(SyncTimeoutError):
            bench.read(bench.job(timeout_s=0.3))

    def test_reading_can_be_stopped(self, bench: _Bench) -> None:
        bench.staging.headers.open(0, 1)
        job = bench.job(timeout_s=60.0)
        timer = threading.Timer(0.1, lambda: setattr(job.cancel, "value", 1))
        timer.start()
        with pytest.raises(TransportError):
            bench.read(job)
        timer.join()

    def test_progress_ends_at_all_bytes(self, bench: _Bench) -> None:
        bench.stage(0, 1)
        job = bench.job()
        bench.read(job)
        assert job.progress.value >= bench.plan.size_bytes

    def test_parts_of_a_plan_are_read_one_after_the_other(
        self, bench: _Bench, model: dict[str, torch.Tensor]
    ) -> None:
        expected = bench.of_moves(bench.stage(0, 1))
        odd = np.arange(len(expected)) % 2 == 1
        halves = [(some, bench.reader.prepare(bench.plan.only(some))) for some in (odd, ~odd)]
        for some, moves in halves:
            whole = bench.job()
            job = dataclasses.replace(
                whole, destinations=whole.destinations[some], digests=np.zeros(int(some.sum()), np.uint64)
            )
            bench.reader.read(moves, job)
            assert np.array_equal(job.digests, expected[some])
        for got, want in zip(bench.received(), model.values(), strict=True):
            assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))

    def test_a_wrong_token_gets_nothing(self, bench: _Bench) -> None:
        reader = make_reader(self.name, Environment(None, None, "127.0.0.1", "thief", 1, lambda name: None))
        with pytest.raises(TransportError):
            reader.connect({**bench.exporter.export(), "token": "00" * 16}, 0.5)
        reader.close()

    def test_an_offer_that_can_not_be_read_is_a_transport_error(self, bench: _Bench) -> None:
        reader = make_reader(
            self.name, Environment(None, None, "127.0.0.1", "reader-2", 1, lambda name: None)
        )
        with pytest.raises(TransportError):
            reader.connect({key: "?" for key in bench.exporter.export()}, 0.5)
        reader.close()

    def test_closing_twice_is_legal_on_both_ends(self, bench: _Bench) -> None:
        for _ in range(2):
            bench.reader.close()
            bench.exporter.close()

    def test_mapped_slots_are_read_only_and_hold_the_same_bytes(self, bench: _Bench) -> None:
        if not bench.reader.caps.maps_slots:
            with pytest.raises(TransportError):
                bench.reader.slot_segments(HUGE_PAGE)
            return
        bench.stage(1, 1)
        segments: list[Segment] = bench.reader.slot_segments(HUGE_PAGE)
        mapping = segments[1].map(writable=False)
        assert mapping.size % HUGE_PAGE == 0
        assert np.array_equal(mapping.array[:4096], bench.staging.slots[1].mapping.array[:4096])
        with pytest.raises(Exception, match=r"ermission|Operation not permitted"):
            segments[1].map(writable=True)
        mapping.close()
