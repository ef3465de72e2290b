"""Drawing one call on a cache, running it on an engine, and judging all that it changed."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

import cupyflash
from tests import kvcache_reference as reference
from tests.cases import DTYPES, FLOAT8
from tests.harness import require, same_bits
from tests.memory import fill_nan, poisoned, to_engine, to_host
from tests.tolerance import EPSILON, assert_result

Array = Any
FEATURES = ("causal", "window", "softcap", "alibi_slopes", "sinks")  # that engines may lack


def draw(
    rng: Any,
    *,
    seqlen_q: int = 1,
    seqlen_k: int = 40,  # tokens of the longest entry, after the append
    head_dim: int = 32,
    head_dim_v: int | None = None,
    batch: int = 3,
    heads: tuple[int, int] = (4, 2),
    dtype: str = "float32",
    cache_dtype: Any = None,  # FLOAT8: of the caches
    new_dtype: Any = None,  # of new tokens; both default to dtype
    new: int = 0,
    rotary: float = 0,
    page_size: int | None = None,
    leftpad: bool = False,
    shuffled: bool = False,  # cache_batch_idx
    strides: str = "dense",
    **options: Any,
) -> dict[str, Any]:
    """Arguments of a call, as NumPy arrays. Tokens that nobody may read are NaN."""
    kind, (num_heads, heads_kv) = DTYPES[dtype], heads
    widths = {"k_cache": head_dim, "v_cache": head_dim_v or head_dim}

    def normal(*shape: int) -> Array:
        return rng.normal(size=shape).astype(kind)

    cache_kind, new_kind = cache_dtype or kind, new_dtype or kind
    used = rng.integers(0, seqlen_k - new + 1, batch).astype(np.int32)
    used[rng.permutation(batch)[:2]] = [0, seqlen_k - new][-min(batch, 2) :]
    arguments: dict[str, Any] = {"q": normal(batch, seqlen_q, num_heads, head_dim)}
    arguments |= {"cache_seqlens": used} | options
    if page_size is None:
        spare = (batch + 2 * shuffled, seqlen_k + int(rng.integers(3)))
        if shuffled:
            arguments["cache_batch_idx"] = rng.permutation(spare[0])[:batch].astype(np.int32)
    else:
        pages = -(-seqlen_k // page_size)
        spare = (batch * pages + 3, page_size)
        table = rng.permutation(spare[0])[: batch * pages].reshape(batch, pages).astype(np.int32)
        needed = -(-(used + new) // page_size)
        table[np.arange(pages) >= needed[:, None]] = rng.choice([-1, 2**31 - 1])  # never looked at
        arguments["page_table"] = table
    for name, width in widths.items():
        arguments[name] = fill_nan(_empty((*spare, heads_kv, width), cache_kind, strides))
    pad = np.zeros(batch, np.int32)
    if leftpad:
        pad = rng.integers(0, used + 1).astype(np.int32)
        arguments["cache_leftpad"] = pad
    for e in range(batch):
        for p in range(pad[e], used[e]):
            for name, width in widths.items():
                arguments[name][reference.place(e, p, arguments)] = normal(heads_kv, width)
    if new:
        arguments["k"] = normal(batch, new, heads_kv, head_dim).astype(new_kind)
        arguments["v"] = normal(batch, new, heads_kv, widths["v_cache"]).astype(new_kind)
    if rotary:
        capacity = spare[1] if page_size is None else pages * page_size
        angles = rng.uniform(0, 7, (capacity + seqlen_q, int(head_dim * rotary) // 2))
        arguments |= {f"rotary_{f.__name__}": f(angles).astype(kind) for f in (np.cos, np.sin)}
    return arguments


def _empty(shape: tuple[int, ...], dtype: Any, strides: str) -> Array:
    """A cache of these strides: a part of a longer one, heads before tokens, or tokens first."""
    entries, length, heads, width = shape
    if strides == "part":
        return np.zeros((entries, length + 5, heads, width), dtype)[:, 2:-3]
    if strides == "heads first":
        return np.zeros((entries, heads, length, width), dtype).swapaxes(1, 2)
    if strides == "tokens first":
        return np.zeros((length, entries, heads, width), dtype).swapaxes(0, 1)
    if strides == "gaps":
        return np.zeros((entries, length, heads, 2 * width), dtype)[..., ::2]
    return np.zeros(shape, dtype)


def call(
    engine: str, arguments: dict[str, Any], on_host: Any = (), **more: Any
) -> tuple[Array, Array, Array, Array]:
    """Out, lse and both caches afterwards, on the host; `arguments` stay as they are.

    Those named in `on_host` are NumPy arrays on every engine.
    """
    require(engine, "varlen", *_features(arguments))
    copies = {name: _copy(value) for name, value in arguments.items()}
    placed = {
        name: value if name in on_host else to_engine(engine, value)
        for name, value in copies.items()
    }
    with poisoned(engine):
        results = cupyflash.flash_attention_with_kvcache(
            **placed, return_lse=True, engine=engine, **more
        )
        out, lse, key, value = map(to_host, (*results, placed["k_cache"], placed["v_cache"]))
    kind = arguments["k_cache"].dtype  # on a GPU FP8 is uint8
    return out, lse, key.view(kind), value.view(kind)


def _copy(x: Any) -> Any:
    """A copy with the same strides."""
    if not isinstance(x, np.ndarray) or x.size == 0:
        return x
    first, end = np.lib.array_utils.byte_bounds(x)
    memory = np.frombuffer((ctypes.c_char * (end - first)).from_address(first), "u1").copy()
    offset = x.__array_interface__["data"][0] - first
    return np.ndarray(x.shape, x.dtype, memory, offset, x.strides)


def _features(arguments: dict[str, Any]) -> set[str]:
    names = {name for name in FEATURES if arguments.get(name) is not None}
    return {"alibi" if name == "alibi_slopes" else name for name in names} - {"causal"}


def check(engine: str, arguments: dict[str, Any], **more: Any) -> tuple[Array, Array]:
    """Run a call; out, lse and every byte of the caches must be right."""
    out, lse, key, value = call(engine, arguments, **more)
    dtype, q = arguments["q"].dtype, arguments["q"]
    assert out.dtype == dtype and out.shape == (*q.shape[:3], value.shape[3])
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    right_key, right_value, written = reference.appended(arguments)
    kind = key.dtype
    for got, given in ((key, arguments["k_cache"]), (value, arguments["v_cache"])):
        assert same_bits(got[~written], given[~written]), "bytes of other tokens changed"
    assert same_bits(value[written], right_value[written].astype(kind)), "v is not as given"
    stored, meant = key[written].astype(np.float64), right_key[written]
    # Turned in float32 or wider, and rounded once; with FP8 a second time, to a multiple of 2**-9.
    turning = 4 * EPSILON["float64" if dtype == np.float64 else "float32"]
    allowed = EPSILON[dtype.name] / 2 * np.abs(meant) + turning * np.abs(meant).max(initial=1)
    if kind == FLOAT8:
        allowed += np.maximum(2.0**-4 * np.abs(meant), 2.0**-10)
    assert (np.abs(stored - meant) <= allowed).all(), "k is not turned right"
    if arguments.get("rotary_cos") is None:
        assert same_bits(key[written], meant.astype(kind)), "k is not as given"
    caches = key.astype(np.float64), value.astype(np.float64)
    wide = np.longdouble if dtype == np.float64 else np.float64
    exact, dense, single = (
        reference.attention(arguments, *caches, kind)
        for kind in (wide, dtype, np.float64 if dtype == np.float64 else np.float32)
    )
    assert_result("out", out, exact, dense)
    # A turned query is rounded to its dtype; else lse is computed wider than that.
    yardstick = single if arguments.get("rotary_cos") is None else dense
    assert_result("lse", lse, exact, yardstick)
    return out, lse
