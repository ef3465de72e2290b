"""Tile sizes of the NumPy engine."""

from __future__ import annotations

from cupyflash._problem import Problem
from cupyflash.tiling import Tiling

# Every product of a tile is one BLAS call, in which a threaded BLAS wakes and joins its threads, so
# tiles must be large: at (1, 2048, 8, 64) float32 the forward took 0.21 s with 256 x 512 and 0.22 s
# with 1024 x 1024 on two idle cores, but 1.9 s and 0.27 s on two busy ones (dense: 0.27 s). The
# 4 MB of float32 scores still fit a last-level cache.
_BLOCK = 1024
# Half the rows along a diagonal, where half of the last tiles is computed for nothing.
_BLOCK_M_WINDOWED = 512
_SMALLEST_BLOCK_M = 128


def default_tiling(problem: Problem) -> Tiling:
    """Tiles for one call.

    A window of W keys makes ``block_m`` queries visit ``block_m + W`` keys, so narrow windows take
    fewer queries at a time.
    """
    left, right = problem.window_left, problem.window_right
    if left is None and right is None:
        return Tiling(_BLOCK, _BLOCK, warps=1)
    if left is None or right is None:
        return Tiling(_BLOCK_M_WINDOWED, _BLOCK, warps=1)
    width = left + right + 1
    return Tiling(min(max(2 * width, _SMALLEST_BLOCK_M), _BLOCK_M_WINDOWED), _BLOCK, warps=1)
