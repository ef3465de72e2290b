"""What the kernels are told of a call on a cache: a problem, arrays where they run, a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from cupyflash import _options
from cupyflash._arrays import FLOAT_DTYPES, contiguous_last_axis
from cupyflash._cuda.arguments import alignment
from cupyflash._cuda.decode import CacheLayout
from cupyflash._cuda.plan_decode import CacheProblem
from cupyflash._kvcache.call import CacheCall

Array = Any


class CacheArrays(NamedTuple):
    """All arrays of a call on one device; None: not given."""

    query: Array
    key: Array  # caches
    value: Array
    new_key: Array | None
    new_value: Array | None
    lengths: Array | None  # int32 (b,)
    leftpad: Array | None
    blocks: Array | None  # int32 (b, blocks of an entry)
    cos: Array | None
    sin: Array | None
    alibi_slopes: Array | None  # (1 or b, h)
    sinks: Array | None
    key_descale: Array | None  # (1 or b, hk)
    value_descale: Array | None


def arrays_of(call: CacheCall) -> CacheArrays:
    """Return the arrays of a checked call; small ones are brought to the device of the others."""
    xp, storage, operands = call.place.namespace, call.storage, call.attention.operands
    new_key, new_value = call.new or (None, None)
    query, new_key, new_value = (
        None if x is None else contiguous_last_axis(x) for x in (call.query, new_key, new_value)
    )
    lengths = None if isinstance(call.lengths, int) else call.lengths
    lengths, leftpad, blocks = (
        None if x is None else xp.asarray(x) for x in (lengths, call.leftpad, storage.blocks)
    )
    cos, sin = (None, None) if call.rotary is None else (call.rotary.cos, call.rotary.sin)
    return CacheArrays(
        query, storage.key, storage.value, new_key, new_value, lengths, leftpad, blocks, cos, sin,
        operands.alibi_slopes, operands.sinks, operands.key_descale, operands.value_descale,
    )  # fmt: skip


def problem_of(call: CacheCall) -> CacheProblem:
    """Return what is asked."""
    query, storage = call.query, call.storage
    batch, seqlen_q = query.shape[:2]
    bound = call.attention.problem
    left, right = _options.window(call.options["window"], reach=seqlen_q + storage.capacity)
    attention = replace(
        bound,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=storage.capacity,
        window_left=left,
        window_right=0 if bound.causal else right,
        varlen=False,
    )
    rotary = call.rotary
    return CacheProblem(
        attention,
        page_size=storage.key.shape[1] if storage.paged else 0,
        new_tokens=0 if call.new is None else call.new[0].shape[1],
        new_dtype=bound.dtype if call.quantizes else None,
        key_factors=call.attention.operands.key_descale is not None,
        rotary_dtype=None if rotary is None else FLOAT_DTYPES[rotary.cos.dtype],
        interleaved=rotary is None or rotary.interleaved,
    )


def layout_of(call: CacheCall, arrays: CacheArrays, addresses: list[int]) -> CacheLayout:
    """Return strides and alignments; `addresses` are those of `arrays`."""

    def strides(array: Array | None, axes: int) -> tuple[int, ...]:
        return (0,) * axes if array is None else tuple(array.strides)

    def by_head(array: Array | None) -> tuple[int, ...]:
        if array is not None and array.shape[0] == 1:
            return 0, array.strides[1]
        return strides(array, 2)

    new_key, new_value = arrays.new_key, arrays.new_value
    return CacheLayout(
        query=arrays.query.strides,
        key=arrays.key.strides,
        value=arrays.value.strides,
        new_key=None if new_key is None else new_key.strides,
        new_value=None if new_value is None else new_value.strides,
        lengths=strides(arrays.lengths, 1),
        leftpad=strides(arrays.leftpad, 1),
        blocks=strides(arrays.blocks, 2),
        cos=strides(arrays.cos, 2),
        sin=strides(arrays.sin, 2),
        rotary_shape=(0, 0) if arrays.cos is None else tuple(arrays.cos.shape),
        alibi_slopes=by_head(arrays.alibi_slopes),
        sinks=strides(arrays.sinks, 1),
        key_descale=by_head(arrays.key_descale),
        value_descale=by_head(arrays.value_descale),
        num_blocks=len(arrays.key),
        turns_each_query=call.rotates_each_query,
        read_alignment=alignment(addresses[:3]),
        new_alignment=alignment(addresses[1:5]),
    )
