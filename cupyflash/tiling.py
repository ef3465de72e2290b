"""`Tiling`: the tile sizes of one call."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tiling"]


@dataclass(frozen=True)
class Tiling:
    """How a call is cut into tiles.

    Parameters
    ----------
    block_m : int
        Queries of one tile (the paper's B_r).
    block_n : int
        Keys of one tile (the paper's B_c).
    stages : int
        Key tiles in flight between global and shared memory; 1 = no overlap.
    warps : int
        Warps of one thread block; NumPy ignores it.
    """

    block_m: int
    block_n: int
    stages: int = 1
    warps: int = 4
