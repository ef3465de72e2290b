"""Arrays on the engine's side, and memory that shows when it is read or written wrongly."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

import cupyflash

Array = Any
_ALIGNMENT = 16  # bytes; memory of a GPU is aligned to more
ON_HOST = {"numpy"}  # engines that work on NumPy arrays; tests/emulator adds to them


def to_engine(engine: str, x: Any) -> Any:
    """`x` where the engine runs; a device copy has the same strides and the same gaps."""
    if engine in ON_HOST or x is None:
        return x
    if isinstance(x, cupyflash.BlockMask):
        blocks, mask = (to_engine(engine, y) for y in (x.blocks, x.mask))
        return cupyflash.BlockMask(blocks, block_size=x.block_size, mask=mask)
    if isinstance(x, cupyflash.ScoreMod):
        params = {name: to_engine(engine, value) for name, value in x.params.items()}
        return cupyflash.ScoreMod(x.forward, x.backward, params)
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype == ml_dtypes.float8_e4m3fn:
        x = x.view(np.uint8)  # as on a GPU
    import cupy

    if x.size == 0:
        return cupy.empty(x.shape, x.dtype)
    first, end = np.lib.array_utils.byte_bounds(x)
    memory = np.frombuffer((ctypes.c_char * (end - first)).from_address(first), "u1")
    pointer = cupy.asarray(memory).data + (x.__array_interface__["data"][0] - first)
    return cupy.ndarray(x.shape, x.dtype, memptr=pointer, strides=x.strides)


def to_host(x: Any) -> Any:
    """`x` as a NumPy array (dicts: of them)."""
    if isinstance(x, dict):
        return {name: to_host(value) for name, value in x.items()}
    return x.get() if hasattr(x, "get") else x


# --- hostile memory -----------------------------------------------------------------------------


def fill_nan(x: Array) -> Array:
    """`x`, every float of it NaN."""
    if x.dtype.kind != "b" and x.dtype.kind not in "iu":
        x.fill(np.nan)
    return x


@contextmanager
def poisoned(engine: str) -> Iterator[None]:
    """Uninitialised memory that the package gets in this context is full of NaN."""
    if engine in ON_HOST:
        empty, empty_like = np.empty, np.empty_like
        with (
            mock.patch.object(np, "empty", lambda *a, **k: fill_nan(empty(*a, **k))),
            mock.patch.object(np, "empty_like", lambda *a, **k: fill_nan(empty_like(*a, **k))),
        ):
            yield
        return
    import cupy

    def allocate(size: int) -> Any:
        memory = cupy.get_default_memory_pool().malloc(size)
        if size:
            memory.memset_async(0xFF, size)  # NaN in every float dtype
        return memory

    with cupy.cuda.using_allocator(allocate):
        yield


class Guarded:
    """An ``out=`` view inside a larger buffer of random bytes, which must keep all others.

    `strides` is "dense", "gaps" (between rows and between elements), "reversed" or "transposed".
    """

    KINDS = ("dense", "gaps", "reversed", "transposed")

    def __init__(self, engine: str, shape: tuple[int, ...], dtype: Any, kind: str, rng: Any):
        margin, step = 3, 2 if kind == "gaps" else 1
        order = tuple(range(len(shape)))[:: -1 if kind == "transposed" else 1]
        cuts = tuple(slice(margin, margin + step * shape[axis], step) for axis in order)
        if kind == "reversed":
            cuts = (slice(-1 - margin, margin - 1, -1),) * len(shape)

        lengths = tuple(step * shape[axis] + 2 * margin for axis in order)
        self._lay_out(engine, lengths, lambda buffer: buffer[cuts].transpose(order), dtype, rng)
        assert self.view.shape == shape

    @classmethod
    def inside(
        cls, engine: str, lengths: tuple[int, ...], view: Callable[[Array], Array], dtype: Any,
        rng: Any,
    ) -> Guarded:  # fmt: skip
        """The view that `view` takes of a buffer, which starts at a multiple of 16 bytes."""
        guarded = cls.__new__(cls)
        guarded._lay_out(engine, lengths, view, dtype, rng)
        return guarded

    def _lay_out(
        self, engine: str, lengths: tuple[int, ...], view: Callable[[Array], Array], dtype: Any,
        rng: Any,
    ) -> None:  # fmt: skip
        memory = np.zeros(math.prod(lengths) * np.dtype(dtype).itemsize + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        as_bytes = memory[start : memory.size - _ALIGNMENT + start]
        as_bytes[...] = rng.integers(1, 120, as_bytes.shape)
        buffer = as_bytes.view(dtype).reshape(lengths)
        self._before, self._outside = buffer.copy(), np.ones(buffer.shape, bool)
        view(self._outside)[...] = False
        self._buffer = to_engine(engine, buffer)
        self.view = view(self._buffer)

    def assert_rest_unchanged(self) -> None:
        self._assert_equal(self._outside, "bytes around out= changed")

    def assert_unchanged(self) -> None:
        self._assert_equal(np.ones_like(self._outside), "bytes of a rejected call changed")

    def _assert_equal(self, where: Array, message: str) -> None:
        after = np.ascontiguousarray(to_host(self._buffer))
        same = (after.view(np.uint8) == self._before.view(np.uint8)).reshape(
            *after.shape, after.itemsize
        )
        assert same.all(axis=-1)[where].all(), message
