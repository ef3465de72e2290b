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
from cupyflash._descale import NUMBERS

if TYPE_CHECKING:
    from cupyflash._kvcache.arguments import CacheArrays
    from cupyflash._kvcache.call import CacheCall
    from cupyflash._kvcache.kernels import KernelCall

Array = Any

_ALIGNMENT_MASK = 15  # vector loads move at most 16 bytes
_MAX_RECIPES = 4096

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


# Places in CacheArrays, too.
_TOKENS = tuple(map(GivenArrays._fields.index, ("q", "k", "v")))
_BLOCKS = GivenArrays._fields.index("cache_batch_idx")


class Recipe:
    """All of one kind of call but its addresses and its length."""

    def __init__(self, kind: KernelCall, call: CacheCall, between: int) -> None:
        """`between` is the way from the cache of keys to that of values, which was checked."""
        self._kind = kind
        self._between = between
        self._cuda = require_cupy().cuda
        self._get_device = self._cuda.runtime.getDevice
        self._device_id = call.place.device_id
        self._capacity = call.storage.capacity
        self._new_tokens = 0 if call.new is None else call.new[0].shape[1]
        # Positions that an int must leave for new tokens, and for angles.
        self._last = self._capacity - self._new_tokens
        if call.rotary is not None:
            steps = call.query.shape[1] if call.rotates_each_query else 1
            turned = max(self._new_tokens, steps)
            self._last = min(self._last, len(call.rotary.cos) - turned)
        key, value = _extent(call.storage.key), _extent(call.storage.value)
        self._caches_meet = _meeting(key, value)
        tokens = () if call.new is None else (call.query, *call.new)
        self._tokens_meet = [
            (place, *_meeting(key, x), *_meeting(value, x))
            for place, x in zip(_TOKENS, map(_extent, tokens), strict=False)
        ]

    def __call__(self, addresses: list[int], lengths: Any, wants_lse: bool) -> Any:
        """Return out and lse; None if the call has to be checked after all.

        Parameters
        ----------
        addresses : list of int
            From `look_up`.
        lengths : as given
        wants_lse : bool
        """
        length = longest = self._capacity
        if type(lengths) is int:
            if not 0 <= lengths <= self._last:
                return None
            length, longest = lengths, lengths + self._new_tokens
        if self._tokens_meet and not self._apart(addresses):
            return None
        if self._get_device() == self._device_id:
            return self._kind(addresses, length, longest, wants_lse)
        with self._cuda.Device(self._device_id):
            return self._kind(addresses, length, longest, wants_lse)

    def _apart(self, addresses: list[int]) -> bool:
        """Whether the caches are apart, and q, k and v outside of them from first to last byte."""
        _, key, value = addresses[:3]
        between = value - key
        least, most = self._caches_meet
        # Caches in one array share a range of memory, and no element of it.
        if least < between < most and between != self._between:
            return False
        for place, least, most, least_value, most_value in self._tokens_meet:
            x = addresses[place]
            if least < x - key < most or least_value < x - value < most_value:
                return False
        return True


def look_up(
    given: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[Hashable | None, Recipe | None, list[int]]:
    """Return what settles a call on a GPU, and the recipe of calls like it, if there was one.

    The key is None if the values of a call have to be looked at every time. The list is that of the
    addresses of `CacheArrays`, 0 for what is no array. `given` has the fields of `GivenArrays`.
    """
    kind = type(given[0])
    if not is_cupy(given[0]) or type(given[1]) is not kind or type(given[2]) is not kind:
        return None, None, []
    forms: list[Any] = []
    addresses: list[int] = []
    *arrays, k_descale, v_descale = given
    for x in arrays:
        if x is None:
            forms.append(None)
            addresses.append(0)
        elif type(x) is kind:
            data = x.data
            address = data.ptr
            forms.append((x.shape, x.strides, x.dtype, data.device_id, address & _ALIGNMENT_MASK))
            addresses.append(address)
        elif type(x) is int:
            forms.append(int)
            addresses.append(0)
        else:
            return None, None, []
    if k_descale is None and v_descale is None:
        addresses += (0, 0)
    else:
        for x in (k_descale, v_descale):
            if type(x) is kind:  # read element by element
                data = x.data
                aligned = data.ptr & _ALIGNMENT_MASK
                forms.append((x.shape, x.strides, x.dtype, data.device_id, aligned))
                addresses.append(data.ptr)
            elif x is None or isinstance(x, NUMBERS):  # numbers are known to the kernels
                forms.append((type(x), x))
                addresses.append(0)
            else:
                return None, None, []
    # One of cache_batch_idx and page_table, at most, is given: the blocks.
    addresses[_BLOCKS] = addresses.pop(_BLOCKS + 1) or addresses[_BLOCKS]
    # The types too: True equals 1, yet only one of them is a window's bound.
    window = options[1] if isinstance(options[1], tuple) else ()
    key = (*forms, options, *map(type, options), *map(type, window))
    try:
        return key, _recipes.get(key), addresses
    except TypeError:  # options that hold arrays or lists
        return None, None, []


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


def _meeting(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """Return bounds between which the second address minus the first is where extents meet."""
    return first[0] - second[1], first[1] - second[0]
