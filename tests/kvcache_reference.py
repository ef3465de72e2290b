"""A cache written out token by token: where each stands, what is appended, and dense attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests import reference

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


def appended(arguments: dict[str, Any]) -> tuple[Array, Array, Array]:
    """Return the caches with the new tokens, in float64, and where there are such, bool."""
    key, value = (arguments[name].astype(np.float64) for name in ("k_cache", "v_cache"))
    written = np.zeros(key.shape[:2], bool)
    if arguments.get("k") is not None:
        for e, first in enumerate(lengths(arguments)[0]):
            positions = range(first, first + arguments["k"].shape[1])
            keys = turned(arguments["k"][e], positions, arguments)
            for t, position in enumerate(positions):
                index = place(e, position, arguments)
                key[index], value[index] = keys[t], arguments["v"][e, t].astype(np.float64)
                written[index] = True
    return key, value, written


def attention(arguments: dict[str, Any], key: Array, value: Array, dtype: Any) -> reference.Dense:
    """Out ``(b, sq, h, dv)`` and lse ``(b, h, sq)`` over the caches after the append."""
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
            key[index][None],
            value[index][None],
            causal=causal,
            window=window,
            softmax_scale=arguments.get("softmax_scale"),
            softcap=arguments.get("softcap"),
            alibi_slopes=slopes if np.ndim(slopes) < 2 else slopes[e],
            sinks=arguments.get("sinks"),
            dtype=dtype,
            inputs=q.dtype,
        )
        entries.append(dense)
    fields = (np.concatenate([getattr(x, name) for x in entries]) for name in reference.FORWARD)
    noise = {name: max(x.noise[name] for x in entries) for name in entries[0].noise}
    return reference.Dense(*fields, noise=noise)
