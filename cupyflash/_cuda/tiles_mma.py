"""Tile sizes of the mma engine: which ones there are, and why.

A warp multiplies 16-row pieces by 8-column pieces. What bounds it, in this order: shared-memory
reads (a warp tile of m by n reads m + n rows for m * n products, so 32 rows a warp where the sums
fit into 255 registers), fixed latencies (two warps a scheduler, from two blocks where their memory
fits, so that one waits at a barrier while the other computes), shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BACKWARD_TILES", "FORWARD_TILES", "MmaBackwardTile", "MmaForwardTile", "bucket"]

HEAD_DIM_STEP = 32  # four 16-byte chunks, the least that the permutation in shared memory needs


@dataclass(frozen=True)
class MmaForwardTile:
    """Queries, keys, warps; 16-column steps of Q kept in registers; blocks a multiprocessor."""

    block_m: int
    block_n: int
    warps: int
    kept_steps: int
    blocks: int


@dataclass(frozen=True)
class MmaBackwardTile:
    """Queries, keys, warps along the keys and along the queries; blocks a multiprocessor."""

    block_m: int
    block_n: int
    key_warps: int
    query_warps: int
    blocks: int


def bucket(head_dim: int) -> int:
    """Return head_dim padded to what the kernels are compiled for."""
    return -(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP


# Larger padded head dim -> tiles by preference; the first that fits the device is taken.
FORWARD_TILES: dict[int, tuple[MmaForwardTile, ...]] = {
    # 32 rows a warp; two sets of scores are alive, hence no more than 32 keys.
    32: (MmaForwardTile(128, 32, 4, 2, 2),),
    64: (MmaForwardTile(128, 32, 4, 4, 2),),
    # No registers left for Q.
    96: (MmaForwardTile(128, 32, 4, 0, 2),),
    128: (MmaForwardTile(128, 32, 4, 0, 2),),
    # 16 rows a warp: the output takes 80 to 128 registers of a thread.
    160: (MmaForwardTile(64, 32, 4, 6, 2),),
    192: (MmaForwardTile(64, 32, 4, 6, 2),),
    224: (MmaForwardTile(64, 32, 4, 6, 2),),
    256: (MmaForwardTile(64, 32, 4, 6, 2),),
}

_SMALL = MmaBackwardTile(32, 128, 4, 1, 2)  # 32 keys a warp: dk and dv take all free registers
_MEDIUM = (
    # Pairs of warps share 32 keys, half of the columns of dk and dv each. 163 KiB.
    MmaBackwardTile(64, 128, 4, 2, 1),
    # 99 KiB: 16 keys a warp, all columns.
    MmaBackwardTile(32, 64, 4, 1, 1),
)
_LARGE = (
    MmaBackwardTile(64, 64, 2, 4, 1),  # 227 KiB; needs whole 64 columns
    MmaBackwardTile(64, 64, 4, 2, 1),
    MmaBackwardTile(32, 64, 4, 2, 1),  # 163 KiB
    MmaBackwardTile(32, 32, 2, 2, 1),  # 99 KiB
    MmaBackwardTile(32, 16, 1, 2, 1),
)
BACKWARD_TILES: dict[int, tuple[MmaBackwardTile, ...]] = {
    32: (_SMALL,),
    64: (_SMALL,),
    96: _MEDIUM,
    128: _MEDIUM,
    160: _LARGE,
    192: _LARGE,
    224: _LARGE,
    256: _LARGE,
}
