"""Drop-in names: flash-attn 2.8's functions and PyTorch's `scaled_dot_product_attention`.

Argument names, order and defaults are the originals', so that moving code is a change of the import
line. What differs everywhere: arrays are NumPy's, CuPy's, or anything with DLPack; there is no
autograd (`cupyflash.flash_attention_forward` and `cupyflash.flash_attention_backward` are the
differentiable pair); float32 and float64 are served too; rows that see no key give 0.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyflash._arrays import FLOAT_DTYPES, Array, as_array, describe, place_of
from cupyflash._options import finite_number, integer
from cupyflash.attention import (
    flash_attention,
    flash_attention_forward,
    flash_attention_varlen,
    flash_attention_varlen_forward,
)
from cupyflash.errors import UnsupportedError
from cupyflash.kvcache import flash_attention_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "scaled_dot_product_attention",
]

Result = Any  # out, or (out, lse, None) with return_attn_probs=True


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash-attn's `flash_attn_func`.

    Parameters
    ----------
    q : array, shape ``(b, sq, h, d)``
        float16, bfloat16, float32 or float64; d from 1 to 256.
    k : array, shape ``(b, sk, hk, d)``
        ``h`` must be a multiple of ``hk``.
    v : array, shape ``(b, sk, hk, dv)``
        dv need not be d.
    dropout_p : float in [0, 1), default 0
        The seed is drawn anew for each call, from the system and not from a framework's generator.
    softmax_scale : float, default ``1 / sqrt(d)``
    causal : bool, default False
        Aligned at the bottom right: query i sees keys ``j <= i + sk - sq``.
    window_size : (int, int), default (-1, -1)
        Query i sees ``i + sk - sq - left <= j <= i + sk - sq + right``; -1 is an open side. Other
        negatives, which the original takes as open too, are errors.
    softcap : float, default 0
        Scores become ``softcap * tanh(score / softcap)``; off where <= 0.
    alibi_slopes : float32 array ``(h,)`` or ``(b, h)``, optional
        Adds ``-slope * |i + sk - sq - j|``.
    deterministic : bool, default False
        Nothing to do: it concerns the backward, and the forward is always deterministic.
    return_attn_probs : bool, default False
        Also return lse. The original's third result, the probabilities "for testing only", would
        be a matrix of all scores; it is None here.

    Returns
    -------
    out : array, shape ``(b, sq, h, dv)``
        With ``return_attn_probs=True``: ``(out, lse, None)``; lse is ``(b, h, sq)``, float32
        (float64 for float64), natural log, -inf for rows that see no key.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `cupyflash.flash_attention`.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    if not return_attn_probs:
        return flash_attention(q, k, v, **options)
    out, saved = flash_attention_forward(q, k, v, **options)
    return out, saved.lse, None


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of ``qkv`` ``(b, s, 3, h, d)``, without a copy."""
    q, k, v = _unpacked(qkv, "qkv", parts=3, axes=5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q ``(b, sq, h, d)`` and ``kv`` ``(b, sk, 2, hk, d)``, without a copy."""
    k, v = _unpacked(kv, "kv", parts=2, axes=5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Result:
    """flash-attn's `flash_attn_varlen_func`: sequences packed one behind another.

    Parameters
    ----------
    q : array, shape ``(total_q, h, d)``
    k : array, shape ``(total_k, hk, d)``
    v : array, shape ``(total_k, hk, dv)``
    cu_seqlens_q, cu_seqlens_k : int32 array, shape ``(b + 1,)``
        Sequence n takes rows ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``; starting at 0,
        non-decreasing.
    max_seqlen_q, max_seqlen_k : int
        Hints only: the result is right whatever they say.
    block_table : None
        Paged keys and values are not supported here; `flash_attn_with_kvcache` has them.

    The other parameters are those of `flash_attn_func`.

    Returns
    -------
    out : array, shape ``(total_q, h, dv)``
        With ``return_attn_probs=True``: ``(out, lse, None)``; lse is ``(h, total_q)``.

    Raises
    ------
    UnsupportedError
        `block_table` is given.
    """
    if block_table is not None:
        raise UnsupportedError(
            "block_table (paged keys and values) is not supported, got "
            f"{type(block_table).__name__}; gather the pages into k and v of shape "
            "(total_k, hk, d) and pass block_table=None"
        )
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if not return_attn_probs:
        return flash_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    out, saved = flash_attention_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    return out, saved.lse, None


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of ``qkv`` ``(total, 3, h, d)``, without a copy."""
    q, k, v = _unpacked(qkv, "qkv", parts=3, axes=4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of ``kv`` ``(total_k, 2, hk, d)``, without a copy."""
    k, v = _unpacked(kv, "kv", parts=2, axes=4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash-attn's `flash_attn_with_kvcache`: append new tokens to a cache, and attend to it.

    Parameters
    ----------
    q : array, shape ``(b, sq, h, d)``
    k_cache, v_cache : arrays, shape ``(b_cache, s_cache, hk, d)``
        With `block_table` ``(num_blocks, block_size, hk, d)``; the block size may be any.
    k, v : arrays, shape ``(b, s_new, hk, d)``, optional
        Written into the caches, in place, from `cache_seqlens` on.
    rotary_cos, rotary_sin : arrays, shape ``(s_rotary, d_rotary / 2)``, optional
        Any d_rotary up to d. Without k and v they are an error, as in the original.
    cache_seqlens : int, or int32 array ``(b,)``
    cache_batch_idx, cache_leftpad : int32 arrays ``(b,)``, optional
    block_table : int32 array ``(b, max_blocks)``, optional
        `cache_leftpad` may be given with it, which the original refuses.
    causal : bool, default False
        The core's function has True.
    num_splits : int, default 0

    The rest is as in `flash_attn_func` and `cupyflash.flash_attention_with_kvcache`, which says
    what becomes of tokens that do not fit.

    Returns
    -------
    out : array, shape ``(b, sq, h, d)``
        With ``return_softmax_lse=True``: ``(out, lse)``; lse is ``(b, h, sq)``.
    """
    options = _options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    del options["dropout_p"]
    return flash_attention_with_kvcache(
        q, k_cache, v_cache, k=k, v=v, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, page_table=block_table,
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
        num_splits=num_splits, return_lse=return_softmax_lse, **options,
    )  # fmt: skip


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
    ValueError
        `attn_mask` together with `is_causal`; shapes that do not fit; ``h != hk`` without
        `enable_gqa`.
    """
    query, key, value = (
        as_array(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value"))
    )
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal=True exclude each other; put both in attn_mask")
    _require_same_leads(query, key, value, enable_gqa)
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


def _options(
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
) -> dict[str, Any]:
    """flash-attn's options as the core's keyword arguments."""
    cap = finite_number(softcap, "softcap")
    return {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": _window(window_size),
        "softcap": cap if cap > 0 else None,
        "alibi_slopes": alibi_slopes,
    }


def _window(window_size: Any) -> tuple[int | None, ...]:
    if isinstance(window_size, str) or not hasattr(window_size, "__len__"):
        raise TypeError(f"window_size must be (left, right), got {window_size!r}")
    sides = [integer(side, "window_size") for side in window_size]
    if len(sides) != 2 or min(sides) < -1:
        raise ValueError(
            "window_size must be two numbers (left, right) >= 0, or -1 for an open side, "
            f"got {window_size!r}"
        )
    return tuple(None if side == -1 else side for side in sides)


def _unpacked(packed: Any, name: str, *, parts: int, axes: int) -> tuple[Array, ...]:
    """Views of an array that stacks its parts on the third axis from the end."""
    array = as_array(packed, name)
    if array.ndim != axes or array.shape[-3] != parts:
        raise ValueError(
            f"{name} must have {axes} axes, the third from the end of size {parts}, "
            f"got {describe(array)}"
        )
    return tuple(array[..., part, :, :] for part in range(parts))


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
