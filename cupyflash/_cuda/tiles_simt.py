"""Tile sizes of the simt engine: which ones there are, and how much memory each takes.

A warp is 4 rows by 8 columns of lanes. A lane holds ``rows`` rows (block / 4 / warps) and
``cols`` columns (block / 8) of a score tile, and reads ``rows + cols`` vectors of shared memory
for ``rows * cols * width`` multiply-adds, so large lane tiles are wanted. What bounds them:
registers (255 a lane, of which the sums of the output take ``rows * head_dim / 8``) and shared
memory, of which the row tile takes most. Two blocks a multiprocessor hide each other's barriers.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BACKWARD_TILES", "FORWARD_TILES", "SimtTile", "bucket"]

HEAD_DIM_STEP = 32  # 8 lanes of 16 bytes each (float32); head dims are padded to its multiples


@dataclass(frozen=True)
class SimtTile:
    """Rows that stay, rows that pass by, warps.

    The forward and dq keep queries and stream keys; dk and dv keep keys and stream queries.
    """

    resident: int
    streamed: int
    warps: int


def bucket(head_dim: int) -> int:
    """Return head_dim padded to what the kernels are compiled for."""
    return -(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP


def _tiles(*shapes: tuple[int, int, int]) -> tuple[SimtTile, ...]:
    return tuple(SimtTile(*shape) for shape in shapes)


# (itemsize of the accumulator, larger padded head dim) -> tiles by preference; the first that fits
# the device is taken. Typical opt-in limits: 227 KiB (9.0, 10.0), 163 (8.0), 99 (8.6, 8.9, 12.0),
# 64 (7.5). "8 x 8" is the lane tile.
FORWARD_TILES: dict[tuple[int, int], tuple[SimtTile, ...]] = {
    # 8 x 8, two blocks: 16 reads for 256 multiply-adds.
    (4, 32): _tiles((128, 64, 4), (128, 32, 4)),
    (4, 64): _tiles((128, 64, 4), (128, 32, 4), (64, 32, 4)),
    # 8 rows would take 96 registers for the output alone; 4 x 8, two blocks.
    (4, 96): _tiles((64, 64, 4), (64, 32, 4)),
    # 8 x 4 spills; 4 x 8 in 8 warps needs no more reads a multiply-add. 4 x 6 where 99 KiB.
    (4, 128): _tiles((128, 64, 8), (64, 48, 4), (32, 32, 4)),
    (4, 160): _tiles((128, 64, 8), (64, 32, 4), (32, 16, 4)),
    # Q takes half of the memory from here on: fewer keys at a time.
    (4, 192): _tiles((128, 48, 8), (96, 32, 6), (64, 16, 4), (32, 16, 4)),
    (4, 224): _tiles((128, 32, 8), (96, 32, 6), (64, 16, 4), (32, 16, 4)),
    (4, 256): _tiles((128, 32, 8), (64, 32, 4), (48, 16, 3), (16, 16, 4)),
    # float64: twice the registers and the memory, half the rate of multiply-adds.
    (8, 32): _tiles((64, 64, 4), (64, 32, 4)),
    (8, 64): _tiles((64, 32, 4), (32, 32, 4)),
    (8, 96): _tiles((128, 32, 8), (64, 32, 4), (32, 32, 4), (32, 16, 4)),
    # 4 rows would take 128 registers and more for the output.
    (8, 128): _tiles((96, 32, 8), (64, 32, 8), (32, 16, 4), (16, 16, 4)),
    (8, 160): _tiles((64, 32, 8), (64, 16, 8), (32, 16, 4), (16, 16, 4)),
    (8, 192): _tiles((64, 32, 8), (64, 16, 8), (16, 16, 4), (16, 8, 4)),
    (8, 224): _tiles((64, 16, 8), (32, 16, 4), (16, 16, 4), (16, 8, 4)),
    (8, 256): _tiles((64, 16, 8), (32, 16, 4), (16, 8, 4), (8, 8, 2)),
}

# Two sums (dk, dv) and two score tiles live at once, so half of the forward's rows a lane.
BACKWARD_TILES: dict[tuple[int, int], tuple[SimtTile, ...]] = {
    # 4 x 8, two blocks or more.
    (4, 32): _tiles((64, 64, 4)),
    (4, 64): _tiles((64, 64, 4), (64, 32, 4)),
    # 4 x 4: two blocks at 128, just.
    (4, 96): _tiles((64, 32, 4), (32, 32, 4)),
    (4, 128): _tiles((64, 32, 4), (64, 16, 4), (32, 16, 4)),
    # 4 rows would take more than 128 registers for dk and dv.
    (4, 160): _tiles((64, 64, 8), (32, 32, 4), (16, 16, 4)),
    (4, 192): _tiles((64, 48, 8), (64, 32, 8), (32, 16, 4), (16, 16, 4)),
    (4, 224): _tiles((64, 32, 8), (32, 32, 4), (32, 16, 4), (16, 16, 4)),
    (4, 256): _tiles((64, 32, 8), (32, 32, 4), (16, 16, 4), (16, 8, 4)),
    (8, 32): _tiles((64, 32, 4), (32, 32, 4)),
    (8, 64): _tiles((64, 32, 8), (32, 16, 4)),
    (8, 96): _tiles((64, 32, 8), (32, 32, 4), (32, 16, 4), (16, 16, 4)),
    (8, 128): _tiles((32, 32, 8), (16, 16, 4), (16, 8, 4)),
    (8, 160): _tiles((32, 32, 8), (32, 16, 8), (16, 16, 4), (8, 8, 2)),
    (8, 192): _tiles((32, 32, 8), (32, 16, 8), (16, 8, 4), (8, 8, 2)),
    (8, 224): _tiles((32, 16, 8), (16, 16, 4), (16, 8, 4), (8, 8, 2)),
    (8, 256): _tiles((32, 16, 8), (16, 16, 4), (8, 8, 2), (4, 8, 1)),
}
