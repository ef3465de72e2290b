"""Tile sizes of the NumPy engine."""

from __future__ import annotations

from cupyflash._problem import Problem
from cupyflash.tiling import Tiling


def default_tiling(problem: Problem) -> Tiling:
    """Tiles for one call."""
    return Tiling(256, 512)
