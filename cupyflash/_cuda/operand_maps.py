"""The operands of a call as the copy engine is told of them: a tensor map for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyflash._cuda import tensor_map
from cupyflash._cuda.arguments import Strides
from cupyflash._cuda.launch import Moved
from cupyflash._cuda.params import ITEMSIZE

__all__ = ["MappedOperand", "is_mappable", "write_maps"]

_PANEL_BYTES = 128  # of a row of a box


class MappedOperand(NamedTuple):
    """``(b, s, h, d)`` of which rows [first, last) are read, and all others taken for 0.

    Or written, and all others left alone. A bias is ``(b, sq, h, sk)`` here.
    """

    name: str
    dtype: str
    strides: Strides  # in bytes
    batch: int
    first: int
    last: int
    heads: int
    dim: int
    box_rows: int  # that one instruction copies


def is_mappable(strides: Strides, lengths: tuple[int, int, int]) -> bool:
    """Return whether a map can describe an array whose strides are multiples of 16 bytes.

    `lengths` are those of batch, rows and heads.
    """
    pairs = zip(strides, lengths, strict=False)
    return all(length == 1 or 0 < stride <= tensor_map.MAX_STRIDE for stride, length in pairs)


def write_maps(params: npt.NDArray[np.void], operands: Iterable[MappedOperand]) -> list[Moved]:
    """Write each operand's description to the field ``<name>_map``, but for its address.

    Returns
    -------
    list of Moved
        Where a launch is to write the addresses.
    """
    offsets: Any = params.dtype.fields
    address_offset = tensor_map.address_offset()
    moved = []
    for each in operands:
        itemsize = ITEMSIZE[each.dtype]
        lengths = each.dim, each.last - each.first, each.heads, each.batch
        strides = _map_strides(lengths, each.strides, itemsize)
        box = _PANEL_BYTES // itemsize, each.box_rows, 1, 1
        map_ = tensor_map.encode(each.dtype, 0, lengths, strides, box)
        field = f"{each.name}_map"
        params[field] = np.void(map_)
        skipped = each.first * each.strides[1]
        moved.append(Moved(offsets[field][1] + address_offset, each.name, skipped))
    return moved


def _map_strides(lengths: tuple[int, ...], strides: Strides, itemsize: int) -> tuple[int, ...]:
    """Return the strides of rows, heads and batch; any legal one where there is nothing to add."""
    batch, row, head = strides[:3]
    legal = -(-lengths[0] * itemsize // 16) * 16
    pairs = zip(lengths[1:], (row, head, batch), strict=True)
    return tuple(legal if length == 1 else stride for length, stride in pairs)
