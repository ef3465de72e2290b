"""Quantization to 8 bits: one scale for each head."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash import _options
from cupyflash._arrays import FLOAT_DTYPES, HOST, as_array, describe, place_of
from cupyflash._float8 import FLOAT8, LARGEST, float8_bits
from cupyflash._hadamard import rotation
from cupyflash._layout import Layout

__all__ = ["quantize_fp8"]

Array = Any

_FLOAT32 = np.finfo(np.float32)
_LEAST, _MOST = float(_FLOAT32.tiny), float(_FLOAT32.max)  # of a scale


def quantize_fp8(
    x: Any, *, rotate: bool = False, num_heads_kv: int | None = None, layout: str = "bshd"
) -> tuple[Array, Array]:
    """Quantize q, k or v to e4m3 (FP8), each head of each sequence with a scale of its own.

    Parameters
    ----------
    x : array, shape ``(b, s, h, d)``
        float16, bfloat16, float32 or float64; NumPy, CuPy, or anything that `flash_attention`
        takes, any strides. Without the batch axis (3-D) all tokens share a head's scale.
    rotate : bool, default False
        Multiply each token's vector by a fixed orthogonal matrix first, which spreads outliers over
        the whole head. For q and k together: their products stay what they are. Not for v.
    num_heads_kv : int, default h
        One scale for each group of ``h / num_heads_kv`` heads: for q, k's number of heads.
    layout : "bshd" or "bhsd", default "bshd"
        "bhsd": x is ``(b, h, s, d)``.

    Returns
    -------
    quantized : array of x's shape
        ``ml_dtypes.float8_e4m3fn`` on the host, uint8 with the same bits on a GPU.
    descale : float32 array, shape ``(b, num_heads_kv)``; 3-D: ``(1, num_heads_kv)``
        ``quantized * descale`` is about `x` (rotated: ``x @ R``).

    Raises
    ------
    TypeError
        Something is no array, or of another dtype.
    ValueError
        The number of axes or of heads.

    Notes
    -----
    A head's largest magnitude becomes 448, e4m3's largest number; the others are rounded to
    nearest, ties to even, with a relative error of at most 1/16 down to 1/28672 of the largest.
    Smaller ones become multiples of 1/229376 of it.

    - A head of zeros has scale 1. Magnitudes below 2**-126 count as zero.
    - NaN and infinities become NaN, take no part in the scale, and leave other tokens as they
      would be without them (with `rotate` all elements of their own token become NaN).
    - Scales are kept between float32's smallest normal and its largest number: a head whose largest
      magnitude is beyond 448 times these loses small numbers, or saturates at 448 (float64 only).

    With `rotate`, R is a Hadamard matrix over ``sqrt(d)``, its rows with fixed signs; where d is no
    power of two, the product of two of the largest that fits, which overlap. R is orthogonal, so
    the inverse of ``y = x @ R`` is ``x = y @ R.T``.

    The error of attention (root mean square of the difference from float64; q, k and v from N(0, 1)
    plus 0.1 % from N(0, 100), the setting of FlashAttention-3's 9.1e-3, arXiv 2407.08608, table 3):

    ===  =====  =========  =========================
    d    keys   unrotated  q, k with ``rotate=True``
    ===  =====  =========  =========================
    64   4096   2.9e-2     1.5e-2
    128  1024   1.4e-2     8.3e-3
    128  4096   1.8e-2     8.1e-3
    256  2048   1.8e-2     6.2e-3
    ===  =====  =========  =========================

    That is in exact arithmetic. Hopper's tensor cores (the wgmma engine) keep 14 bits of a sum of
    FP8 products: scores are off by a few 1e-4 of themselves beside it.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 128, 4, 64), dtype=np.float32)
    >>> (q8, q_descale), (k8, k_descale) = (cupyflash.quantize_fp8(x, rotate=True) for x in (q, k))
    >>> v8, v_descale = cupyflash.quantize_fp8(v)
    >>> out = cupyflash.flash_attention(
    ...     q8, k8, v8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
    ... )
    >>> out.dtype, out.shape
    (dtype(bfloat16), (1, 128, 4, 64))
    """
    array, axes = as_array(x, "x"), _axes(x, layout)
    groups = _groups(axes.canonical(array), num_heads_kv, rotate)
    place = place_of(array)
    xp = place.namespace
    with place.current(), np.errstate(all="ignore"):
        bits, descale = _quantized(groups, rotate, xp)
        quantized = xp.ascontiguousarray(axes.users(bits.reshape(axes.canonical(array).shape)))
    return (quantized.view(FLOAT8) if place == HOST else quantized), descale


def _axes(x: Any, layout: str) -> Layout:
    array = as_array(x, "x")
    if array.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"x must have a dtype among {', '.join(FLOAT_DTYPES.values())}, got {describe(array)}"
        )
    if array.ndim not in (3, 4) or array.shape[-1] == 0:
        raise ValueError(
            "x must have 4 axes (batch, seqlen, heads, head_dim), or 3 without the batch, and "
            f"head_dim >= 1, got {describe(array)}"
        )
    heads_first = _options.layout(layout) == "bhsd"
    return Layout(heads_first, unbatched=array.ndim == 3, varlen=False)


def _groups(array: Array, num_heads_kv: int | None, rotate: Any) -> Array:
    """View ``(b, s, h, d)`` as ``(b, s, groups, heads of a group, d)``."""
    _options.require_bools(rotate=rotate)
    *lead, heads, width = array.shape
    groups = heads if num_heads_kv is None else _options.integer(num_heads_kv, "num_heads_kv")
    if heads and (groups < 1 or heads % groups):
        raise ValueError(
            f"num_heads_kv must divide the {heads} heads of x, got {groups} ({describe(array)})"
        )
    return array.reshape(*lead, groups, heads // groups if groups else 0, width)


def _quantized(groups: Array, rotate: bool, xp: Any) -> tuple[Array, Array]:
    """Return the bits, and the scales ``(b, groups)``."""
    batch, _, heads, *_ = groups.shape
    wide = np.float64 if groups.dtype == np.float64 else np.float32
    if groups.size == 0:
        return xp.zeros(groups.shape, np.uint8), xp.ones((batch, heads), np.float32)
    values = groups.astype(wide)
    values = xp.where(xp.isfinite(values), values, np.nan)
    values = xp.where(abs(values) < _LEAST, 0, values)  # alike where the GPU flushes them, or not
    largest = _largest(values, xp)
    unit = xp.where(largest == 0, 1, largest)
    values /= unit  # at most 1, so that nothing overflows
    if rotate:
        width = groups.shape[-1]
        rotated = values.reshape(-1, width) @ xp.asarray(rotation(width), wide)
        values = rotated.reshape(values.shape)
    descale = xp.clip(unit / LARGEST * _largest(values, xp), _LEAST, _MOST).astype(np.float32)
    descale = xp.where(largest == 0, np.float32(1), descale)
    bits = float8_bits(values * (unit / descale.astype(wide)), xp)
    return bits, descale.reshape(batch, heads)


def _largest(values: Array, xp: Any) -> Array:
    """Largest magnitude of each group that is no NaN, ``(b, 1, groups, 1, 1)``."""
    return xp.where(xp.isnan(values), 0, abs(values)).max(axis=(1, 3, 4), keepdims=True)
