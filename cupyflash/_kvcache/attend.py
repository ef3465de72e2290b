"""The attention of queries over rows of the cache, by the varlen forward."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from cupyflash._arrays import place_of
from cupyflash._kvcache.call import PER_ENTRY
from cupyflash._kvcache.entries import Entries
from cupyflash._kvcache.last_token import grouped, ungrouped, without_window
from cupyflash._kvcache.rows import Rows
from cupyflash.merge import merge_states
from cupyflash.varlen import forward_over_cache

Array = Any


def attend(
    query: Array, rows: Rows, entries: Entries, num_splits: int, options: dict[str, Any]
) -> tuple[Array, Array]:
    """Return out ``(b, sq, h, dv)`` and lse ``(b, h, sq)``."""
    if query.shape[1] != 1:
        return _split(query, rows, entries, num_splits, options)
    entries, options = without_window(entries, options)
    query = grouped(query, rows.key.shape[1], options)
    return ungrouped(*_split(query, rows, entries, num_splits, options))


def _split(
    query: Array, rows: Rows, entries: Entries, num_splits: int, options: dict[str, Any]
) -> tuple[Array, Array]:
    """Return out and lse, merged from parts of the keys.

    With splits the keys that every query sees are cut into ``num_splits - 1`` parts. The rest is
    the last part, whose end is the entry's own, so that it alone knows of causality; sinks belong
    to it, too.
    """
    xp = place_of(entries.end).namespace
    seqlen_q = query.shape[1]
    begin, end = entries.begin[:, None], entries.end[:, None]
    # A window or ALiBi measures from the entry's end, which a leading part does not know.
    windowed = any(side is not None for side in options["window"] or ())
    if num_splits == 1 or windowed or options["alibi_slopes"] is not None:
        out, lse = _parts(query, rows, xp.concatenate([begin, end], axis=1), options)
        return out[:, 0], lse[:, 0]
    cuts = begin + (end - begin) * xp.arange(num_splits) // num_splits
    if options["causal"]:
        cuts = xp.minimum(cuts, xp.maximum(begin, end - seqlen_q + 1))
    leading = options | {"causal": False, "sinks": None}
    out, lse = _parts(query, rows, cuts, leading)
    last_out, last_lse = _parts(query, rows, xp.concatenate([cuts[:, -1:], end], axis=1), options)
    outs = [*(out[:, part] for part in range(num_splits - 1)), last_out[:, 0]]
    lses = [*(lse[:, part] for part in range(num_splits - 1)), last_lse[:, 0]]
    return merge_states(outs, lses)


def attend_one_by_one(
    query: Array, rows: Rows, entries: Entries, num_splits: int, options: dict[str, Any]
) -> tuple[Array, Array]:
    """`attend`, each entry in a call of its own, so that no plan depends on the others."""
    results = []
    batch = query.shape[0]
    for entry in range(batch):
        one = slice(entry, entry + 1)
        mine = Entries(entries.begin[one], entries.used[one], entries.end[one], entries.longest)
        stop = int(mine.end[0]) if entries.on_host else entries.longest
        part = slice(entry * rows.step, entry * rows.step + stop)
        own = _with_entries(options, batch, operator.itemgetter(one))
        own_rows = Rows(rows.key[part], rows.value[part], rows.step)
        results.append(attend(query[one], own_rows, mine, num_splits, own))
    xp = place_of(query).namespace
    out, lse = (xp.concatenate(parts) for parts in zip(*results, strict=True))
    return out, lse


def _with_entries(
    options: dict[str, Any], batch: int, change: Callable[[Array], Array]
) -> dict[str, Any]:
    """`options` with other entries in those that have an axis of them."""
    found = {name: options[name] for name in PER_ENTRY}
    return options | {
        name: change(x)
        for name, x in found.items()
        if getattr(x, "ndim", 0) == 2 and len(x) == batch
    }


def _parts(query: Array, rows: Rows, edges: Array, options: dict[str, Any]) -> tuple[Array, Array]:
    """Attend each entry to its keys between neighbouring edges ``(b, parts + 1)``.

    Returns out ``(b, parts, sq, h, dv)`` and lse ``(b, parts, h, sq)``. What lies before an entry's
    first edge is a sequence without queries, so the rows need not be packed.
    """
    xp = place_of(edges).namespace
    batch, seqlen_q, num_heads, head_dim = query.shape
    parts = edges.shape[1] - 1
    entry = xp.arange(batch)[:, None]
    ends_q = (entry * parts + xp.arange(parts + 1)) * seqlen_q
    ends_k = entry * rows.step + edges
    cu_seqlens = (
        xp.concatenate([xp.zeros(1, np.int32), ends.reshape(-1).astype(np.int32)])
        for ends in (ends_q, ends_k)
    )
    array = place_of(query).namespace
    repeated = array.broadcast_to(
        query[:, None], (batch, parts, seqlen_q, num_heads, head_dim)
    ).reshape(-1, num_heads, head_dim)
    options = _with_entries(options, batch, lambda x: array.repeat(x, parts + 1, axis=0))
    out, saved = forward_over_cache(repeated, rows.key, rows.value, *cu_seqlens, **options)
    lse = saved.lse.reshape(num_heads, batch, parts, seqlen_q).transpose(1, 2, 0, 3)
    return out.reshape(batch, parts, seqlen_q, num_heads, out.shape[-1]), lse
