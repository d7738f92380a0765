"""Orders of a coordinator that would lead out of a slot or a tensor are refused, whatever they say."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.wire.scene import EPOCH
from tests.wire.test_plan import CATALOGUE, MATCHES, VALID, WANTS, raw
from weightsync.errors import ProtocolError
from weightsync.publisher.staging import Staging
from weightsync.tensors import find_tensors
from weightsync.types import Box, Shard
from weightsync.wire import messages as m
from weightsync.wire.arrangement import Arrangement
from weightsync.wire.layout import Catalogue, TensorSpec


def test_a_box_with_padding_other_than_0_1_is_refused():
    flat = Catalogue((TensorSpec("a", "int8", (4, 6)), TensorSpec("c", "int16", (5,))), {})
    with pytest.raises(ProtocolError):
        raw(1, [1, 0], [4, 0]).columns(flat)


def test_an_offset_from_which_a_move_reaches_over_the_end_of_all_numbers_is_refused():
    offset = VALID.offset.copy()
    offset[0] = 2**63 - 32
    with pytest.raises(ProtocolError):
        plan = replace(VALID, offset=offset).make(CATALOGUE, WANTS, MATCHES)
        assert (plan.ends() > 0).all(), plan.ends()


def staging_of(tensors):
    staging = Staging(find_tensors(tensors), slots=1, wire_dtype=None, threads=1)
    return staging, Arrangement([staging.layout], ["h"]).stage(EPOCH, 0)


@pytest.mark.parametrize("offset", [2**63 - 32, 2**64 - 4096], ids=["beyond the slot", "negative"])
def test_a_stage_order_outside_its_slot_is_refused(offset):
    staging, order = staging_of({"a": torch.ones(4, 6), "c": torch.ones(5)})
    bad = m.Stage(EPOCH, order.boxes, np.array([0, offset], "<u8").tobytes(), order.parents)
    with pytest.raises(ProtocolError):
        try:
            staging.follow(bad)
        finally:
            staging.close()


def test_a_stage_order_outside_of_the_shard_is_refused():
    staging = Staging(
        find_tensors([Shard("a", Box((0, 0), (2, 6)), torch.ones(2, 6), (4, 6))]),
        slots=1,
        wire_dtype=None,
        threads=1,
    )
    order = Arrangement([staging.layout], ["h"]).stage(EPOCH, 0)
    bad = m.Stage(EPOCH, raw(0, [2, 0], [4, 6]), order.offsets, order.parents)
    with pytest.raises(ProtocolError):
        try:
            staging.follow(bad)
        finally:
            staging.close()


@pytest.mark.parametrize("origin", [9, 1])
def test_an_order_to_make_cells_out_of_others_is_refused(origin):
    staging = Staging(
        find_tensors({"a": torch.ones(4, 6), "c": torch.ones(5)}), slots=1, wire_dtype=None, threads=1
    )
    arrangement = Arrangement([staging.layout], ["h"])
    staging.follow(arrangement.stage(EPOCH, 0))
    staging.headers.open(0, 1)
    staging.stage(0, 1)
    arrangement.want(raw(0, [0, 0], [4, 2]), "h")
    assert arrangement.arrange(keep=True)
    staging.follow(arrangement.stage(EPOCH, 0))
    order = arrangement.extend(EPOCH, 0, version=1, slot=0, generation=1, first=2)
    bad = m.Extend(EPOCH, 1, 0, 1, 2, np.array([origin], "<u4").tobytes())
    with pytest.raises(ProtocolError):
        staging.extend(bad)
    assert staging.extend(order) is not None
    staging.close()
