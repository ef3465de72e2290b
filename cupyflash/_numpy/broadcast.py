"""Tiles of arrays that broadcast over ``(b, h, sq, sk)`` and are never expanded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupyflash._problem import Array

if TYPE_CHECKING:
    from cupyflash._numpy.key_range import Tile


def plane(array: Array, entry: int, head: int) -> Array:
    """The ``(sq or 1, sk or 1)`` part of a broadcastable array that one entry and head sees."""
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return array[entry if array.shape[0] > 1 else 0, head if array.shape[1] > 1 else 0]


def plane_tile(array: Array, tile: Tile) -> Array:
    """The ``(rows or 1, cols or 1)`` view of a plane that belongs to one tile."""
    rows = tile.queries if array.shape[0] > 1 else slice(None)
    cols = tile.keys if array.shape[1] > 1 else slice(None)
    return array[rows, cols]


def sum_to(tile: Array, shape: tuple[int, ...]) -> Array:
    """A tile summed over the axes along which an array of `shape` broadcasts."""
    axes = tuple(axis for axis in (0, 1) if shape[axis] == 1 and tile.shape[axis] > 1)
    return np.add.reduce(tile, axis=axes, keepdims=True) if axes else tile
