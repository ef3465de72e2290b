"""Boxes of an array, in every swizzle and beyond every end: see boxes.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash._cuda import tensor_map

SOURCE = Path(__file__).with_name("boxes.cu").read_text("utf-8")
ENTRY, POINTERS = "box", ("image",)
THREADS, SHARED_MEMORY = 128, 96 << 10
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes of a row -> CUtensorMapSwizzle
_CHUNK = 16  # bytes: boxes begin at multiples, elsewhere is an illegal instruction
_ITEM = 2
_FLOAT16 = 6  # CUtensorMapDataType
PARAMS = np.dtype(
    {
        "names": ["map", "image", "at", "bytes"],
        "formats": ["V128", "u8", ("i4", 4), "i4"],
        "offsets": [0, 128, 136, 152],
        "itemsize": 192,
    }
)


def encode(address: int, shape: tuple[int, ...], box: tuple[int, ...], swizzle: int) -> bytes:
    """A map of a contiguous array; `box` in the order of `shape`."""
    rank = len(shape)
    strides = np.cumprod((*shape[:0:-1],))[: rank - 1] * _ITEM
    memory = ctypes.create_string_buffer(tensor_map.BYTES + tensor_map.ALIGNMENT)
    start = -ctypes.addressof(memory) % tensor_map.ALIGNMENT
    status = tensor_map._encoder()(
        ctypes.addressof(memory) + start, _FLOAT16, rank, address,
        (ctypes.c_uint64 * rank)(*shape[::-1]),
        (ctypes.c_uint64 * (rank - 1))(*map(int, strides)),
        (ctypes.c_uint32 * rank)(*box[::-1]),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0, SWIZZLES[swizzle], 0, 0,
    )  # fmt: skip
    assert status == 0
    return memory.raw[start : start + tensor_map.BYTES]


def check_boxes(
    rng: np.random.Generator,
    swizzle: int,
    place: Callable[[np.ndarray], tuple[Any, int]],
    run: Callable[[np.ndarray], np.ndarray],
) -> None:
    """`place` an array where boxes are copied from (and its address), `run` with parameters."""
    for _ in range(10):
        shape = (*map(int, rng.integers(1, 30, 3)), 8 * int(rng.integers(1, 20)))
        width = swizzle // _ITEM or 8 * int(rng.integers(1, 9))
        box = (*map(int, rng.integers(1, 3, 2)), int(rng.integers(1, 40)), width)
        steps = 1, 1, 1, _CHUNK // _ITEM
        at = [
            step * int(rng.integers(-size // step, length // step + 1))
            for size, length, step in zip(box, shape, steps, strict=True)
        ]
        values = rng.normal(size=shape).astype(np.float16)
        placed, address = place(values)

        expected = np.zeros(box, np.float16)
        index = np.indices(box) + np.reshape(at, (4, 1, 1, 1, 1))
        inside = ((index >= 0) & (index < np.reshape(shape, (4, 1, 1, 1, 1)))).all(axis=0)
        expected[inside] = values[tuple(index[:, inside])]
        byte = np.arange(expected.size) * _ITEM
        if swizzle:
            byte ^= (byte >> 7 & (swizzle // 16 - 1)) << 4
        image = np.empty(expected.size, np.float16)
        image[byte // _ITEM] = expected.ravel()

        params = np.zeros((), PARAMS)
        params["map"] = np.void(encode(address, shape, box, swizzle))
        params["at"], params["bytes"] = at[::-1], image.nbytes
        np.testing.assert_array_equal(run(params), image)
        del placed
