"""Keys and values of a batch as one array of rows, which varlen attention reads."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupyflash._kvcache.bits import gathered
from cupyflash._kvcache.entries import Entries
from cupyflash._kvcache.storage import Storage

Array = Any


class Rows(NamedTuple):
    """Position p of entry e is row ``e * step + p`` of key ``(rows, hk, d)`` and of value."""

    key: Array
    value: Array
    step: int


def rows_of(storage: Storage, entries: Entries, batch: int, xp: Any) -> Rows:
    """View a cache whose entries follow one another; gather any other up to the longest entry."""
    step = _step(storage.key)
    if storage.blocks is None and step is not None and step == _step(storage.value):
        return Rows(_view(storage.key, step, xp), _view(storage.value, step, xp), step)
    positions = xp.broadcast_to(xp.arange(entries.longest), (batch, entries.longest))
    block, row, _ = storage.locate(positions, xp)
    key, value = (gathered(cache, block, row) for cache in (storage.key, storage.value))
    key, value = (x.reshape(-1, *x.shape[2:]) for x in (key, value))
    return Rows(key, value, entries.longest)


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
