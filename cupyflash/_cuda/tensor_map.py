"""Descriptions of arrays for the copy engine: ``CUtensorMap``, encoded by the driver.

Encoding takes 12 microseconds, too much for every call, so a description is made once for a shape
and moved to each call's array. Where its address stands is not documented: it is found by
comparing two descriptions, and checked with a third one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from cupyflash.errors import UnsupportedError

__all__ = ["ALIGNMENT", "BYTES", "MAX_STRIDE", "address_offset", "encode", "is_legal_stride"]

BYTES = 128
ALIGNMENT = 64
MAX_STRIDE = 2**40 - 1
_STRIDE_STEP = 16
# From cuda.h.
_DTYPES = {"float8_e4m3fn": 0, "float16": 6, "bfloat16": 9}  # FP8 as uint8
_INTERLEAVE_NONE = 0
_SWIZZLE_128_BYTES = 3
_PROMOTE_TO_256_BYTES = 3
_FILL_WITH_ZEROS = 0


def is_legal_stride(stride: int) -> bool:
    """Return whether an axis of several elements may have this stride, in bytes."""
    return 0 < stride <= MAX_STRIDE and stride % _STRIDE_STEP == 0


@cache
def _encoder() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32),
        ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    return function


def encode(
    dtype: str, address: int, lengths: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> bytes:
    """Return the map of an array whose boxes are copied in panels of rows of 128 bytes.

    Parameters
    ----------
    dtype : str
        ``"float16"``, ``"bfloat16"`` or ``"float8_e4m3fn"``.
    address : int
        Of the first element, a multiple of 16.
    lengths : sequence of int
        Of each axis, the one with neighbouring elements first.
    strides : sequence of int
        In bytes, of all axes but the first: positive multiples of 16.
    box : sequence of int
        Lengths of what one instruction copies.
    """
    rank = len(lengths)
    memory = ctypes.create_string_buffer(BYTES + ALIGNMENT)
    start = -ctypes.addressof(memory) % ALIGNMENT
    status = _encoder()(
        ctypes.addressof(memory) + start,
        _DTYPES[dtype],
        rank,
        address,
        (ctypes.c_uint64 * rank)(*lengths),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _INTERLEAVE_NONE,
        _SWIZZLE_128_BYTES,
        _PROMOTE_TO_256_BYTES,
        _FILL_WITH_ZEROS,
    )
    if status != 0:
        raise UnsupportedError(
            f"cuTensorMapEncodeTiled failed with error {status}:"
            f" {dtype}, address {address}, lengths {lengths}, strides {strides}, box {box}"
        )
    return memory.raw[start : start + BYTES]


@cache
def address_offset() -> int:
    """Return where a description holds the array's address, as 8 bytes.

    Raises
    ------
    UnsupportedError
        This driver's descriptions hold it in no such way.
    """
    addresses = (0x7F12_3456_7000, 0x7ABC_DEF0_1230, 0x10)
    maps = [encode("float16", address, (64, 64), (128,), (64, 64)) for address in addresses]
    for offset in range(0, BYTES, 8):
        if all(
            map_[offset : offset + 8] == address.to_bytes(8, "little")
            and map_[:offset] + map_[offset + 8 :] == maps[0][:offset] + maps[0][offset + 8 :]
            for map_, address in zip(maps, addresses, strict=True)
        ):
            return offset
    raise UnsupportedError("engine='wgmma' does not know this driver's tensor maps")
