"""Which tiles `bench --tune` tries: a few dozen for an engine and a problem, all of them legal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from cupyflash._cuda.device import Device
from cupyflash._cuda.engines import PLANNERS
from cupyflash._cuda.tiles_mma import (
    BACKWARD_TILES,
    FORWARD_TILES,
    MmaBackwardTile,
    MmaForwardTile,
    bucket,
)
from cupyflash._cuda.tiles_wgmma import BIAS_TILES, KEY_WIDTHS, WgmmaTile
from cupyflash._cuda.tiles_wgmma import FORWARD_TILES as WGMMA_TILES
from cupyflash._cuda.tiles_wgmma import bucket as wgmma_bucket
from cupyflash._cuda.tiles_wgmma_backward import QUERY_WIDTHS, WgmmaBackwardTile
from cupyflash._cuda.tuned import Tile
from cupyflash._problem import Problem
from cupyflash.errors import UnsupportedError
from cupyflash.tiling import Tiling

__all__ = ["candidates"]

_WARPS = 8  # of a multiprocessor, in one block or two: then a thread can have 255 registers


def candidates(engine: str, direction: str, problem: Problem, device: Device) -> list[Tile]:
    """Return tiles that `engine` plans for `problem`, each another kernel, none the default's."""
    plan = getattr(PLANNERS[engine], f"plan_{direction}")
    seen = {plan(problem, device).stub}
    tiles = []
    for tile in _GRIDS.get((engine, direction), _tilings)(problem):
        try:
            stub = plan(problem, device, tile).stub
        except UnsupportedError:
            continue
        if stub not in seen:
            seen.add(stub)
            tiles.append(tile)
    return tiles


def _tilings(problem: Problem) -> Iterator[Tile]:
    """Sizes in the terms of the public interface, for engines without a grid of their own."""
    rows, columns = (32, 64, 128), (16, 32, 64, 128)
    for block_m, block_n, stages, warps in product(rows, columns, (1, 2), (4, 8)):
        yield Tiling(block_m, block_n, stages, warps)


def _mma_forward(problem: Problem) -> Iterator[Tile]:
    """16 or 32 rows a warp, four warps or eight in turns; how much of Q is in registers."""
    steps = bucket(problem.head_dim) // 16
    table = FORWARD_TILES[bucket(max(problem.head_dim, problem.head_dim_v))]
    kept_steps = sorted({0, steps // 2, steps, *(tile.kept_steps for tile in table)})
    for warps, rows, block_n, kept in product((4, 8), (16, 32), (32, 48, 64), kept_steps):
        turns = warps == _WARPS and "bias" not in problem.extras
        yield MmaForwardTile(warps * rows, block_n, warps, kept, _WARPS // warps, turns)


def _mma_backward(problem: Problem) -> Iterator[Tile]:
    """Every way to share a tile among 4 or 8 warps."""
    yield from BACKWARD_TILES[bucket(max(problem.head_dim, problem.head_dim_v))]
    splits = ((4, 1), (2, 2), (8, 1), (4, 2), (2, 4))
    for block_m, block_n, (keys, queries) in product((32, 64, 128), (32, 64, 128), splits):
        yield MmaBackwardTile(block_m, block_n, keys, queries, _WARPS // (keys * queries))


def _wgmma_forward(problem: Problem) -> Iterator[Tile]:
    """The table's tiles in every way, and other sizes: two to four consumers, Q here or there."""
    has_bias = "bias" in problem.extras
    tables = BIAS_TILES if has_bias else WGMMA_TILES
    table = tables[wgmma_bucket(max(problem.head_dim, problem.head_dim_v))]
    for tile, (turns, eager) in product(table, ((True, False), (True, True), (False, True))):
        yield replace(tile, turns=turns, eager=eager)
    rows, of_bias = (128, 192, 256), (1, 2) if has_bias else (0,)
    grid = product(rows, KEY_WIDTHS, (2, 3), (False, True), of_bias)
    for block_m, block_n, stages, kept, bias_stages in grid:
        yield WgmmaTile(block_m, block_n, stages, kept, staged=64, bias_stages=bias_stages)


def _wgmma_backward(problem: Problem) -> Iterator[Tile]:
    """Every tile that fits; P rounded at once or late; warpgroups that have keys or roles.

    64 keys without roles were never among the fastest.
    """
    del problem
    ways = ((128, False, False), (128, False, True), (64, True, False))
    for block_m, (block_n, roles, direct), stages, grad_out_stages, early in product(
        QUERY_WIDTHS, ways, (2, 3), (1, 2, 3), (True, False)
    ):
        yield WgmmaBackwardTile(block_m, block_n, stages, grad_out_stages, early, roles, direct)
    yield from _staying()


def _staying() -> Iterator[Tile]:
    """Blocks that stay: dQ by way of shared memory or from registers, and whole heads."""
    blocks = ((128, 128, False, False), (64, 128, True, False), (64, 128, False, False),
              (64, 64, True, True))  # fmt: skip
    ways = ((False, False), (True, False), (True, True))
    for (block_m, block_n, early, roles), grad_out_stages, (direct, whole) in product(
        blocks, (1, 2), ways
    ):
        yield WgmmaBackwardTile(
            block_m, block_n, 2, grad_out_stages, early, roles, direct, True, whole
        )


_GRIDS: dict[tuple[str, str], Callable[[Problem], Iterator[Tile]]] = {
    ("mma", "forward"): _mma_forward,
    ("mma", "backward"): _mma_backward,
    ("wgmma", "forward"): _wgmma_forward,
    ("wgmma", "backward"): _wgmma_backward,
}
