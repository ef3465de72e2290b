"""How far the cache of each entry of the batch is filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import _options
from cupyflash._arrays import HOST, Place, as_array, describe, place_of

Array = Any


@dataclass(frozen=True)
class Entries:
    """Positions of each entry, int64 ``(b,)``: in NumPy where the host knows them, else on device.

    Keys at ``begin <= position < end`` take part; new tokens stand from ``used`` on.
    """

    begin: Array
    used: Array  # tokens before the append
    end: Array  # tokens after it
    longest: int  # no entry ends behind it

    @property
    def on_host(self) -> bool:
        """Whether the host knows the lengths."""
        return place_of(self.end) == HOST


def bind_entries(
    cache_seqlens: Any, cache_leftpad: Any, batch: int, new: int, capacity: int, place: Place
) -> Entries:
    """Check lengths and left padding; device values are clamped instead, as nobody reads them."""
    if new > capacity:
        raise ValueError(
            f"k has {new} new tokens, but an entry of the cache has room for {capacity}"
        )
    used = _used(cache_seqlens, batch, new, capacity, place)
    begin = np.zeros(batch, np.int64)
    if cache_leftpad is not None:
        begin = per_entry(cache_leftpad, "cache_leftpad", batch, capacity, place)
    if place_of(used) == HOST == place_of(begin):
        end = used + new
        return Entries(np.minimum(begin, end), used, end, int(end.max(initial=0)))
    xp = place.namespace
    with place.current():
        begin, used = (xp.asarray(x) for x in (begin, used))
        end = xp.minimum(used + new, capacity)
        return Entries(xp.minimum(begin, end), used, end, capacity)


def lengths_as_given(x: Any, capacity: int, place: Place) -> int | Array:
    """Return a value of ``cache_seqlens=`` that was checked: a number, or an int32 array."""
    if x is None:
        return capacity
    if isinstance(x, (int, np.integer)):
        return int(x)
    return index_array(x, "cache_seqlens", place)


def _used(x: Any, batch: int, new: int, capacity: int, place: Place) -> Array:
    """`Entries.used` for a value of ``cache_seqlens=``."""
    if x is None:
        return np.full(batch, capacity, np.int64)
    if isinstance(x, (int, np.integer)):
        length = _options.integer(x, "cache_seqlens")
        if not 0 <= length <= capacity - new:
            raise _no_room(length, new, capacity)
        return np.full(batch, length, np.int64)
    lengths = per_entry(x, "cache_seqlens", batch, capacity, place)
    if place_of(lengths) == HOST and (lengths > capacity - new).any():
        raise _no_room(int(lengths.max()), new, capacity)
    return lengths


def per_entry(x: Any, name: str, batch: int, largest: int, place: Place) -> Array:
    """Return an int32 array ``(b,)`` of numbers from 0 to `largest` as int64.

    On the host they are checked, on the device clamped.
    """
    array = index_array(x, name, place)
    if array.shape != (batch,):
        raise ValueError(f"{name} must have shape (b,) = ({batch},), got {describe(array)}")
    if place_of(array) != HOST:
        with place.current():
            return array.astype(np.int64).clip(0, largest)
    if ((array < 0) | (array > largest)).any():
        raise ValueError(f"{name} must hold numbers from 0 to {largest}, got {array}")
    return array.astype(np.int64)


def index_array(x: Any, name: str, place: Place) -> Array:
    """Return `x` as an int32 array on the host or in q's place."""
    array = as_array(x, name)
    if array.dtype != np.int32:
        raise TypeError(
            f"{name} must have dtype int32, got {describe(array)}; use .astype('int32')"
        )
    if place_of(array) not in (HOST, place):
        raise TypeError(
            f"{name} lives on the {place_of(array)} but q on the {place}; "
            "use cupy.asarray or cupy.asnumpy"
        )
    return array


def _no_room(length: int, new: int, capacity: int) -> ValueError:
    appended = f" and the {new} new tokens of k" if new else ""
    return ValueError(
        f"cache_seqlens must be >= 0 and leave no entry longer than its cache: got {length}"
        f"{appended}, and there is room for {capacity}"
    )
