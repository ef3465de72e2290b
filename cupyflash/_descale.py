"""The factors that FP8 inputs stand for, and the dtype of the output, checked."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cupyflash import _options
from cupyflash._arrays import BFLOAT16, FLOAT_DTYPES, HOST, Place, as_array, describe, require_place
from cupyflash._options import Options
from cupyflash.errors import UnsupportedError

Array = Any

NUMBERS = (int, float, np.number)  # known to the host, and never changed in place
_NAMES = ("q_descale", "k_descale", "v_descale")


class Descales(NamedTuple):
    """Factors of q, k and v: numbers that the host knows, times arrays of each head's own."""

    numbers: tuple[float, float, float]
    arrays: tuple[Array | None, Array | None, Array | None]  # (1 or b, hk)


def descales(
    options: Options, batch: int, heads_kv: int, place: Place, are_float8: tuple[bool, bool, bool]
) -> Descales:
    """Check the factors; a host number may go with device arrays.

    `are_float8` says which of q, k and v are FP8; others have no factor.
    """
    given = [getattr(options, name) for name in _NAMES]
    for name, x, is_float8 in zip(_NAMES, given, are_float8, strict=True):
        if x is not None and not is_float8:
            of = "q" if any(are_float8) else "q, k and v"
            raise ValueError(
                f"{name} goes with {of} of dtype float8_e4m3fn (see quantize_fp8); "
                "other dtypes have no scale"
            )
    shape = (batch, heads_kv)
    bound = [_bound(x, name, shape, place) for name, x in zip(_NAMES, given, strict=True)]
    (q, k, v), (q_array, k_array, v_array) = zip(*bound, strict=True)
    return Descales((q, k, v), (q_array, k_array, v_array))


def out_dtype(value: Any, dtype: np.dtype[Any], *, is_float8: bool) -> str:
    """Return the checked dtype of the output of a call whose q has `dtype`.

    `is_float8`: k and v are FP8, q may be 16-bit.
    """
    if value is None:
        return FLOAT_DTYPES.get(dtype, FLOAT_DTYPES[BFLOAT16])
    try:
        target = np.dtype(value)
    except TypeError:
        raise TypeError(f"out_dtype must be a dtype, got {value!r}") from None
    allowed = ("bfloat16", "float16", "float32") if is_float8 else (dtype.name,)
    if target.name not in allowed:
        raise UnsupportedError(
            f"out_dtype of a call with {dtype} inputs must be {' or '.join(allowed)}, got "
            f"{target}; use .astype on the result"
        )
    return FLOAT_DTYPES[target]


def _bound(x: Any, name: str, shape: tuple[int, int], place: Place) -> tuple[float, Array | None]:
    """Return one factor as a number, 1 beside an array, and the array ``(1 or b, hk)``."""
    if x is None:
        return 1.0, None
    if isinstance(x, NUMBERS):
        return _positive(_options.finite_number(x, name), name), None
    array = as_array(x, name)
    if array.dtype != np.float32:
        raise TypeError(f"{name} must have dtype float32, got {describe(array)}; use .astype")
    if isinstance(array, np.ndarray) and array.ndim == 0:
        return _positive(float(array), name), None
    require_place(array, name, place)
    if array.shape not in ((), (1, shape[1]), shape):
        raise ValueError(
            f"{name} must be a number or have shape (b, hk) = {shape} or {(1, shape[1])}, "
            f"got {describe(array)}"
        )
    if place == HOST:  # device values are not read by the host
        for factor in array.flat:
            _positive(float(factor), name)
    else:
        array = place.namespace.broadcast_to(array, (1, shape[1])) if array.ndim == 0 else array
    return 1.0, array


def _positive(factor: float, name: str) -> float:
    with np.errstate(over="ignore", under="ignore"):
        if not 0 < np.float32(factor) < math.inf:
            raise ValueError(f"{name} must be finite and > 0 in float32, got {factor}")
    return factor
