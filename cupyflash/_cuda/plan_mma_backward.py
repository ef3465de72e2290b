"""How the mma engine serves a backward call: `MmaBackwardPlan`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from cupyflash._cuda.config import constant
from cupyflash._cuda.config_mma import MMA_BACKWARD_PARAMS, MmaBackwardConfig, Scratch
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import (
    VECTOR_BYTES,
    KernelLaunch,
    TileMap,
    bytes_assertion,
    entry_point,
    kernel_launch,
    row_tiles,
    stub,
    tile_map_of,
)
from cupyflash._cuda.params import size_assertion
from cupyflash._cuda.plan_mma_common import (
    bias_itemsize,
    check_problem,
    choose_tile,
    common_fields,
    wider,
)
from cupyflash._cuda.score_source import ScoreSource, definitions
from cupyflash._cuda.tiles_mma import BACKWARD_TILES, STAGES, MmaBackwardTile, bucket
from cupyflash._problem import Problem
from cupyflash.tiling import Tiling

__all__ = ["ROW_LANES", "ROW_THREADS", "SINKS_THREADS", "MmaBackwardPlan", "plan_backward"]

ROW_LANES = 8  # of prepare and convert: QueryRow in kernels/backward/prepare_mma.cuh
ROW_THREADS = 256
SINKS_THREADS = 256


@dataclass(frozen=True)
class MmaBackwardPlan:
    """How a backward call runs: its kernels in the order of `launches`."""

    engine: str
    tiling: Tiling
    config: MmaBackwardConfig
    blocks: int
    scratch: Scratch
    prepare: KernelLaunch
    main: KernelLaunch
    convert: KernelLaunch
    grad_sinks: KernelLaunch | None
    tile_map: TileMap | None
    score_mod: ScoreSource | None
    zeroed_bias: bool  # the gradient of the bias is to be 0 before
    bias_sums: int  # number of float32
    convert_bias: KernelLaunch | None

    @property
    def tile_maps(self) -> tuple[TileMap, ...]:
        return () if self.tile_map is None else (self.tile_map,)

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        maps = (tile_map.launch for tile_map in self.tile_maps)
        optional = (x for x in (self.grad_sinks, self.convert_bias) if x is not None)
        return (*maps, self.prepare, self.main, self.convert, *optional)

    @cached_property
    def stub(self) -> str:
        """CUDA source that instantiates the kernels."""
        params = "MmaBackwardParams"
        entries = [
            entry_point(self.prepare, params, "prepare_backward_mma<config>", 1),
            entry_point(self.main, params, "backward_mma<config>", self.blocks),
            entry_point(self.convert, params, "convert_query_gradient<config>", 1),
        ]
        if self.grad_sinks is not None:
            entries.append(entry_point(self.grad_sinks, params, "grad_sinks_mma<config>", 1))
        if self.convert_bias is not None:
            kernel = "convert_bias_gradient<config>"
            entries.append(entry_point(self.convert_bias, params, kernel, 1))
        entries += (
            tile_map.entry_point(params, "config", "params.common") for tile_map in self.tile_maps
        )
        return stub(
            "backward/kernel_mma.cuh",
            *definitions(self.score_mod),
            size_assertion(params, MMA_BACKWARD_PARAMS),
            constant(self.config),
            bytes_assertion("MmaBackwardShape<config>", self.main),
            *entries,
        )


@lru_cache(maxsize=1024)
def plan_backward(
    problem: Problem,
    device: Device,
    tiling: Tiling | MmaBackwardTile | None = None,
    vector_bytes: int = VECTOR_BYTES,
    store_bytes: int = VECTOR_BYTES,
    deterministic: bool = False,
    bias_bytes: int = VECTOR_BYTES,
) -> MmaBackwardPlan:
    """Plan a backward call; parameters and errors as in `plan_mma.plan_forward`.

    A `tiling` that was meant for the forward and does not fit here gives way to the table.
    """
    check_problem(problem, device)
    table = BACKWARD_TILES[wider(problem)]
    tile = choose_tile(problem, device, (*_splits(tiling), *table))
    config = MmaBackwardConfig(
        **common_fields(
            problem, vector_bytes, store_bytes, bias_bytes, (problem.head_dim, problem.head_dim_v)
        ),
        block_m=tile.block_m,
        block_n=tile.block_n,
        key_warps=tile.key_warps,
        query_warps=tile.query_warps,
        bias_rows=problem.bias_shape[2:3] != (1,),
        bias_cols=problem.bias_shape[3:] != (1,),
        bias_shared=bool(problem.bias_shape) and problem.bias_is_summed,
        bias_in_tiles=problem.bias_is_summed_in_tiles,
        grad_bias_dtype=problem.grad_bias_dtype("mma"),
        deterministic=deterministic,
    )
    warps = tile.key_warps * tile.query_warps
    sequences = 1 if problem.varlen else problem.batch
    query_rows = sequences * problem.seqlen_q * problem.num_heads
    row_blocks = -(-query_rows * ROW_LANES // ROW_THREADS)
    key_tiles = row_tiles(problem, problem.seqlen_k, tile.block_n) * problem.num_heads_kv
    grad_sinks = None
    if "sinks" in problem.extras:
        grad_sinks = kernel_launch("cupyflash_grad_sinks_mma", problem.num_heads, SINKS_THREADS)
    convert_bias, bias_sums = None, 0
    if config.bias_in_tiles:
        tiles = _bias_tiles(problem, tile)
        bias_sums = tiles * tile.block_m * tile.block_n
        convert_bias = kernel_launch("cupyflash_convert_bias_mma", tiles, 32 * warps)
    written = config.bias_in_tiles or not (config.bias_shared or config.window or config.visibility)
    return MmaBackwardPlan(
        "mma",
        Tiling(tile.block_m, tile.block_n, STAGES, warps),
        config,
        tile.blocks,
        _scratch(problem, tile.block_m),
        kernel_launch("cupyflash_prepare_mma", row_blocks, ROW_THREADS),
        kernel_launch(
            "cupyflash_backward_mma",
            key_tiles,
            32 * warps,
            tile.shared_memory(config.head_dim, config.head_dim_v, bias_itemsize(problem)),
        ),
        kernel_launch("cupyflash_convert_mma", row_blocks, ROW_THREADS),
        grad_sinks,
        tile_map_of(problem, config.block_m, config.block_n),
        problem.score_mod,
        config.bias and not written,
        bias_sums,
        convert_bias,
    )


def _scratch(problem: Problem, block_m: int) -> Scratch:
    tiles = row_tiles(problem, problem.seqlen_q, block_m)
    sequences = 1 if problem.varlen else max(1, problem.batch)
    rows = -(-problem.seqlen_q // block_m) * block_m + (block_m if problem.varlen else 0)
    pairs = (1 if problem.varlen else problem.batch) * problem.num_heads
    return Scratch(rows, tiles // sequences, pairs, bucket(problem.head_dim))


def _bias_tiles(problem: Problem, tile: MmaBackwardTile) -> int:
    """Return how many tiles the bias has."""
    batch, heads, rows, cols = problem.bias_shape
    return batch * heads * -(-rows // tile.block_m) * -(-cols // tile.block_n)


def _splits(tiling: Tiling | MmaBackwardTile | None) -> tuple[MmaBackwardTile, ...]:
    """Return the ways to share a caller's tiling among its warps."""
    if isinstance(tiling, MmaBackwardTile):
        return (tiling,)
    if tiling is None or tiling.stages != STAGES:
        return ()
    return tuple(
        MmaBackwardTile(tiling.block_m, tiling.block_n, tiling.warps // shared, shared, 1)
        for shared in (1, 2, 4)
        if tiling.warps >= shared and tiling.warps % shared == 0
    )
