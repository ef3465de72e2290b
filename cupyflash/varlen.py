"""Attention over sequences of different lengths, packed one behind another."""

from __future__ import annotations

from typing import Any

from cupyflash import _dispatch, _validate
from cupyflash._options import Options
from cupyflash._validate import Sequences
from cupyflash.state import SavedState
from cupyflash.tiling import Tiling

__all__ = ["flash_attention_varlen", "flash_attention_varlen_forward"]

Array = Any


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    mask: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    score_mod: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    layout: str = "bshd",
    engine: str | None = None,
    tiling: Tiling | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: Any = None,
    out: Any = None,
) -> Array:
    """Attention over sequences of different lengths, packed one behind another.

    Parameters
    ----------
    q : array, shape ``(total_q, h, d)``
        With ``layout="bhsd"`` ``(h, total_q, d)``; k and v alike.
    k : array, shape ``(total_k, hk, d)``
    v : array, shape ``(total_k, hk, dv)``
    cu_seqlens_q, cu_seqlens_k : int32 array, shape ``(b + 1,)``
        Sequence n takes rows ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``; starting at 0,
        non-decreasing, on host or device. Zero lengths are fine.
    max_seqlen_q, max_seqlen_k : int, optional
        Hints; never needed, never trusted.
    mask, bias : array, optional
        Broadcastable to ``(b, h, max sq, max sk)``, indexed inside the sequence.

    The other parameters and errors are those of `flash_attention`; ``block_mask`` raises
    `UnsupportedError`.

    Returns
    -------
    array, shape ``(total_q, h, dv)``
        Rows past ``cu_seqlens_q[-1]`` are 0.
    """
    options = Options(
        causal, window, softmax_scale, softcap, mask, block_mask, bias, alibi_slopes, sinks,
        score_mod, dropout_p, seed, layout, engine, tiling, q_descale, k_descale, v_descale,
        out_dtype,
    )  # fmt: skip
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    call = _validate.bind(q, k, v, options, out=out, sequences=sequences)
    result, _, _ = _dispatch.forward(call, save=False)
    return result


def flash_attention_varlen_forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    mask: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    score_mod: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    layout: str = "bshd",
    engine: str | None = None,
    tiling: Tiling | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: Any = None,
    out: Any = None,
) -> tuple[Array, SavedState]:
    """Like `flash_attention_varlen`, and keep what the backward needs.

    Returns
    -------
    out : array, shape ``(total_q, h, dv)``
    saved : SavedState
        Its statistics have shape ``(h, total_q)``.
    """
    options = Options(
        causal, window, softmax_scale, softcap, mask, block_mask, bias, alibi_slopes, sinks,
        score_mod, dropout_p, seed, layout, engine, tiling, q_descale, k_descale, v_descale,
        out_dtype,
    )  # fmt: skip
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _dispatch.saved_forward(_validate.bind(q, k, v, options, out=out, sequences=sequences))


def forward_over_cache(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, **options: Any
) -> tuple[Array, SavedState]:
    """`flash_attention_varlen_forward`, but k and v may be FP8 where q is 16-bit."""
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, of_cache=True)
    return _dispatch.saved_forward(_validate.bind(q, k, v, Options(**options), sequences=sequences))
