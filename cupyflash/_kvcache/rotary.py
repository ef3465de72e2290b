"""Rotary positions (Su et al. 2021, arXiv 2104.09864): pairs of elements are turned by angles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._arrays import Array, Place, as_array, describe, require_place
from cupyflash._kvcache.bits import gathered
from cupyflash._kvcache.entries import Entries
from cupyflash._options import require_bools


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines ``(s_rotary, d_rotary / 2)``, and which elements make a pair."""

    cos: Array
    sin: Array
    interleaved: bool

    def turned(self, x: Array, positions: Array, xp: Any) -> Array:
        """Return `x` ``(b, s, heads, d)`` with each token turned to its position ``(b, s)``."""
        half = self.cos.shape[1]
        wide = np.float64 if x.dtype == np.float64 else np.float32
        positions = positions.clip(0, len(self.cos) - 1)
        cos, sin = (
            gathered(table, positions).astype(wide)[:, :, None] for table in (self.cos, self.sin)
        )
        result = x.copy()
        pairs = result[..., : 2 * half]
        if self.interleaved:
            first, second = pairs[..., ::2], pairs[..., 1::2]
        else:
            first, second = pairs[..., :half], pairs[..., half:]
        one, other = first.astype(wide), second.astype(wide)
        with np.errstate(over="ignore", invalid="ignore"):
            first[...] = (one * cos - other * sin).astype(x.dtype)
            second[...] = (other * cos + one * sin).astype(x.dtype)
        return result


def bind_rotary(cos: Any, sin: Any, interleaved: Any, query: Array, place: Place) -> Rotary | None:
    """Check the tables; None without them."""
    require_bools(rotary_interleaved=interleaved)
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        missing = "rotary_cos" if cos is None else "rotary_sin"
        raise ValueError(f"rotary_cos and rotary_sin go together; {missing} is missing")
    cos, sin = as_array(cos, "rotary_cos"), as_array(sin, "rotary_sin")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        require_place(table, name, place)
        if table.dtype not in (query.dtype, np.float32):
            raise TypeError(
                f"{name} must have q's dtype {query.dtype} or float32, got {describe(table)}"
            )
        if table.ndim != 2 or table.shape != cos.shape:
            raise ValueError(
                f"{name} must have shape (s_rotary, d_rotary / 2), the same as rotary_cos, "
                f"got {describe(table)}"
            )
        if 2 * table.shape[1] > query.shape[-1]:
            raise ValueError(
                f"{name} turns {2 * table.shape[1]} elements of a head, but q has head_dim "
                f"{query.shape[-1]}; it must have shape (s_rotary, d_rotary / 2), "
                f"got {describe(table)}"
            )
    return Rotary(cos, sin, bool(interleaved))


def require_angles(rotary: Rotary, entries: Entries, tokens: int, capacity: int) -> None:
    """Check that there are angles for `tokens` positions behind what each entry has."""
    last = int(entries.used.max(initial=0)) + tokens if entries.on_host else capacity
    if entries.used.size and tokens and last > len(rotary.cos):
        why = (
            "" if entries.on_host else " (the capacity of an entry, as cache_seqlens are on device)"
        )
        raise ValueError(f"rotary_cos must cover {last} positions{why}, got {describe(rotary.cos)}")
