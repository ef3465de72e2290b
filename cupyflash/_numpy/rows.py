"""Working memory: rows in the accumulator's dtype, and tiles that are reused."""

from __future__ import annotations

import numpy as np

from cupyflash._problem import Array


class AccumulatorRows:
    """Rows ``(s, dim)`` of one head in the accumulator's dtype.

    Each row is converted when it is first asked for and then serves every tile and every query
    head of the group; rows of tiles that nobody visits are never read. Rows that BLAS takes as
    they are are not copied.
    """

    def __init__(self, source: Array, dtype: str) -> None:
        self._source = source
        direct = source.dtype == dtype and source.strides[-1] == source.itemsize
        self._rows = source if direct else np.empty(source.shape, dtype)
        self._ready = None if direct else np.zeros(len(source), bool)

    def __getitem__(self, rows: slice) -> Array:
        if self._ready is not None and not self._ready[rows].all():
            self._rows[rows] = self._source[rows]
            self._ready[rows] = True
        return self._rows[rows]


class Scratch:
    """Uninitialised tiles of one call, allocated once for each name."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Array] = {}

    def tile(self, name: str, shape: tuple[int, int]) -> Array:
        """A contiguous tile; the one handed out before under this name becomes invalid."""
        size = shape[0] * shape[1]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, self._dtype)
        return buffer[:size].reshape(shape)
