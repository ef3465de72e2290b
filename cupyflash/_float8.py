"""The format e4m3: 4 bits of exponent, 3 of mantissa, no infinity, largest number 448."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = Any

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0
_LEAST_EXPONENT = -6  # of a normal number; below, numbers are multiples of 2**-9
_MANTISSA_BITS = 3
_NAN = 0x7F
_SIGN = 0x80


def float8_bits(values: Array, xp: Any) -> Array:
    """Round float32 or float64 to e4m3, ties to even, as uint8.

    Numbers beyond the largest one, infinities too, become that one; NaN stays NaN.
    """
    nan = xp.isnan(values)
    magnitude = xp.where(nan, 0, xp.minimum(abs(values), LARGEST))
    exponent = xp.frexp(xp.maximum(magnitude, 2.0**_LEAST_EXPONENT))[1] - 1
    # In units of the last place: 8 to 16 where the number is normal. 16 carries by itself, as the
    # exponent's bits follow those of the mantissa.
    units = xp.rint(xp.ldexp(magnitude, _MANTISSA_BITS - exponent)).astype(np.int32)
    code = units + ((exponent - _LEAST_EXPONENT) << _MANTISSA_BITS)
    code = xp.where(nan, _NAN, code) | xp.where(xp.signbit(values), _SIGN, 0)
    return code.astype(np.uint8)
