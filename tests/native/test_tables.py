"""Tables, arrays and addresses that are wrong are refused, and the message says where."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.native.tables import row_of, u64
from weightsync._native import layout as col

BIG = 2**62


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (col.SRC_TYPE, 0),
        (col.SRC_TYPE, 5),
        (col.SRC_TYPE, 15),
        (col.SRC_TYPE, -1),
        (col.DST_TYPE, col.F32),  # raw to float
        (col.DST_TYPE, col.RAW64),
        (col.NDIM, -1),
        (col.NDIM, col.MAX_NDIM + 1),
        (col.SHAPE, -1),
        (col.SHAPE, BIG),
        (col.SHAPE, 2**63 - 1),
        (col.SRC_STRIDE, BIG),
        (col.DST_STRIDE, -(2**63)),
        (col.INDEX_STRIDE, BIG),
        (col.INDEX_STRIDE, -1),
        (col.INDEX, -1),
        (col.INDEX, 2**63 - 1),
        (col.OFFSET, -1),
        (col.OFFSET, 2**63 - 1),
    ],
)
def test_a_bad_row_is_named(core: ModuleType, column: int, value: int) -> None:
    table = np.stack([row_of(np.zeros(10, np.uint16))] * 3)
    table[1, column] = value
    with pytest.raises(ValueError, match=r"^row 1: "):
        core.Program(table)


def test_the_product_of_a_shape_may_not_overflow(core: ModuleType) -> None:
    row = row_of(np.zeros((2, 2, 2), np.uint16))
    row[col.SHAPE : col.SHAPE + 3] = 2**22
    row[col.SRC_STRIDE :] = 0
    with pytest.raises(ValueError, match=r"^row 0: "):
        core.Program(row[None])


@pytest.mark.parametrize(
    "table",
    [np.zeros(col.COLUMNS, np.int64), np.zeros((1, 37), np.int64), np.zeros((1, col.COLUMNS), np.int32)],
    ids=["flat", "narrow", "int32"],
)
def test_a_table_of_another_form_is_refused(core: ModuleType, table: np.ndarray) -> None:
    with pytest.raises(ValueError, match="moves: expected"):
        core.Program(table)


def test_a_table_may_be_a_strided_view(core: ModuleType) -> None:
    array = np.arange(10, dtype=np.uint16)
    wide = np.zeros((2, 2 * col.COLUMNS), np.int64)
    wide[:, ::2] = row_of(array)
    digests = u64(0, 0)
    assert core.Program(wide[:, ::2]).run(u64(array.ctypes.data, array.ctypes.data), None, digests) == col.OK
    assert digests[0] == digests[1] != 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("src", u64(0, 0)),
        ("src", np.zeros(1, np.int64)),
        ("dst", u64()),
        ("dst", np.zeros((1, 1), np.uint64)),
        ("digests", np.zeros(1, np.float64)),
        ("digests", np.zeros(2, np.uint64)),
        ("threads", 0),
        ("timeout_s", float("nan")),
    ],
)
def test_bad_arguments_of_a_run_are_refused(core: ModuleType, name: str, value: Any) -> None:
    array = np.zeros(10, np.uint16)
    arguments: dict[str, Any] = {"src": u64(array.ctypes.data), "dst": None, "digests": u64(0), name: value}
    with pytest.raises(ValueError, match=f"^{name}: "):
        core.Program(row_of(array)[None]).run(**arguments)


def test_digests_that_can_t_be_written_are_refused(core: ModuleType) -> None:
    array, digests = np.zeros(10, np.uint16), u64(0)
    digests.setflags(write=False)
    with pytest.raises(ValueError, match=r"^digests: the array is read-only"):
        core.Program(row_of(array)[None]).run(u64(array.ctypes.data), None, digests)


@pytest.mark.parametrize("name", ["progress", "follow", "cancel"])
def test_addresses_that_are_not_aligned_are_refused(core: ModuleType, name: str) -> None:
    array = np.zeros(10, np.uint64)
    where: dict[str, Any] = {name: array.ctypes.data + 1}
    with pytest.raises(ValueError, match=f"^{name}: "):
        core.Program(row_of(array)[None]).run(u64(array.ctypes.data), None, u64(0), **where)
