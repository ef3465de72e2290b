"""One query an entry, its last token: the usual step of generation is less than attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupyflash._arrays import place_of
from cupyflash._kvcache.entries import Entries

Array = Any


def without_window(entries: Entries, options: dict[str, Any]) -> tuple[Entries, dict[str, Any]]:
    """Causality hides nothing from a last token, and a window means that keys begin later."""
    left, _ = options["window"] or (None, None)
    if left is not None:
        xp = place_of(entries.end).namespace
        first = entries.end - 1 - min(left, entries.longest)
        entries = replace(entries, begin=xp.maximum(entries.begin, first))
    return entries, options | {"causal": False, "window": None}


def grouped(query: Array, heads_kv: int, options: dict[str, Any]) -> Array:
    """View ``(b, 1, h, d)`` as ``(b, h / hk, hk, d)``: a group's heads as queries of one head.

    Not where options tell the heads of a group from one another.
    """
    if options["alibi_slopes"] is not None or options["sinks"] is not None:
        return query
    batch, _, num_heads, head_dim = query.shape
    return query.reshape(batch, heads_kv, num_heads // heads_kv, head_dim).swapaxes(1, 2)


def ungrouped(out: Array, lse: Array) -> tuple[Array, Array]:
    """Return out ``(b, 1, h, dv)`` and lse ``(b, h, 1)`` of such queries."""
    batch, group, heads_kv, width = out.shape
    num_heads = group * heads_kv
    return out.swapaxes(1, 2).reshape(batch, 1, num_heads, width), lse.reshape(batch, num_heads, 1)
