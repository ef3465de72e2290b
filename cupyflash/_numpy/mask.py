"""The predicate: which scores of a tile are hidden, whatever their value."""

from __future__ import annotations

import numpy as np

from cupyflash._numpy.broadcast import plane, plane_tile
from cupyflash._numpy.key_range import Tile, window_bounds
from cupyflash._numpy.sequence import Sequence
from cupyflash._problem import Array, Operands, Problem


class Mask:
    """Window, boolean masks and infinite bias of one entry and head."""

    def __init__(self, problem: Problem, operands: Operands, sequence: Sequence, head: int) -> None:
        self._sequence = sequence
        self._left, self._right = window_bounds(problem, sequence)
        masks = [operands.mask]
        if operands.block_mask is not None:
            masks.append(operands.block_mask.mask)
        self._masks = [plane(m, sequence.entry, head) for m in masks if m is not None]
        self._bias = None
        if operands.bias is not None:
            self._bias = plane(operands.bias, sequence.entry, head)

    def hidden(self, tile: Tile) -> Array | None:
        """True where a score is hidden, ``(rows or 1, cols or 1)``; None when nothing is."""
        hidden: Array | None = None
        parts = [~plane_tile(mask, tile) for mask in self._masks]
        if tile.windowed:
            parts.append(self._outside_window(tile))
        if self._bias is not None:
            parts.append(plane_tile(self._bias, tile) == -np.inf)
        for part in parts:
            if part.any():
                hidden = part if hidden is None else hidden | part
        return hidden

    def _outside_window(self, tile: Tile) -> Array:
        distance = tile.key_index - (tile.query_index + self._sequence.diagonal)
        outside: Array = (distance > self._right) | (distance < -self._left)
        return outside


def without_unseen(rows: Array, hidden: Array | None, axis: int) -> Array:
    """Query-like (axis 0) or key-like (axis 1) rows of a tile, 0 where the tile hides the row.

    A hidden row may hold NaN or inf, which a factor of 0 would not remove from a product.
    """
    if hidden is None:
        return rows
    unseen = hidden.all(axis=1 - axis)
    return np.where(unseen[:, None], rows.dtype.type(0), rows) if unseen.any() else rows
