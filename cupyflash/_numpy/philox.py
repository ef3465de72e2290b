"""Philox-4x32-10, the counter-based generator behind dropout.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash._problem import Array

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_ROUNDS = 10


def philox_4x32(counter: Sequence[Array], key: tuple[int, int]) -> tuple[Array, ...]:
    """Four random words for each counter.

    Parameters
    ----------
    counter : four integer arrays or ints, broadcastable, values below 2**32
    key : two ints below 2**32

    Returns
    -------
    tuple of four uint64 arrays of 32-bit values. Words of equal counters are equal.
    """
    c0, c1, c2, c3 = (np.asarray(word).astype(np.uint64) for word in counter)
    for number in range(_ROUNDS):
        k0, k1 = (np.uint64((k + number * w) % 2**32) for k, w in zip(key, _WEYL, strict=True))
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        # Words that vary along one axis only stay one-dimensional until they meet.
        c0, c2 = (product1 >> _WORD_BITS) ^ (c1 ^ k0), (product0 >> _WORD_BITS) ^ (c3 ^ k1)
        c1, c3 = product1 & _LOW_WORD, product0 & _LOW_WORD
    return c0, c1, c2, c3


def keep_mask(
    seed: Any, batch: int, head: int, query_index: Array, key_index: Array, dropout_p: float
) -> Array:
    """Which probabilities of a tile dropout keeps.

    The decision depends on ``(seed, batch, head, i, j)`` alone. One counter serves the four
    elements ``(i, j), (i, j + 8), (i + 8, j), (i + 8, j + 8)``, which one thread of a tensor-core
    kernel holds: bit 3 of i and of j choose the word, the other bits make the counter.

    Parameters
    ----------
    seed : int in [0, 2**64), or an array with one such element
    batch, head : int
    query_index, key_index : integer arrays ``(rows,)`` and ``(cols,)``
    dropout_p : float in [0, 1)

    Returns
    -------
    bool array ``(rows, cols)``, True = kept.
    """
    seed = int(np.asarray(seed).item())
    query_group, query_pick, query_bit = _groups(query_index)
    key_group, key_pick, key_bit = _groups(key_index)
    words = philox_4x32(
        (key_group[None, :], query_group[:, None], head, batch), (seed & 0xFFFFFFFF, seed >> 32)
    )
    threshold = np.uint64(round(dropout_p * 2**32))
    kept = np.stack([word >= threshold for word in words]).reshape(2, 2, *words[0].shape)
    rows = kept[query_bit, :, query_pick]  # (rows, 2, key groups)
    picked: Array = rows[:, key_bit, key_pick]
    return picked


def _groups(index: Array) -> tuple[Array, Array, Array]:
    """Distinct indices without bit 3; which of them each index has; and its bit 3."""
    distinct, pick = np.unique(index >> 4 << 3 | index & 7, return_inverse=True)
    return distinct, pick, index >> 3 & 1
