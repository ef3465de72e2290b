"""Keys and values of a batch as one array of rows, which varlen attention reads."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupyflash._arrays import describe
from cupyflash._kvcache.bits import gathered
from cupyflash._kvcache.entries import Entries
from cupyflash._kvcache.storage import Storage
from cupyflash.errors import UnsupportedError

Array = Any


class Rows(NamedTuple):
    """Position p of entry e is row ``e * step + p`` of key ``(rows, hk, d)`` and of value."""

    key: Array
    value: Array
    step: int


_MOST_ROWS = 2**30 - 1  # whose numbers fit the int32 of cu_seqlens and kernels' indices


def require_rows(storage: Storage, entries: Entries, batch: int) -> None:
    """Check, before anything is written, that the rows which are attended to can be counted."""
    step = _step_of_views(storage)
    if step is None:
        rows, why = batch * entries.longest, "keys of the longest entry times the batch"
    else:
        rows, why = (len(storage.key) - 1) * step + storage.capacity, "rows that k_cache spans"
    if batch > 0 and rows > _MOST_ROWS:
        raise UnsupportedError(
            f"{rows} {why} are more than {_MOST_ROWS}: {describe(storage.key)}, "
            f"strides {tuple(storage.key.strides)}; attend to fewer entries at a time"
        )


def rows_of(storage: Storage, entries: Entries, batch: int, xp: Any) -> Rows:
    """View a cache whose entries follow one another; gather any other up to the longest entry."""
    step = _step_of_views(storage)
    if step is not None:
        return Rows(_view(storage.key, step, xp), _view(storage.value, step, xp), step)
    positions = xp.broadcast_to(xp.arange(entries.longest), (batch, entries.longest))
    block, row, _ = storage.locate(positions, xp)
    key, value = (gathered(cache, block, row) for cache in (storage.key, storage.value))
    key, value = (x.reshape(-1, *x.shape[2:]) for x in (key, value))
    return Rows(key, value, entries.longest)


def _step_of_views(storage: Storage) -> int | None:
    """Rows from one entry to the next where keys and values can be read as they stand."""
    if storage.blocks is not None:
        return None
    step = _step(storage.key)
    return step if step == _step(storage.value) else None


def _step(cache: Array) -> int | None:
    """Rows from one entry to the next; None where there is no such number."""
    num_entries, capacity = (int(length) for length in cache.shape[:2])
    if cache.size == 0 or num_entries == 1 or capacity == 1:
        return capacity
    between_entries, between_rows = (int(stride) for stride in cache.strides[:2])
    if between_rows <= 0 or between_entries % between_rows:
        return None
    step = between_entries // between_rows
    return step if step >= capacity else None


def _view(cache: Array, step: int, xp: Any) -> Array:
    num_entries, capacity, *row = cache.shape
    if cache.size == 0:
        return cache.reshape(0, *row)
    if capacity == 1:
        return cache[:, 0]
    shape = ((num_entries - 1) * step + capacity, *row)
    return xp.lib.stride_tricks.as_strided(cache, shape, cache.strides[1:])
