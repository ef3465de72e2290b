"""Drop-in names: flash-attn 2.8's functions and PyTorch's `scaled_dot_product_attention`.

Argument names, order and defaults are the originals', so that moving code is a change of the import
line. What differs everywhere: arrays are NumPy's, CuPy's, or anything with DLPack; there is no
autograd (`cupyflash.flash_attention_forward` and `cupyflash.flash_attention_backward` are the
differentiable pair); float32 and float64 are served too; rows that see no key give 0.
"""

from __future__ import annotations

from typing import Any

from cupyflash._arrays import Array, as_array, describe
from cupyflash._options import finite_number, integer, require_bools
from cupyflash._sdpa import scaled_dot_product_attention
from cupyflash.attention import (
    flash_attention,
    flash_attention_forward,
)
from cupyflash.errors import UnsupportedError
from cupyflash.kvcache import flash_attention_with_kvcache
from cupyflash.varlen import flash_attention_varlen, flash_attention_varlen_forward

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
    require_bools(deterministic=deterministic, return_attn_probs=return_attn_probs)
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
    require_bools(deterministic=deterministic, return_attn_probs=return_attn_probs)
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
    require_bools(return_softmax_lse=return_softmax_lse)
    options = _options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    del options["dropout_p"]
    return flash_attention_with_kvcache(
        q, k_cache, v_cache, k=k, v=v, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, page_table=block_table,
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
        num_splits=num_splits, return_lse=return_softmax_lse, **options,
    )  # fmt: skip


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
