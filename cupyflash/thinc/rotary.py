"""Rotary positions (Su et al. 2021, arXiv 2104.09864) of packed sequences."""

from __future__ import annotations

from typing import Any

__all__ = ["rotary_table", "rotate"]

Array = Any
BASE = 10000.0


def rotary_table(xp: Any, total: int, head_dim: int) -> tuple[Array, Array]:
    """Return cos and sin, float32 ``(total, 1, head_dim / 2)``, of positions in the whole batch.

    Attention sees only the distance of two tokens of a sequence, so it may begin at any position.
    """
    frequency = BASE ** (-xp.arange(0, head_dim, 2, dtype="float64") / head_dim)
    angle = (xp.arange(total)[:, None] * frequency)[:, None, :]
    return xp.cos(angle).astype("float32"), xp.sin(angle).astype("float32")


def rotate(xp: Any, heads: Array, cos: Array, sin: Array) -> Array:
    """Turn the pairs ``(x[i], x[i + d / 2])`` of ``(total, heads, d)``; -sin turns them back."""
    first, second = xp.split(heads, 2, axis=-1)
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
