"""How the simt engine serves a problem: `ForwardPlan`, `BackwardPlan`, pure functions of values.

``plan = plan_forward(problem, device)`` needs no GPU; a plan prints as what it is and holds the
text of the stub that instantiates its kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from cupyflash._cuda.config import BackwardConfig, ForwardConfig, constant, score_features
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import (
    VECTOR_BYTES,
    KernelLaunch,
    TileMap,
    access_width,
    check_lengths,
    entry_point,
    kernel_launch,
    row_tiles,
    stub,
    tile_map_of,
)
from cupyflash._cuda.params import BACKWARD_PARAMS, FORWARD_PARAMS, ITEMSIZE, size_assertion
from cupyflash._cuda.score_source import ScoreSource, definitions
from cupyflash._cuda.tiles_simt import (
    BACKWARD_TILES,
    FORWARD_TILES,
    MAX_CHANGED_SCORES,
    SimtTile,
    accumulator_bytes,
    bucket,
    choose_tile,
    forward_bytes,
    key_bytes,
    query_bytes,
    tiles_for,
)
from cupyflash._problem import Problem
from cupyflash.errors import UnsupportedError
from cupyflash.tiling import Tiling

__all__ = [
    "LEAST_CAPABILITY",
    "SUPPORTED_DTYPES",
    "SUPPORTED_FEATURES",
    "BackwardPlan",
    "ForwardPlan",
    "plan_backward",
    "plan_forward",
]

SUPPORTED_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", "float8_e4m3fn"})
LEAST_CAPABILITY = (7, 5)
SUPPORTED_FEATURES = frozenset(
    {"causal", "window", "softcap", "alibi_slopes", "sinks", "varlen"}
    | {"mask", "block_mask", "bias", "dropout", "score_mod", "float32_output", "float8_cache"}
)

_DELTA_THREADS = 256
_SINKS_THREADS = 256


@dataclass(frozen=True)
class ForwardPlan:
    """How a forward call runs."""

    engine: str
    tiling: Tiling
    config: ForwardConfig
    launch: KernelLaunch
    tile_map: TileMap | None
    score_mod: ScoreSource | None

    @property
    def tile_maps(self) -> tuple[TileMap, ...]:
        return () if self.tile_map is None else (self.tile_map,)

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        return (*(tile_map.launch for tile_map in self.tile_maps), self.launch)

    @cached_property
    def stub(self) -> str:
        """CUDA source that instantiates the kernel."""
        return stub(
            "forward/kernel_simt.cuh",
            *definitions(self.score_mod),
            size_assertion("ForwardParams", FORWARD_PARAMS),
            constant(self.config),
            _storage_assertion("ForwardStorage<config>", self.launch),
            *(tile_map.entry_point("ForwardParams", "config") for tile_map in self.tile_maps),
            entry_point(self.launch, "ForwardParams", "forward_simt<config>"),
        )


@dataclass(frozen=True)
class BackwardPlan:
    """How a backward call runs: its kernels in the order of `launches`."""

    engine: str
    tiling: Tiling  # of dq; dk and dv have theirs in config_dkdv
    config_dkdv: BackwardConfig
    config_dq: BackwardConfig
    delta: KernelLaunch
    dkdv: KernelLaunch
    dq: KernelLaunch
    grad_sinks: KernelLaunch | None
    grad_bias: KernelLaunch | None
    tile_maps: tuple[TileMap, ...]  # of dq, of dk and dv
    score_mod: ScoreSource | None

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        maps = (tile_map.launch for tile_map in self.tile_maps)
        optional = (launch for launch in (self.grad_bias, self.grad_sinks) if launch is not None)
        return (*maps, self.delta, self.dkdv, self.dq, *optional)

    @cached_property
    def stub(self) -> str:
        """CUDA source that instantiates the kernels."""
        params = "BackwardParams"
        entries = [
            entry_point(self.delta, params, "compute_delta<config_dq>"),
            entry_point(self.dkdv, params, "key_gradient_simt<config_dkdv>"),
            entry_point(self.dq, params, "query_gradient_simt<config_dq>"),
        ]
        if self.grad_bias is not None:
            entries.append(entry_point(self.grad_bias, params, "bias_gradient_simt<config_dq>"))
        if self.grad_sinks is not None:
            entries.append(entry_point(self.grad_sinks, params, "compute_grad_sinks<config_dq>"))
        configs = ("config_dq", "config_dkdv")
        for tile_map, config in zip(self.tile_maps, configs, strict=False):
            entries.append(tile_map.entry_point(params, config))
        return stub(
            "backward/kernel_simt.cuh" if self.grad_bias is None else "backward/bias_simt.cuh",
            *definitions(self.score_mod),
            size_assertion("BackwardParams", BACKWARD_PARAMS),
            constant(self.config_dkdv, "config_dkdv"),
            constant(self.config_dq, "config_dq"),
            _storage_assertion("KeyGradientStorage<config_dkdv>", self.dkdv),
            _storage_assertion("QueryGradientStorage<config_dq>", self.dq),
            *entries,
        )


@lru_cache(maxsize=1024)
def plan_forward(
    problem: Problem,
    device: Device,
    tiling: Tiling | None = None,
    vector_bytes: int = VECTOR_BYTES,
    store_bytes: int = VECTOR_BYTES,
    bias_bytes: int = VECTOR_BYTES,
) -> ForwardPlan:
    """Plan a forward call.

    Parameters
    ----------
    problem, device : Problem, Device
        What is asked, and of which GPU.
    tiling : Tiling, optional
        Default: the first of the tile table that fits the device.
    vector_bytes, store_bytes : int, default 16
        A power of two that divides all addresses and strides of the inputs, and of the output.
    bias_bytes : int
        The same for the rows of the bias; of no use here, where it is read by elements.

    Raises
    ------
    UnsupportedError
        The tiling does not fit (the message names the limit), or the problem is out of range.
    """
    check_lengths(problem)
    wide = problem.head_dim_v
    candidates = tiles_for(problem, FORWARD_TILES, MAX_CHANGED_SCORES)
    if tiling is not None:
        if tiling.stages != 1:
            raise UnsupportedError(f"the simt engine has stages=1 only, got tiling={tiling}")
        candidates = _given(tiling)
    tile = choose_tile(problem, device, candidates, forward_bytes, wide)
    config = ForwardConfig(
        **_common(problem, device, tile.resident, tile.streamed, tile.warps),
        kv_dtype=problem.key_dtype,
        out_dtype=problem.output_dtype,
        load_width=_width(problem, vector_bytes, problem.head_dim, problem.head_dim_v),
        store_width=_store_width(problem, problem.output_dtype, store_bytes, problem.head_dim_v),
        sinks="sinks" in problem.extras,
    )
    rows = row_tiles(problem, problem.seqlen_q, tile.resident) * problem.num_heads
    shared_memory = forward_bytes(problem, tile)
    launch = kernel_launch("cupyflash_forward", rows, 32 * tile.warps, shared_memory)
    visible = tile_map_of(problem, config.block_m, config.block_n)
    return ForwardPlan("simt", _tiling(config), config, launch, visible, problem.score_mod)


@lru_cache(maxsize=1024)
def plan_backward(
    problem: Problem,
    device: Device,
    tiling: Tiling | None = None,
    vector_bytes: int = VECTOR_BYTES,
    store_bytes: int = VECTOR_BYTES,
    deterministic: bool = False,
    bias_bytes: int = VECTOR_BYTES,
) -> BackwardPlan:
    """Plan a backward call; parameters and errors as in `plan_forward`.

    A `tiling` that was meant for the forward and does not fit here gives way to the table.
    Results are the same bits from run to run whatever `deterministic` says, but for the gradients
    of a score_mod's arrays.
    """
    check_lengths(problem)
    dims = (problem.head_dim, problem.head_dim_v)
    widths: dict[str, Any] = {
        "load_width": _width(problem, vector_bytes, *dims),
        "store_width": _store_width(problem, problem.dtype, store_bytes, *dims),
        "exact_sums": deterministic
        and problem.score_mod is not None
        and bool(problem.score_mod.floating),
    }
    both = bucket(problem.head_dim) + bucket(problem.head_dim_v)

    table = tiles_for(problem, BACKWARD_TILES, MAX_CHANGED_SCORES // 2)
    candidates = (*_given(tiling, keys_stay=True), *table)
    keys = choose_tile(problem, device, candidates, key_bytes, both)
    config_dkdv = BackwardConfig(
        **_common(problem, device, keys.streamed, keys.resident, keys.warps), **widths
    )
    candidates = (*_given(tiling), *table)
    queries = choose_tile(problem, device, candidates, query_bytes, problem.head_dim)
    config_dq = BackwardConfig(
        **_common(problem, device, queries.resident, queries.streamed, queries.warps), **widths
    )

    sequences = 1 if problem.varlen else problem.batch
    rows = sequences * problem.seqlen_q * problem.num_heads
    key_tiles = row_tiles(problem, problem.seqlen_k, keys.resident) * problem.num_heads_kv
    query_tiles = row_tiles(problem, problem.seqlen_q, queries.resident) * problem.num_heads
    grad_sinks = None
    if "sinks" in problem.extras:
        grad_sinks = kernel_launch("cupyflash_grad_sinks", problem.num_heads, _SINKS_THREADS)
    maps = (
        tile_map_of(problem, config_dq.block_m, config_dq.block_n),
        tile_map_of(problem, config_dkdv.block_m, config_dkdv.block_n, "key_visibility"),
    )
    return BackwardPlan(
        "simt",
        _tiling(config_dq),
        config_dkdv,
        config_dq,
        kernel_launch("cupyflash_delta", -(-rows * 32 // _DELTA_THREADS), _DELTA_THREADS),
        kernel_launch("cupyflash_dkdv", key_tiles, 32 * keys.warps, key_bytes(problem, keys)),
        kernel_launch(
            "cupyflash_dq", query_tiles, 32 * queries.warps, query_bytes(problem, queries)
        ),
        grad_sinks,
        _grad_bias(problem, queries),
        tuple(found for found in maps if found is not None),
        problem.score_mod,
    )


def _grad_bias(problem: Problem, tile: SimtTile) -> KernelLaunch | None:
    """Return the launch of one block a tile of the bias: `BiasTile` in bias_simt.cuh."""
    if not problem.bias_shape:
        return None
    batch, heads, rows, cols = problem.bias_shape
    blocks = batch * heads * -(-rows // tile.resident) * -(-cols // tile.streamed)
    shared_memory = query_bytes(problem, tile)
    return kernel_launch("cupyflash_grad_bias", blocks, 32 * tile.warps, shared_memory)


def _given(tiling: Tiling | None, *, keys_stay: bool = False) -> tuple[SimtTile, ...]:
    """Return a caller's tiling in the kernel's terms, if there is one."""
    if tiling is None or tiling.stages != 1:
        return ()
    block_m, block_n = tiling.block_m, tiling.block_n
    sizes = (block_n, block_m) if keys_stay else (block_m, block_n)
    return (SimtTile(*sizes, tiling.warps),)


# What a configuration and a launch are made of.


def _common(
    problem: Problem, device: Device, block_m: int, block_n: int, warps: int
) -> dict[str, Any]:
    """Return the fields that the forward's and the backward's configurations share."""
    return {
        "dtype": problem.dtype,
        "head_dim": bucket(problem.head_dim),
        "head_dim_v": bucket(problem.head_dim_v),
        "block_m": block_m,
        "block_n": block_n,
        "warps": warps,
        # Short values are converted on their way to shared memory, which a copy cannot do.
        "async_copy": problem.dtype in ("float32", "float64")
        and device.compute_capability >= (8, 0),
        **score_features(problem),
    }


def _width(problem: Problem, vector_bytes: int, *head_dims: int) -> int:
    """Return how many elements of the inputs one access can move."""
    return access_width(vector_bytes, ITEMSIZE[problem.dtype], *head_dims)


def _store_width(problem: Problem, dtype: str, vector_bytes: int, *head_dims: int) -> int:
    """Return the same for stores: at most the columns that a lane has next to each other."""
    width = access_width(vector_bytes, ITEMSIZE[dtype], *head_dims)
    return math.gcd(width, VECTOR_BYTES // accumulator_bytes(problem))


def _tiling(config: ForwardConfig | BackwardConfig) -> Tiling:
    return Tiling(config.block_m, config.block_n, 1, config.warps)


# The stub.


def _storage_assertion(storage: str, launch: KernelLaunch) -> str:
    return (
        f"static_assert(sizeof({storage}) == {launch.shared_memory},"
        f' "{storage} differs from the plan");'
    )
