"""Repeated calls on a cache on a GPU: one look-up in place of checks and plans.

What a call does is settled by its options and by the shapes, strides, dtypes and alignment of its
arrays. The first such call is checked and planned; later ones look at what may differ: an int as
length, and whether the caches keep off each other and q, k and v off them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyflash._arrays import is_cupy
from cupyflash._cuda.device import require_cupy

if TYPE_CHECKING:
    from cupyflash._kvcache.arguments import CacheArrays
    from cupyflash._kvcache.call import CacheCall
    from cupyflash._kvcache.kernels import KernelCall

Array = Any

_ALIGNMENT_MASK = 15  # vector loads move at most 16 bytes
_MAX_RECIPES = 4096
_NUMBERS = (int, float, np.number)
_recipes: dict[Hashable, Recipe] = {}


class GivenArrays(NamedTuple):
    """The arrays of a call as given; None where there is none."""

    q: Any
    k_cache: Any
    v_cache: Any
    k: Any
    v: Any
    cache_seqlens: Any  # or an int
    cache_leftpad: Any
    cache_batch_idx: Any
    page_table: Any
    rotary_cos: Any
    rotary_sin: Any
    alibi_slopes: Any
    sinks: Any
    k_descale: Any  # or a number
    v_descale: Any


class Recipe:
    """All of one kind of call but its addresses and its length."""

    def __init__(self, kind: KernelCall, call: CacheCall, between: int) -> None:
        """`between` is the way from the cache of keys to that of values, which was checked."""
        self._kind = kind
        self._between = between
        self._cuda = require_cupy().cuda
        self._device_id = call.place.device_id
        self._is_float8 = call.attention.problem.is_float8
        self._capacity = call.storage.capacity
        self._new_tokens = 0 if call.new is None else call.new[0].shape[1]
        # Positions that an int must leave for new tokens, and for angles.
        self._last = self._capacity - self._new_tokens
        if call.rotary is not None:
            steps = call.query.shape[1] if call.rotates_each_query else 1
            turned = max(self._new_tokens, steps)
            self._last = min(self._last, len(call.rotary.cos) - turned)
        caches = (call.storage.key, call.storage.value)
        self._caches = [_extent(cache) for cache in caches]
        self._tokens = [] if call.new is None else [_extent(x) for x in (call.query, *call.new)]

    def __call__(self, given: GivenArrays, wants_lse: bool) -> Any:
        """Return out and lse; None if the call has to be checked after all."""
        q, k_cache, v_cache, k, v, lengths, leftpad, chosen, table, *others = given
        length = longest = self._capacity
        if type(lengths) is int:
            if not 0 <= lengths <= self._last:
                return None
            length, longest, lengths = lengths, lengths + self._new_tokens, None
        if self._tokens and not self._apart(k_cache, v_cache, (q, k, v)):
            return None
        blocks = chosen if table is None else table
        if self._is_float8:  # numbers are known to the kernels
            others[-2:] = (None if isinstance(x, _NUMBERS) else x for x in others[-2:])
        arrays = (q, k_cache, v_cache, k, v, lengths, leftpad, blocks, *others)  # CacheArrays
        cuda = self._cuda
        if cuda.runtime.getDevice() == self._device_id:
            return self._kind(arrays, length, longest, wants_lse)
        with cuda.Device(self._device_id):
            return self._kind(arrays, length, longest, wants_lse)

    def _apart(self, k_cache: Array, v_cache: Array, tokens: tuple[Array, ...]) -> bool:
        """Whether the caches are apart, and q, k and v outside of them from first to last byte."""
        key, value = k_cache.data.ptr, v_cache.data.ptr
        (key_first, key_end), (value_first, value_end) = self._caches
        # Caches in one array share a range of memory, and no element of it.
        meet = key + key_first < value + value_end and value + value_first < key + key_end
        if meet and value - key != self._between:
            return False
        for x, (first, end) in zip(tokens, self._tokens, strict=True):
            begin, stop = x.data.ptr + first, x.data.ptr + end
            if begin < key + key_end and key + key_first < stop:
                return False
            if begin < value + value_end and value + value_first < stop:
                return False
        return True


def look_up(given: GivenArrays, options: tuple[Any, ...]) -> tuple[Hashable | None, Recipe | None]:
    """Return what settles a call on a GPU, and the recipe of calls like it, if there was one.

    The key is None if the values of a call have to be looked at every time.
    """
    kind = type(given.q)
    if not is_cupy(given.q) or type(given.k_cache) is not kind or type(given.v_cache) is not kind:
        return None, None
    forms: list[Any] = []
    *arrays, k_descale, v_descale = given
    for x in arrays:
        if x is None:
            forms.append(None)
        elif type(x) is kind:
            data = x.data
            at = data.device_id, data.ptr & _ALIGNMENT_MASK
            forms.append((x.shape, x.strides, x.dtype, at))
        elif type(x) is int:
            forms.append(int)
        else:
            return None, None
    if k_descale is not None or v_descale is not None:
        for x in (k_descale, v_descale):
            if type(x) is kind:  # read element by element
                forms.append((x.shape, x.strides, x.dtype, x.data.device_id))
            elif x is None or isinstance(x, _NUMBERS):
                forms.append((type(x), x))
            else:
                return None, None
    # The types too: True equals 1, yet only one of them is a window's bound.
    window = options[1] if isinstance(options[1], tuple) else ()
    key = (*forms, options, *map(type, options), *map(type, window))
    try:
        return key, _recipes.get(key)
    except TypeError:  # options that hold arrays or lists
        return None, None


def remember(
    key: Hashable, kind: KernelCall, call: CacheCall, given: GivenArrays, used: CacheArrays
) -> None:
    """Keep the recipe of a call that has run, if no array had to be copied for it."""
    given_addresses = {x.data.ptr for x in given if is_cupy(x)}
    if all(x is None or x.data.ptr in given_addresses for x in used):
        if len(_recipes) >= _MAX_RECIPES:
            _recipes.clear()
        between = given.v_cache.data.ptr - given.k_cache.data.ptr
        _recipes[key] = Recipe(kind, call, between)


def _extent(array: Array) -> tuple[int, int]:
    """Return the first and one past the last byte of an array, counted from its address."""
    steps = [
        stride * (length - 1) for length, stride in zip(array.shape, array.strides, strict=True)
    ]
    if 0 in array.shape:
        return 0, 0
    return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + int(
        np.dtype(array.dtype).itemsize
    )
