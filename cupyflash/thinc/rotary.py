"""Rotary positions (Su et al. 2021, arXiv 2104.09864) of packed sequences."""

from __future__ import annotations

from typing import Any

__all__ = ["rotary_table", "rotate"]

Array = Any
BASE = 10000.0


def rotary_table(xp: Any, cu_seqlens: Array, total: int, head_dim: int) -> tuple[Array, Array]:
    """Return cos and sin, float32 ``(total, 1, head_dim / 2)``; positions restart in each sequence.

    Nothing is read back from the device, so `cu_seqlens` may live there.
    """
    row = xp.arange(total)
    cu_seqlens = xp.asarray(cu_seqlens)
    position = row - cu_seqlens[xp.searchsorted(cu_seqlens[1:], row, side="right")]
    frequency = BASE ** (-xp.arange(0, head_dim, 2, dtype="float64") / head_dim)
    angle = (position[:, None] * frequency)[:, None, :]
    return xp.cos(angle).astype("float32"), xp.sin(angle).astype("float32")


def rotate(xp: Any, heads: Array, cos: Array, sin: Array) -> Array:
    """Turn the pairs ``(x[i], x[i + d / 2])`` of ``(total, heads, d)``; -sin turns them back."""
    first, second = xp.split(heads, 2, axis=-1)
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
