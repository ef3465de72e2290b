"""Attention as the textbook writes it, to compare with: all scores are in memory at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash._arrays import place_of

__all__ = ["dense_backward", "dense_forward"]

Array = Any


def dense_forward(
    query: Array, key: Array, value: Array, *, causal: bool = False
) -> tuple[Array, Array]:
    """``softmax(q k^T / sqrt(d)) v`` of ``(s, h, d)`` arrays; also the weights ``(h, s, s)``."""
    xp = place_of(query).namespace
    query, key, value = (array.swapaxes(0, 1) for array in (query, key, value))
    weights = query @ key.swapaxes(1, 2)
    weights *= np.float32(query.shape[-1] ** -0.5)
    if causal:
        weights += xp.triu(xp.full(weights.shape[1:], -xp.inf, weights.dtype), 1)
    weights -= weights.max(axis=-1, keepdims=True)
    xp.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ value).swapaxes(0, 1), weights


def dense_backward(
    grad_out: Array, query: Array, key: Array, value: Array, weights: Array
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value from the stored `weights`."""
    grad_out, query, key, value = (a.swapaxes(0, 1) for a in (grad_out, query, key, value))
    grad_value = weights.swapaxes(1, 2) @ grad_out
    grad_scores = grad_out @ value.swapaxes(1, 2)
    grad_scores -= (grad_scores * weights).sum(axis=-1, keepdims=True)
    grad_scores *= weights
    grad_scores *= np.float32(query.shape[-1] ** -0.5)
    grads = (grad_scores @ key, grad_scores.swapaxes(1, 2) @ query, grad_value)
    grad_query, grad_key, grad_value = (grad.swapaxes(0, 1) for grad in grads)
    return grad_query, grad_key, grad_value
