"""PyTorch's form of the call: any leading axes, one mask argument, causal at the top left."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyflash._arrays import FLOAT_DTYPES, Array, as_array, describe, place_of
from cupyflash._options import require_bools
from cupyflash.attention import flash_attention

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """PyTorch's `torch.nn.functional.scaled_dot_product_attention`.

    Parameters
    ----------
    query : array, shape ``(..., h, sq, d)``
        Any number of leading axes; without heads, ``(sq, d)``.
    key : array, shape ``(..., hk, sk, d)``
        The same leading axes as query's (the original broadcasts them).
    value : array, shape ``(..., hk, sk, dv)``
    attn_mask : array broadcastable to ``(..., h, sq, sk)``, optional
        bool: True = takes part; float: added to the scores, -inf hides. Its query and key axes are
        never expanded in memory.
    dropout_p : float in [0, 1), default 0
        Applied whenever > 0, as in the original; the seed is drawn anew for each call.
    is_causal : bool, default False
        Aligned at the top left: query i sees keys ``j <= i``.
    scale : float, default ``1 / sqrt(d)``
    enable_gqa : bool, default False
        Allow ``h`` to be a multiple of ``hk``.

    Returns
    -------
    array, shape ``(..., h, sq, dv)``

    Raises
    ------
    TypeError
        `is_causal` or `enable_gqa` is no bool; otherwise as `cupyflash.flash_attention`.
    ValueError
        `attn_mask` together with `is_causal`; shapes that do not fit; ``h != hk`` without
        `enable_gqa`.
    """
    require_bools(is_causal=is_causal, enable_gqa=enable_gqa)
    query, key, value = (
        as_array(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value"))
    )
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal=True exclude each other; put both in attn_mask")
    _require_same_leads(query, key, value, enable_gqa)
    _require_fitting_ends(query, key, value)
    mask = bias = None
    if attn_mask is not None:
        scores = (*query.shape[:-1], key.shape[-2])
        spread = _four_axes_mask(as_array(attn_mask, "attn_mask"), scores)
        mask, bias = (spread, None) if spread.dtype == np.bool_ else (None, spread)
    out = flash_attention(
        *map(_four_axes, (query, key, value)),
        causal="top-left" if is_causal else False,
        softmax_scale=scale,
        mask=mask,
        bias=bias,
        dropout_p=dropout_p,
        layout="bhsd",
    )
    return out.reshape((*query.shape[:-1], value.shape[-1]))


def _require_same_leads(query: Array, key: Array, value: Array, enable_gqa: bool) -> None:
    shown = f"query {describe(query)}, key {describe(key)}, value {describe(value)}"
    if query.ndim < 2 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            f"query, key and value need the same number of axes, 2 or more, got {shown}"
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"query, key and value need the same axes before the heads, got {shown}")
    if not enable_gqa and query.shape[:-2] != key.shape[:-2]:
        raise ValueError(
            f"query and key have different numbers of heads, got {shown}; "
            "pass enable_gqa=True to let each key-value head serve a group of query heads"
        )


def _require_fitting_ends(query: Array, key: Array, value: Array) -> None:
    """The core's check in the words of this call: it would speak of q, k and v."""
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"query and key need the same last axis, got query {describe(query)}, "
            f"key {describe(key)}"
        )
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(
            "key and value need the same axes but for the last, "
            f"got key {describe(key)}, value {describe(value)}"
        )


def _four_axes(array: Array) -> Array:
    """View ``(..., h, s, width)`` as ``(b, h, s, width)``; copy only where strides forbid it."""
    *leads, heads = (1, 1, *array.shape[:-2]) if array.ndim < 4 else array.shape[:-2]
    return array.reshape((math.prod(leads), heads, *array.shape[-2:]))


def _four_axes_mask(attn_mask: Array, scores: tuple[int, ...]) -> Array:
    """Bring a mask for ``(..., h, sq, sk)`` to 4 axes; heads, queries and keys stay broadcast."""
    if attn_mask.dtype != np.bool_ and attn_mask.dtype not in FLOAT_DTYPES:
        raise TypeError(f"attn_mask must be bool or floating, got {describe(attn_mask)}")
    try:
        fits = np.broadcast_shapes(attn_mask.shape, scores) == scores
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"attn_mask must broadcast to (..., h, sq, sk) = {scores}, got {describe(attn_mask)}"
        )
    missing = max(len(scores), 4) - attn_mask.ndim
    attn_mask = attn_mask.reshape((1,) * missing + attn_mask.shape)
    leads, last = attn_mask.shape[:-3], attn_mask.shape[-3:]
    if math.prod(leads) == 1:
        return attn_mask.reshape((1, *last))
    whole = (*scores[:-3], *last)
    spread = place_of(attn_mask).namespace.broadcast_to(attn_mask, whole)
    return spread.reshape((math.prod(scores[:-3]), *last))
