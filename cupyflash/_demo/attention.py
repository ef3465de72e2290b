"""The attention step of a packed encoder, in three ways that give the same numbers.

Each takes ``query, key, value`` of shape ``(total_tokens, num_heads, head_dim)`` and the host array
``cu_seqlens`` ``(b + 1,)`` of sentence bounds, and returns ``(total_tokens, num_heads, head_dim)``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

import cupyflash
from cupyflash._arrays import place_of
from cupyflash._demo.dense import dense_forward

__all__ = ["dense_attention", "packed_attention", "padded_attention"]

Array = Any


def packed_attention(query: Array, key: Array, value: Array, cu_seqlens: Array) -> Array:
    """Sentences one after the other, nothing wasted on padding."""
    return cupyflash.flash_attention_varlen(query, key, value, cu_seqlens, cu_seqlens)


def padded_attention(query: Array, key: Array, value: Array, cu_seqlens: Array) -> Array:
    """Sentences padded to the longest, the padding hidden by a ``(b, 1, 1, s)`` mask."""
    xp = place_of(query).namespace
    lengths = np.diff(cu_seqlens)
    batch, seqlen = len(lengths), int(lengths.max())
    entry = np.repeat(np.arange(batch), lengths)
    rows = xp.asarray(entry * seqlen + np.arange(len(query)) - np.repeat(cu_seqlens[:-1], lengths))

    def pad(packed: Array) -> Array:
        padded = xp.zeros((batch * seqlen, *packed.shape[1:]), packed.dtype)
        padded[rows] = packed
        return padded.reshape(batch, seqlen, *packed.shape[1:])

    mask = xp.asarray(np.arange(seqlen) < lengths[:, None])[:, None, None, :]
    out = cupyflash.flash_attention(pad(query), pad(key), pad(value), mask=mask)
    return out.reshape(batch * seqlen, *out.shape[2:])[rows]


def dense_attention(query: Array, key: Array, value: Array, cu_seqlens: Array) -> Array:
    """The textbook form, sentence by sentence, to compare with: stores every score."""
    xp = place_of(query).namespace
    entries = [slice(*bounds) for bounds in pairwise(cu_seqlens.tolist())]
    return xp.concatenate([dense_forward(query[r], key[r], value[r])[0] for r in entries])
