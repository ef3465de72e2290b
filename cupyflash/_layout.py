"""How the caller's axes map to the canonical ``(b, s, h, d)`` order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Array = Any
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The axes of one call's arrays.

    ``heads_first`` is ``layout="bhsd"``; ``unbatched`` marks 3-D input of a fixed-length call.
    Varlen arrays have no batch axis on either side.
    """

    heads_first: bool
    unbatched: bool
    varlen: bool

    def canonical(self, array: Array) -> Array:
        """View a caller's array as ``(b, s, h, d)`` (varlen: ``(total, h, d)``)."""
        if self.heads_first:
            array = array.swapaxes(-3, -2)
        return array[None] if self.unbatched else array

    def users(self, array: Array) -> Array:
        """View a canonical array in the caller's order: the inverse of `canonical`."""
        array = array[0] if self.unbatched else array
        return array.swapaxes(-3, -2) if self.heads_first else array

    def users_shape(self, shape: Shape) -> Shape:
        """The caller's shape of a canonical one."""
        shape = shape[1:] if self.unbatched else shape
        if self.heads_first:
            *batch, seqlen, heads, width = shape
            return (*batch, heads, seqlen, width)
        return shape

    def users_statistics(self, statistics: Array) -> Array:
        """View canonical ``(b, h, sq)`` statistics as the caller's."""
        return statistics[0] if self.unbatched else statistics

    def canonical_statistics(self, statistics: Array) -> Array:
        return statistics[None] if self.unbatched else statistics
