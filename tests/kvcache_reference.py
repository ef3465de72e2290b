"""A cache written out token by token: where each stands, what is appended, and dense attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests import reference
from tests.cases import FLOAT8

Array = Any


def place(e: int, p: int, arguments: dict[str, Any]) -> tuple[int, int]:
    """Index into the caches' first two axes of position p of entry e."""
    if arguments.get("page_table") is not None:
        size = arguments["k_cache"].shape[1]
        return int(arguments["page_table"][e, p // size]), p % size
    chosen = arguments.get("cache_batch_idx")
    return e if chosen is None else int(chosen[e]), p


def lengths(arguments: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Tokens of each entry before and after the append."""
    batch, used = arguments["q"].shape[0], arguments.get("cache_seqlens")
    if used is None:
        table, capacity = arguments.get("page_table"), arguments["k_cache"].shape[1]
        used = capacity if table is None else capacity * table.shape[1]
    before = [int(n) for n in np.broadcast_to(used, batch)]
    new = 0 if arguments.get("k") is None else arguments["k"].shape[1]
    return before, [n + new for n in before]


def turned(x: Array, positions: Any, arguments: dict[str, Any]) -> Array:
    """Tokens ``(s, heads, d)`` in float64, each pair a complex number that is turned."""
    x = x.astype(np.float64)
    if arguments.get("rotary_cos") is None:
        return x
    cos, sin = (arguments[f"rotary_{name}"].astype(np.float64) for name in ("cos", "sin"))
    half, result = cos.shape[1], x.copy()
    for pair in range(half):
        interleaved = arguments.get("rotary_interleaved", True)
        one, two = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        angles = cos[list(positions), pair] + 1j * sin[list(positions), pair]
        numbers = (x[..., one] + 1j * x[..., two]) * angles[:, None]
        result[..., one], result[..., two] = numbers.real, numbers.imag
    return result


def descale(name: str, e: int, arguments: dict[str, Any]) -> Array:
    """What the numbers of "k" or "v" of entry e are to be multiplied by, float32 ``(hk, 1)``."""
    given = arguments.get(f"{name}_descale")
    batch, heads_kv = arguments["q"].shape[0], arguments["k_cache"].shape[2]
    factors = np.asarray(1 if given is None else given, np.float32)
    return np.broadcast_to(factors, (batch, heads_kv))[e, :, None]


def stored(x: Array, name: str, e: int, arguments: dict[str, Any]) -> Array:
    """What of a token ``(hk, d)`` gets into the cache, in float64; FP8 rounds by ml_dtypes."""
    if arguments["k_cache"].dtype != FLOAT8 or arguments[name].dtype == FLOAT8:
        return x
    x = x.astype(np.float64) / descale(name, e, arguments)
    if name == "k" and arguments.get("rotary_cos") is not None:
        return np.clip(x, -448, 448)  # not rounded, as it was not to 16 bits either
    return np.clip(x.astype(np.float32), -448, 448).astype(FLOAT8).astype(np.float64)


def appended(arguments: dict[str, Any]) -> tuple[Array, Array, Array]:
    """Return the caches' numbers with the new tokens, float64, and where there are such, bool."""
    key, value = (arguments[name].astype(np.float64) for name in ("k_cache", "v_cache"))
    written = np.zeros(key.shape[:2], bool)
    if arguments.get("k") is not None:
        for e, first in enumerate(lengths(arguments)[0]):
            positions = range(first, first + arguments["k"].shape[1])
            keys = turned(arguments["k"][e], positions, arguments)
            for t, position in enumerate(positions):
                index = place(e, position, arguments)
                key[index] = stored(keys[t], "k", e, arguments)
                value[index] = stored(arguments["v"][e, t].astype(np.float64), "v", e, arguments)
                written[index] = True
    return key, value, written


def attention(arguments: dict[str, Any], key: Array, value: Array, dtype: Any) -> reference.Dense:
    """Out ``(b, sq, h, dv)`` and lse ``(b, h, sq)`` over the caches' numbers after the append."""
    q, window = arguments["q"], arguments.get("window")
    causal = arguments.get("causal", True)
    seqlen_q, slopes = q.shape[1], arguments.get("alibi_slopes")
    pad = arguments.get("cache_leftpad")
    each = causal or any(side is not None for side in window or ())
    entries = []
    for e, (before, after) in enumerate(zip(*lengths(arguments), strict=True)):
        positions = range(0 if pad is None else int(pad[e]), after)
        index = tuple(np.array([place(e, p, arguments) for p in positions], int).reshape(-1, 2).T)
        dense = reference.attention(
            turned(q[e], [before + i * each for i in range(seqlen_q)], arguments)[None],
            (key[index] * descale("k", e, arguments).astype(np.float64))[None],
            (value[index] * descale("v", e, arguments).astype(np.float64))[None],
            causal=causal,
            window=window,
            softmax_scale=arguments.get("softmax_scale"),
            softcap=arguments.get("softcap"),
            alibi_slopes=slopes if np.ndim(slopes) < 2 else slopes[e],
            sinks=arguments.get("sinks"),
            dtype=dtype,
            inputs=q.dtype,
            turned=arguments.get("rotary_cos") is not None,
        )
        entries.append(dense)
    fields = (np.concatenate([getattr(x, name) for x in entries]) for name in reference.FORWARD)
    noise = {name: max(x.noise[name] for x in entries) for name in entries[0].noise}
    return reference.Dense(*fields, noise=noise)
