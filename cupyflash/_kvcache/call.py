"""From the caller's arguments to a checked call: every check happens here, before any write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import _options, _validate
from cupyflash._arrays import (
    HOST,
    Place,
    as_array,
    as_operand,
    describe,
    is_cupy,
    is_float8,
    memory_overlaps,
    overlaps_itself,
    place_of,
    require_place,
)
from cupyflash._kvcache.entries import Entries, bind_entries, index_array, lengths_as_given
from cupyflash._kvcache.rotary import Rotary, bind_rotary, require_angles
from cupyflash._kvcache.storage import Storage, bind_storage, require_pages
from cupyflash._options import Options
from cupyflash._validate import Sequences
from cupyflash.errors import UnsupportedError

Array = Any

MAX_PARTS = 128  # more than any GPU could use for one entry; each costs memory
# Options that may be arrays with an axis of entries.
PER_ENTRY = ("alibi_slopes", "q_descale", "k_descale", "v_descale")


@dataclass(frozen=True)
class CacheCall:
    """One checked call."""

    place: Place
    query: Array
    new: tuple[Array, Array] | None  # k and v to append
    storage: Storage
    entries: Entries
    rotary: Rotary | None
    rotates_each_query: bool  # else all stand at the position of the first
    num_splits: int  # 0 = chosen
    batch_invariant: bool
    lengths: int | Array  # tokens before the append as given: of all entries, or int32 (b,)
    leftpad: Array | None  # as given, int32 (b,)
    options: dict[str, Any]  # of the attention itself
    attention: _validate.Call  # the same checked, for queries without keys

    @property
    def quantizes(self) -> bool:
        """Whether new tokens are 16-bit and the caches FP8."""
        return self.new is not None and self.new[0].dtype != self.storage.key.dtype


def bind(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    *,
    cache_seqlens: Any,
    cache_batch_idx: Any,
    cache_leftpad: Any,
    page_table: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    rotary_interleaved: Any,
    num_splits: Any,
    flags: dict[str, Any],
    options: dict[str, Any],
) -> CacheCall:
    """Check one call; errors as in `flash_attention_with_kvcache`."""
    query = as_operand(q, "q")
    place = place_of(query)
    _options.require_bools(**flags)
    splits = _options.integer(num_splits, "num_splits")
    if splits < 0:
        raise ValueError(f"num_splits must be >= 0 (0 = chosen), got {num_splits!r}")
    key, value = _caches(query, k_cache, v_cache, place)
    new = _new_tokens(query, key, value, k, v, place)
    options, attention = _bound_options(query, key, value, options, place)
    storage = bind_storage(key, value, cache_batch_idx, page_table, query.shape[0], place)
    new_length = 0 if new is None else new[0].shape[1]
    if new is not None and cache_seqlens is None:
        raise ValueError(
            "k and v are appended at cache_seqlens, which is missing; 0 = an empty cache"
        )
    entries = bind_entries(
        cache_seqlens, cache_leftpad, query.shape[0], new_length, storage.capacity, place
    )
    require_pages(storage, entries)
    turned = query if new is None else new[0]
    if is_float8(turned) and not (rotary_cos is None and rotary_sin is None):
        raise UnsupportedError(
            "rotary_cos and rotary_sin turn q and the new k, which FP8 would round once more; "
            "turn them before quantize_fp8, or give q, k and v as float16 or bfloat16"
        )
    rotary = bind_rotary(rotary_cos, rotary_sin, rotary_interleaved, query, place)
    windowed = any(side is not None for side in options["window"] or ())
    each = bool(options["causal"]) or windowed
    if rotary is not None:
        turned = max(new_length, query.shape[1] if each else min(query.shape[1], 1))
        require_angles(rotary, entries, turned, storage.capacity)
    if new is not None:
        _require_writable("k_cache", k_cache, key)
        _require_writable("v_cache", v_cache, value)
        _require_apart(query, key, value, new)
    elif rotary is not None:
        raise ValueError(
            "rotary_cos and rotary_sin turn q and the new k; k and v are missing "
            "(turn q yourself if nothing is appended)"
        )
    return CacheCall(
        place,
        query,
        new,
        storage,
        entries,
        rotary,
        each,
        min(splits, MAX_PARTS),
        bool(flags["batch_invariant"]),
        lengths_as_given(cache_seqlens, storage.capacity, place),
        None if cache_leftpad is None else index_array(cache_leftpad, "cache_leftpad", place),
        options,
        attention,
    )


def _caches(query: Array, k_cache: Any, v_cache: Any, place: Place) -> tuple[Array, Array]:
    if query.ndim != 4:
        raise ValueError(f"q must have 4 axes (b, sq, h, d), got {describe(query)}")
    key, value = as_operand(k_cache, "k_cache"), as_operand(v_cache, "v_cache")
    for name, cache in (("k_cache", key), ("v_cache", value)):
        require_place(cache, name, place)
        _require_cache_dtype(name, cache, query)
        if cache.ndim != 4:
            raise ValueError(
                f"{name} must have 4 axes, (b_cache, s_cache, hk, d) or with page_table "
                f"(num_pages, page_size, hk, d), got {describe(cache)}"
            )
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"k_cache must have q's head_dim {query.shape[3]}, got {describe(key)}")
    if not _validate.is_grouped(query.shape[2], key.shape[2]):
        raise ValueError(
            f"q's {query.shape[2]} heads must be a positive multiple of k_cache's {key.shape[2]} "
            f"heads, which are its third axis: got q {describe(query)}, k_cache {describe(key)}"
        )
    if value.dtype != key.dtype:
        raise TypeError(
            f"v_cache must have k_cache's dtype {key.dtype}, got {describe(value)}; use .astype"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"v_cache must have k_cache's first axes {tuple(key.shape[:3])}, got {describe(value)}"
        )
    return key, value


def _new_tokens(
    query: Array, key: Array, value: Array, k: Any, v: Any, place: Place
) -> tuple[Array, Array] | None:
    if k is None and v is None:
        return None
    if k is None or v is None:
        raise ValueError(f"k and v go together; {'k' if k is None else 'v'} is missing")
    new_key, new_value = as_operand(k, "k"), as_operand(v, "v")
    length = new_key.shape[1] if new_key.ndim == 4 else "s_new"
    for name, new, cache in (("k", new_key, key), ("v", new_value, value)):
        require_place(new, name, place)
        _require_new_dtype(name, new, query, cache)
        expected = (query.shape[0], length, *cache.shape[2:])
        if tuple(new.shape) != expected:
            raise ValueError(
                f"{name} must have shape (b, s_new, hk, d) = {expected} as q and {name}_cache "
                f"have, got {describe(new)}"
            )
    if new_value.dtype != new_key.dtype:
        raise TypeError(
            f"v must have k's dtype {new_key.dtype}, got {describe(new_value)}; use .astype"
        )
    return new_key, new_value


def _require_cache_dtype(name: str, cache: Array, query: Array) -> None:
    sixteen_bits = query.dtype in _validate.CACHED_AS_FLOAT8
    if cache.dtype != query.dtype and not (sixteen_bits and is_float8(cache)):
        alternative = " or float8_e4m3fn" if sixteen_bits else ""
        raise TypeError(
            f"{name} must have q's dtype {query.dtype}{alternative}, got {describe(cache)}; "
            "use .astype"
        )


def _require_new_dtype(name: str, new: Array, query: Array, cache: Array) -> None:
    if new.dtype not in (query.dtype, cache.dtype):
        alternative = "" if cache.dtype == query.dtype else " or float8_e4m3fn as its cache"
        raise TypeError(
            f"{name} must have q's dtype {query.dtype}{alternative}, got {describe(new)}; "
            "use .astype"
        )


def _bound_options(
    query: Array, key: Array, value: Array, options: dict[str, Any], place: Place
) -> tuple[dict[str, Any], _validate.Call]:
    """Let the core check the options, on one row in the place of all."""
    causal, top_left = _options.alignment(options["causal"])
    if top_left:
        raise ValueError(
            "causal must be True or False: the queries are an entry's last tokens, got 'top-left'"
        )
    batch, seqlen_q, num_heads, _ = query.shape
    xp = place.namespace
    with place.current():

        def rows(length: int, heads: int, like: Array) -> Array:
            row = xp.empty((1, 1, like.shape[3]), like.dtype)
            return xp.broadcast_to(row, (length, heads, like.shape[3]))

        ends = np.arange(batch + 1, dtype=np.int32) * np.int32(seqlen_q)
        call = _validate.bind(
            rows(batch * seqlen_q, num_heads, query),
            rows(0, key.shape[2], key),
            rows(0, key.shape[2], value),
            Options(**options),
            sequences=Sequences(ends, np.zeros_like(ends), of_cache=True),
        )
    taken = {
        name: as_array(options[name], name)
        for name in PER_ENTRY
        if options[name] is not None and not isinstance(options[name], (int, float, np.number))
    }
    return options | {"causal": causal} | taken, call


# --- what is written -----------------------------------------------------------------------------


def _require_writable(name: str, given: Any, cache: Array) -> None:
    if isinstance(cache, np.ndarray) and not cache.flags.writeable:
        raise ValueError(f"{name} is read-only, and k and v are to be written into it")
    if overlaps_itself(cache):
        raise ValueError(f"{name} has elements that share memory (strides {cache.strides})")
    taken_as_is = isinstance(given, np.ndarray) or is_cupy(given)
    if place_of(cache) == HOST and not taken_as_is and cache.size:
        again = as_operand(given, name)  # a copy would be written into, and nobody would see it
        if not memory_overlaps(again, cache):
            raise TypeError(
                f"{name} ({type(given).__module__}.{type(given).__name__}) does not share its "
                "memory, and k and v are to be written into it; use numpy.asarray first"
            )


def _require_apart(query: Array, key: Array, value: Array, new: tuple[Array, Array]) -> None:
    pairs = (
        ("k_cache", key, {"v_cache": value, "q": query, "k": new[0], "v": new[1]}),
        ("v_cache", value, {"q": query, "k": new[0], "v": new[1]}),
    )
    for name, cache, others in pairs:
        for other, array in others.items():
            if memory_overlaps(cache, array):
                raise ValueError(f"{name} overlaps {other} in memory; give it memory of its own")
