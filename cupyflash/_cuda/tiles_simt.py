"""Tile sizes of the simt engine: which ones there are, and how much memory each takes.

A warp is 4 rows by 8 columns of lanes. A lane holds ``rows`` rows (block / 4 / warps) and
``cols`` columns (block / 8) of a score tile, and reads ``rows + cols`` vectors of shared memory
for ``rows * cols * width`` multiply-adds, so large lane tiles are wanted. What bounds them:
registers (255 a lane, of which the sums of the output take ``rows * head_dim / 8``) and shared
memory, of which the row tile takes most. Two blocks a multiprocessor hide each other's barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import VECTOR_BYTES
from cupyflash._cuda.params import ITEMSIZE
from cupyflash._problem import Problem
from cupyflash.errors import UnsupportedError

__all__ = [
    "BACKWARD_TILES",
    "FORWARD_TILES",
    "MAX_CHANGED_SCORES",
    "SimtTile",
    "accumulator_bytes",
    "bucket",
    "choose_tile",
    "forward_bytes",
    "key_bytes",
    "query_bytes",
    "tiles_for",
]

_LANE_ROWS, _LANE_COLS = 4, 8  # of a warp: LaneGrid in kernels/tile/lanes.cuh
_MAX_WARPS = 8  # 256 threads can have 255 registers each
_MAX_SUM_REGISTERS = 128  # of one lane
_MAX_SCORE_REGISTERS = 64
MAX_CHANGED_SCORES = 32  # the same where what changes the scores needs registers too; forward
_CHANGES = frozenset({"mask", "block_mask", "bias", "dropout", "score_mod"})

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
    (4, 32): _tiles((64, 64, 4), (64, 32, 4)),
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


# Sizes of the structs in kernels/attention/storage.cuh; the stub asserts that they agree.


def accumulator_bytes(problem: Problem) -> int:
    """Return the bytes of a score."""
    return ITEMSIZE[problem.accumulator_dtype]


def _operand_bytes(problem: Problem) -> int:
    """Bytes of one q or k row together with one v or out row, padding included."""
    padding = 2 * VECTOR_BYTES
    return (
        accumulator_bytes(problem) * (bucket(problem.head_dim) + bucket(problem.head_dim_v))
        + padding
    )


def _score_bytes(problem: Problem, tile: SimtTile) -> int:
    return accumulator_bytes(problem) * tile.resident * (tile.streamed + 8)


def forward_bytes(problem: Problem, tile: SimtTile) -> int:
    """Return the shared memory of a forward's tile."""
    query = accumulator_bytes(problem) * bucket(problem.head_dim) + VECTOR_BYTES
    key_value = _operand_bytes(problem)
    return tile.resident * query + tile.streamed * key_value + _score_bytes(problem, tile)


def query_bytes(problem: Problem, tile: SimtTile) -> int:
    """Return that of a tile of dq."""
    operands = (tile.resident + tile.streamed) * _operand_bytes(problem)
    return operands + _score_bytes(problem, tile)


def key_bytes(problem: Problem, tile: SimtTile) -> int:
    """Return that of a tile of dk and dv."""
    statistics = 3 * accumulator_bytes(problem) * tile.streamed
    return query_bytes(problem, tile) + statistics


# The choice of a tile.


def tiles_for(
    problem: Problem, table: dict[tuple[int, int], tuple[SimtTile, ...]], changed_scores: int
) -> tuple[SimtTile, ...]:
    """Return the tiles of a table; those of at most `changed_scores` registers for such scores."""
    tiles = table[accumulator_bytes(problem), bucket(max(problem.head_dim, problem.head_dim_v))]
    if problem.features.isdisjoint(_CHANGES):
        return tiles
    return tuple(tile for tile in tiles if _score_registers(problem, tile) <= changed_scores)


def choose_tile(
    problem: Problem,
    device: Device,
    candidates: tuple[SimtTile, ...],
    size: Callable[[Problem, SimtTile], int],
    summed_dim: int,
) -> SimtTile:
    """Return the first tile that fits.

    `size` gives the shared memory of a tile, `summed_dim` the columns that are summed up in
    registers.
    """
    complaint = None
    for tile in candidates:
        complaint = _complaint(problem, device, tile, size(problem, tile), summed_dim)
        if complaint is None:
            return tile
    raise UnsupportedError(
        f"tiles of {tile.resident} by {tile.streamed} in {tile.warps} warps do not fit the simt"
        f" engine for {problem.dtype}, head_dim {problem.head_dim}, head_dim_v"
        f" {problem.head_dim_v} on {device.name}: {complaint}. Give tiling=None or smaller blocks."
    )


def _complaint(
    problem: Problem, device: Device, tile: SimtTile, shared_memory: int, summed_dim: int
) -> str | None:
    """Return the limit that a tile breaks, if it breaks one."""
    resident, streamed, warps = tile.resident, tile.streamed, tile.warps
    if not 1 <= warps <= _MAX_WARPS:
        return f"warps must be 1 to {_MAX_WARPS}"
    if resident < 1 or resident % (_LANE_ROWS * warps):
        return f"{resident} rows must be a positive multiple of {_LANE_ROWS} * warps"
    if streamed < 1 or streamed % _LANE_COLS:
        return f"{streamed} columns must be a positive multiple of {_LANE_COLS}"
    rows = resident // (_LANE_ROWS * warps)
    sums = accumulator_bytes(problem) // 4 * rows * bucket(summed_dim) // _LANE_COLS
    if sums > _MAX_SUM_REGISTERS:
        return f"sums would take {sums} registers a thread, more than {_MAX_SUM_REGISTERS}"
    scores = _score_registers(problem, tile)
    if scores > _MAX_SCORE_REGISTERS:
        return f"scores would take {scores} registers a thread, more than {_MAX_SCORE_REGISTERS}"
    limit = device.shared_memory_per_block_optin
    if shared_memory > limit:
        return f"{shared_memory} bytes of shared memory are needed and {limit} allowed"
    return None


def _score_registers(problem: Problem, tile: SimtTile) -> int:
    """Return the registers that the scores of one lane take."""
    rows, cols = tile.resident // (_LANE_ROWS * tile.warps), tile.streamed // _LANE_COLS
    return accumulator_bytes(problem) // 4 * rows * cols
