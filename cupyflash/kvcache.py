"""Attention over a key-value cache, into which new tokens are appended: generation."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupyflash import _engines
from cupyflash._cuda.device import require_cupy
from cupyflash._kvcache import recipe
from cupyflash._kvcache.append import append, quantized
from cupyflash._kvcache.attend import attend, attend_one_by_one
from cupyflash._kvcache.call import CacheCall, bind
from cupyflash._kvcache.rows import require_rows, rows_of
from cupyflash._kvcache.selection import kernel_device

__all__ = ["CacheFaults", "flash_attention_with_kvcache", "take_faults"]

Array = Any


class CacheFaults(NamedTuple):
    """What was wrong with values that the host does not read."""

    dropped_tokens: int  # new ones that did not fit, or whose page or entry does not exist
    # A length, left padding or page was outside the cache; seen by the cache's kernels alone.
    clamped: bool


def flash_attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    k: Any = None,
    v: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = True,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    engine: str | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: Any = None,
) -> Any:
    """Append new tokens to a cache of keys and values, and attend to it.

    Parameters
    ----------
    q : array, shape ``(b, sq, h, d)``
        Queries of the last sq tokens: one for a step of generation, more for a prompt.
    k_cache : array, shape ``(b_cache, s_cache, hk, d)``
        With `page_table` ``(num_pages, page_size, hk, d)``, any page size. Any strides. Of q's
        dtype, or FP8 (``ml_dtypes.float8_e4m3fn``; on a GPU uint8 holds its bits) where q is
        float16 or bfloat16; v_cache alike.
    v_cache : array, shape ``(b_cache, s_cache, hk, dv)``
        Or ``(num_pages, page_size, hk, dv)``.
    k, v : arrays, shapes ``(b, s_new, hk, d)`` and ``(b, s_new, hk, dv)``, optional
        New tokens, written into the caches, in place, from position `cache_seqlens` on. With an
        FP8 cache and 16-bit q they are either FP8 already, and copied bit by bit, or of q's dtype:
        then they are divided by `k_descale`, `v_descale` in float32 and rounded to nearest even,
        beyond +-448 to that. Keys are turned, and rounded to q's dtype, before.
    cache_seqlens : int, or int32 array ``(b,)``
        Tokens of each entry before the append. None = full; needed if there are k and v.
    cache_batch_idx : int32 array ``(b,)``, optional
        Which entry of the cache each entry of q uses; None = the same. Not with `page_table`.
        Entries that name the same one read the same cache; which of their new tokens stay there
        is not defined.
    cache_leftpad : int32 array ``(b,)``, optional
        The first valid position; keys before it are hidden. Positions of rotary stay those in the
        cache.
    page_table : int32 array ``(b, max_pages)``, optional
        Token p of entry e is row ``p % page_size`` of page ``page_table[e, p // page_size]``.
        Pages without a valid token may have any number.
    rotary_cos, rotary_sin : arrays, shape ``(s_rotary, d_rotary / 2)``, optional
        Of q's dtype or float32; ``d_rotary <= d``. New key t of an entry is turned by the angles
        at ``cache_seqlens + t`` before it is stored; query i, with `causal` or a window, by those
        at ``cache_seqlens + i``, otherwise every query by those at `cache_seqlens`.
    rotary_interleaved : bool, default True
        True: elements 0 and 1, 2 and 3, ... are turned together; False: element i and
        ``i + d_rotary / 2`` (GPT-NeoX).
    causal : bool, default True
        Aligned at the entry's own last token: query i sees positions ``<= i + length - sq``.
    window : (left, right), optional
    softmax_scale : float, default ``1 / sqrt(d)``
    softcap : float, optional
    alibi_slopes : float32 array ``(h,)`` or ``(b, h)``, optional
    sinks : float32 array ``(h,)``, optional
        These are `flash_attention`'s, an entry's length in the place of sk.
    num_splits : int, default 0
        Cut the keys of each entry into so many parts and merge the results; 0 = chosen, by what the
        GPU can run at a time; at most 128. Where the kernels below do not serve, 0 is 1, and there
        is one part with ALiBi, or a window and more than one query. It is exact either way.
    batch_invariant : bool, default False
        True: the bits of an entry's result depend on nothing but that entry.
    return_lse : bool, default False
        Also return lse.
    engine : None, "numpy", "simt" or "mma", default None
    q_descale, k_descale, v_descale : float or float32 array ``(b, hk)`` or ``(1, hk)``, default 1
        What FP8 numbers stand for is these factors times them: see `flash_attention` and
        `quantize_fp8`. A 16-bit q has none. New tokens have their caches' factors.
    out_dtype : dtype, default q's; for FP8 q bfloat16
        For FP8 caches float16, bfloat16 or float32. FP8 tokens cannot be turned by rotary
        positions, which would round them once more.

    Returns
    -------
    out : array, shape ``(b, sq, h, dv)``
        Rows that see no key are 0. With ``return_lse=True``: ``(out, lse)``; lse is ``(b, h, sq)``,
        float32 (float64 for float64), natural log, -inf for rows that see no key.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, NoDeviceError
        As `flash_attention`; ValueError also where tokens do not fit, a page does not exist, or
        angles are missing. All checks come before the first write.

    Notes
    -----
    Meanings are those of flash-attn's `flash_attn_with_kvcache`. There is no backward.

    With q on a GPU the arrays of int32 may be on the host, where they are checked, or on the
    device, where the host never reads them: lengths and left padding are then clamped to the cache,
    tokens that do not fit or whose page does not exist are dropped (queries stay aligned at the
    last token that is there), and pages that do not exist are read as the nearest that does.
    `cupyflash.kvcache.take_faults` tells whether that happened.

    Kernels of its own serve float16 and bfloat16 on compute capability 8.0 and above, with engine
    None or "mma", up to 256 queries times heads of a group, or 2**39 operations on a full cache
    (2 (d + dv) for each query, head and place) unless `batch_invariant`: one launch appends, one
    attends to the cache as it is, one combines the splits. Such calls can be captured in a CUDA
    graph after one like them, with lengths and page table on the device. They serve FP8 caches
    under 16-bit queries too, where the output has q's dtype; "simt" serves these otherwise.

    All others run the varlen forward: a cache whose entries lie one behind another is read where it
    is, only as far as it is filled, but with `page_table` or `cache_batch_idx` keys and values are
    copied first, up to the longest entry where the host knows it, else up to the capacity.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> rng = np.random.default_rng(0)
    >>> k_cache, v_cache = np.zeros((2, 1, 100, 2, 64), np.float32)
    >>> for length in range(3):
    ...     q = rng.standard_normal((1, 1, 8, 64), dtype=np.float32)
    ...     k, v = rng.standard_normal((2, 1, 1, 2, 64), dtype=np.float32)
    ...     out = cupyflash.flash_attention_with_kvcache(
    ...         q, k_cache, v_cache, k=k, v=v, cache_seqlens=length
    ...     )
    >>> out.shape
    (1, 1, 8, 64)
    """
    given = (  # recipe.GivenArrays
        q, k_cache, v_cache, k, v, cache_seqlens, cache_leftpad, cache_batch_idx, page_table,
        rotary_cos, rotary_sin, alibi_slopes, sinks, k_descale, v_descale,
    )  # fmt: skip
    settled = (
        causal, window, softmax_scale, softcap, rotary_interleaved, num_splits, batch_invariant,
        return_lse, engine, q_descale, out_dtype,
    )  # fmt: skip
    key, known, addresses = recipe.look_up(given, settled)
    result = None if known is None else known(addresses, cache_seqlens, return_lse)
    if result is not None:
        return result if return_lse else result[0]
    call = bind(
        q, k_cache, v_cache, k, v,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        page_table=page_table, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, num_splits=num_splits,
        flags={"batch_invariant": batch_invariant, "return_lse": return_lse},
        options={
            "causal": causal, "window": window, "softmax_scale": softmax_scale,
            "softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks, "engine": engine,
            "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
            "out_dtype": out_dtype,
        },
    )  # fmt: skip
    device = kernel_device(call.place, engine)
    with call.place.current():
        if device is not None:
            from cupyflash._kvcache import kernels

            if kernels.serve(call):
                result, kind, used = kernels.run(call, device, return_lse)
                if key is not None:
                    recipe.remember(key, kind, call, recipe.GivenArrays(*given), used)
                return result if return_lse else result[0]
        _engines.select(call.attention.problem, call.place, engine)
        require_rows(call.storage, call.entries, len(call.query))
        query = _appended(call)
        rows = rows_of(call.storage, call.entries, len(query), call.place.namespace)
        one_by_one = batch_invariant and len(query) > 0
        out, lse = (attend_one_by_one if one_by_one else attend)(
            query, rows, call.entries, max(call.num_splits, 1), call.options
        )
        return (out, call.place.namespace.ascontiguousarray(lse)) if return_lse else out


def take_faults(device_id: int | None = None) -> CacheFaults:
    """Return what calls on a GPU found wrong with device values since this was last asked.

    Parameters
    ----------
    device_id : int, optional
        CUDA's device number; default: the current device.

    Raises
    ------
    NoDeviceError
        There is no GPU.

    Notes
    -----
    This waits for the current stream, which calls never do. Values on the host are checked before
    anything is written, and never get here.
    """
    from cupyflash._cuda import decode

    if device_id is None:
        device_id = require_cupy().cuda.runtime.getDevice()
    return CacheFaults(*decode.take_faults(device_id))


def _appended(call: CacheCall) -> Array:
    """Append the new tokens; return the queries, turned to their positions."""
    if call.new is None:
        return call.query
    xp, query, (key, value) = call.place.namespace, call.query, call.new
    used = xp.asarray(call.entries.used)[:, None]
    positions = used + xp.arange(key.shape[1])
    if call.rotary is not None:
        steps = xp.arange(query.shape[1])
        query = call.rotary.turned(query, used + steps * call.rotates_each_query, xp)
        key = call.rotary.turned(key, positions, xp)
    if call.quantizes:
        problem, operands = call.attention.problem, call.attention.operands
        key = quantized(key, problem.key_scale, operands.key_descale, xp)
        value = quantized(value, problem.value_scale, operands.value_descale, xp)
    append(call.storage, key, value, positions, call.place)
    return query
