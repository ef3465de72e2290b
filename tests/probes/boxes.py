"""Boxes of an array, in every swizzle and beyond every end: see boxes.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyflash._cuda import tensor_map
from tests.memory import to_host

SOURCE = Path(__file__).with_name("boxes.cu").read_text("utf-8")
ENTRY, STORING_ENTRY, POINTERS = "box", "stored_box", ("image",)
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


class Box(NamedTuple):
    """A box of an array, and how shared memory holds it."""

    array: tuple[int, ...]
    lengths: tuple[int, ...]
    at: list[int]
    inside: np.ndarray  # which of its elements the array has
    index: tuple[np.ndarray, ...]  # where the array has these
    places: np.ndarray  # of its elements in shared memory


def draw_box(rng: np.random.Generator, swizzle: int, before: bool = True) -> Box:
    """A box that may begin before the array, if that is wanted, and end after it."""
    array = (*map(int, rng.integers(1, 30, 3)), 8 * int(rng.integers(1, 20)))
    width = swizzle // _ITEM or 8 * int(rng.integers(1, 9))
    lengths = (*map(int, rng.integers(1, 3, 2)), int(rng.integers(1, 40)), width)
    steps = 1, 1, 1, _CHUNK // _ITEM
    at = [
        step * int(rng.integers(-size // step if before else 0, length // step + 1))
        for size, length, step in zip(lengths, array, steps, strict=True)
    ]
    index = np.indices(lengths) + np.reshape(at, (4, 1, 1, 1, 1))
    inside = ((index >= 0) & (index < np.reshape(array, (4, 1, 1, 1, 1)))).all(axis=0)
    byte = np.arange(inside.size) * _ITEM
    if swizzle:
        byte ^= (byte >> 7 & (swizzle // 16 - 1)) << 4
    return Box(array, lengths, at, inside, tuple(index[:, inside]), byte // _ITEM)


def params_of(box: Box, address: int, swizzle: int) -> np.ndarray:
    """What the kernels are told of a box."""
    params = np.zeros((), PARAMS)
    params["map"] = np.void(encode(address, box.array, box.lengths, swizzle))
    params["at"], params["bytes"] = box.at[::-1], box.places.size * _ITEM
    return params


def check_boxes(
    rng: np.random.Generator,
    swizzle: int,
    place: Callable[[np.ndarray], tuple[Any, int]],
    run: Callable[[np.ndarray], np.ndarray],
) -> None:
    """`place` an array where boxes are copied from (and its address), `run` with parameters."""
    for _ in range(10):
        box = draw_box(rng, swizzle)
        values = rng.normal(size=box.array).astype(np.float16)
        placed, address = place(values)
        expected = np.zeros(box.lengths, np.float16)
        expected[box.inside] = values[box.index]
        image = np.empty(expected.size, np.float16)
        image[box.places] = expected.ravel()
        np.testing.assert_array_equal(run(params_of(box, address, swizzle)), image)
        del placed


def check_stored_boxes(
    rng: np.random.Generator,
    swizzle: int,
    place: Callable[[np.ndarray], tuple[Any, int]],
    run: Callable[[np.ndarray, np.ndarray], None],
) -> None:
    """`place` an array that boxes are copied to, `run` with parameters and the box's image.

    Emulated only: among boxes of all kinds were some that an H200 refused as illegal instructions,
    perhaps those that begin before their array. Kernels store no such box, in one swizzle.
    """
    for _ in range(10):
        box = draw_box(rng, swizzle, before=False)
        values, stored = (
            rng.normal(size=size).astype(np.float16) for size in (box.array, box.lengths)
        )
        placed, address = place(values.copy())
        image = np.empty(stored.size, np.float16)
        image[box.places] = stored.ravel()
        run(params_of(box, address, swizzle), image)
        values[box.index] = stored[box.inside]
        np.testing.assert_array_equal(to_host(placed), values)
