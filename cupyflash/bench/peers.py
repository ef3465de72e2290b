"""What other people's code does with the same arrays."""

from __future__ import annotations

from typing import Any

Array = Any


def naive_cupy(query: Array, key: Array, value: Array, *, causal: bool = False) -> Array:
    """Dense attention as a CuPy user writes it: product, softmax, product; O(s^2) memory.

    Arrays are ``(b, h, s, d)``; scores are float32.
    """
    import cupy

    scores = cupy.matmul(query, key.swapaxes(-1, -2)).astype(cupy.float32)
    scores *= query.shape[-1] ** -0.5
    if causal:
        seqlen = scores.shape[-1]
        visible = cupy.tril(cupy.ones((seqlen, seqlen), dtype=bool))
        scores = cupy.where(visible, scores, -cupy.inf)
    scores -= scores.max(axis=-1, keepdims=True)
    cupy.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return cupy.matmul(scores.astype(value.dtype), value)
