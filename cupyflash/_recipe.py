"""Repeated calls on device arrays: one look-up in place of validation and planning.

What a call does is settled by its options and by the shapes, strides, dtypes and alignment of its
arrays. The first such call is checked and planned; later ones only allocate and launch.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from cupyflash._arrays import is_cupy
from cupyflash._cuda.arguments import values_of
from cupyflash._cuda.device import require_cupy
from cupyflash._cuda.params import FORWARD_DESCALES
from cupyflash._descale import NUMBERS
from cupyflash._engines import select
from cupyflash._options import Options
from cupyflash._validate import Call

Array = Any

_ALIGNMENT_MASK = 15  # vector loads move at most 16 bytes
_MAX_RECIPES = 4096
_recipes: dict[Hashable, Recipe] = {}


class Recipe:
    """All of one kind of call but its pointers."""

    __slots__ = (
        "_blocks", "_cupy", "_device_id", "_dtype", "_factors", "_launcher", "_nulls", "_shape",
    )  # fmt: skip

    def __init__(self, call: Call, out: Array) -> None:
        from cupyflash._cuda.forward import prepare

        self._cupy = require_cupy()
        self._device_id = call.place.device_id
        self._shape, self._dtype = out.shape, out.dtype
        prepared = prepare(
            select(call.problem, call.place, call.options.engine, operands=call.operands),
            call.problem,
            call.operands,
            call.options.tiling,
            call.layout.canonical(out),
            row_max=None,
            row_sum=None,
        )
        ((self._launcher, self._blocks),) = prepared.launches  # a plain call is one launch
        self._factors = FORWARD_DESCALES[0] in prepared.pointers
        given = ("query", "key", "value", "out", *FORWARD_DESCALES)
        self._nulls = values_of([x for x in prepared.pointers if x not in given], {})

    def __call__(self, q: Array, k: Array, v: Array, options: Options) -> Array:
        cupy = self._cupy
        if cupy.cuda.runtime.getDevice() == self._device_id:
            out = cupy.ndarray(self._shape, self._dtype)
        else:
            with cupy.cuda.Device(self._device_id):
                out = cupy.ndarray(self._shape, self._dtype)
        rest = self._nulls
        if self._factors:
            rest = [*rest, *map(_address, _factors_of(options))]
        self._launcher(self._blocks, q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr, *rest)
        return out


def find(q: Any, k: Any, v: Any, options: Options) -> Recipe | None:
    """Return the recipe of an output-only call like this one, if there was one."""
    if not (is_cupy(q) and is_cupy(k) and is_cupy(v)):
        return None
    try:
        return _recipes.get(_key(q, k, v, options))
    except TypeError:  # options that hold other arrays or lists
        return None


def remember(call: Call, given: tuple[Array, Array, Array], options: Options, out: Array) -> None:
    """Keep the recipe of an output-only call that has run, if later calls can do without checks.

    `given` and `options` are the caller's, `out` is the array that the call allocated.
    """
    problem = call.problem
    special = problem.extras or problem.dropout_p or problem.varlen
    if special or not (all(map(is_cupy, given)) and _as_given(call, given, options)):
        return
    try:
        key = _key(*given, options)
        hash(key)
    except TypeError:
        return
    if len(_recipes) >= _MAX_RECIPES:
        _recipes.clear()
    _recipes[key] = Recipe(call, out)


def _as_given(call: Call, given: tuple[Array, Array, Array], options: Options) -> bool:
    """Whether the engine reads the caller's own memory, without an internal copy."""
    x = call.operands
    used = (x.query, x.key, x.value, x.query_descale, x.key_descale, x.value_descale)
    return [*map(_address, used)] == [*map(_address, (*given, *_factors_of(options)))]


def _factors_of(options: Options) -> tuple[Any, Any, Any]:
    """Return FP8's descales."""
    return options.q_descale, options.k_descale, options.v_descale


def _address(x: Any) -> int:
    """Return that of a device array; others are settled by their values."""
    return x.data.ptr if is_cupy(x) else 0


def _settled(factor: Any) -> Hashable:
    """Return what does not change of a factor: a number, of a device array all but the pointer.

    Raises
    ------
    TypeError
        It is something else, which may change in place.
    """
    if is_cupy(factor):
        data = factor.data
        alignment = data.ptr & _ALIGNMENT_MASK
        return factor.shape, factor.strides, factor.dtype, data.device_id, alignment
    if factor is None or isinstance(factor, NUMBERS):
        return factor
    raise TypeError(f"a factor that may change in place: {type(factor).__name__}")


def _key(q: Array, k: Array, v: Array, options: Options) -> Hashable:
    """Raise TypeError for options that no later call could be compared with."""
    q_data, k_data, v_data = q.data, k.data, v.data
    window, types = options.window, map(type, options)
    q_factor, k_factor, v_factor = map(_settled, _factors_of(options))
    settled = options._replace(q_descale=q_factor, k_descale=k_factor, v_descale=v_factor)
    return (
        # The types too: True equals 1, yet only one of them is a window's bound.
        settled, *types, *map(type, window or ()),
        q.shape, q.strides, q.dtype, q_data.device_id,
        k.shape, k.strides, k.dtype, k_data.device_id,
        v.shape, v.strides, v.dtype, v_data.device_id,
        (q_data.ptr | k_data.ptr | v_data.ptr) & _ALIGNMENT_MASK,
    )  # fmt: skip
