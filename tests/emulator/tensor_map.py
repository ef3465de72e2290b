"""In place of the driver's cuTensorMapEncodeTiled: a plain description, which copies.cpp reads."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

_SUCCESS, _INVALID_VALUE = 0, 1
_ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}  # CUtensorMapDataType
_SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}  # CUtensorMapSwizzle
_MOST_AXES = 5
_MARK = 0xA7
# TensorDescription of copies.h.
_LAYOUT = struct.Struct(f"<Q{_MOST_AXES - 1}Q{_MOST_AXES}I{_MOST_AXES}H4B")


def encode_tiled(
    target: int,
    dtype: int,
    rank: int,
    address: int,
    lengths: Any,
    strides: Any,
    box: Any,
    element_strides: Any,
    interleave: int,
    swizzle: int,
    promotion: int,
    fill: int,
) -> int:
    """Describe an array as the driver's function does, or return its error; lists are ctypes'."""
    item, swizzle_bytes = _ELEMENT_BYTES[dtype], _SWIZZLE_BYTES[swizzle]
    row_bytes = box[0] * item
    legal = (
        0 < rank <= _MOST_AXES
        and address % 16 == 0
        and all(0 < length <= 2**32 for length in lengths)
        and all(stride % 16 == 0 and 0 < stride < 2**40 for stride in strides)
        and all(0 < each <= 256 for each in box)
        and all(step == 1 for step in element_strides)
        and row_bytes % 16 == 0
        # Narrower rows are legal, but where they lie is not described.
        and (swizzle_bytes == 0 or row_bytes == swizzle_bytes)
        and interleave == fill == 0
    )
    if not legal:
        return _INVALID_VALUE

    def padded(values: Any, count: int) -> list[int]:
        return [*values, *[0] * (count - len(values))]

    description = _LAYOUT.pack(
        address,
        *padded(strides, _MOST_AXES - 1),
        *padded([min(length, 2**32 - 1) for length in lengths], _MOST_AXES),
        *padded(box, _MOST_AXES),
        rank,
        item,
        swizzle_bytes,
        _MARK,
    )
    ctypes.memmove(target, description.ljust(128, b"\0"), 128)
    return _SUCCESS
