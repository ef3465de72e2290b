"""How the mma engine serves a problem: `MmaForwardPlan`, `MmaBackwardPlan`.

Tensor cores by ``mma.sync``, for float16 and bfloat16 on compute capability 8.0 and above. As in
`plan`, ``plan = plan_forward(problem, device)`` is a pure function, and a plan holds its stub.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from cupyflash._cuda.config import constant, score_features
from cupyflash._cuda.config_mma import (
    MMA_BACKWARD_PARAMS,
    MmaBackwardConfig,
    MmaForwardConfig,
    Scratch,
)
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
    scale_can_wait,
    stub,
    tile_map_of,
)
from cupyflash._cuda.params import FORWARD_PARAMS, ITEMSIZE, size_assertion
from cupyflash._cuda.score_source import ScoreSource, definitions
from cupyflash._cuda.tiles_mma import (
    BACKWARD_TILES,
    FORWARD_TILES,
    STAGES,
    MmaBackwardTile,
    MmaForwardTile,
    bucket,
)
from cupyflash._problem import Problem
from cupyflash.errors import UnsupportedError
from cupyflash.tiling import Tiling

__all__ = [
    "LARGEST_FAST_SOFTCAP",
    "LEAST_CAPABILITY",
    "ROW_LANES",
    "ROW_THREADS",
    "SINKS_THREADS",
    "SUPPORTED_DTYPES",
    "SUPPORTED_FEATURES",
    "MmaBackwardPlan",
    "MmaForwardPlan",
    "plan_backward",
    "plan_forward",
]

SUPPORTED_DTYPES = frozenset({"float16", "bfloat16"})
SUPPORTED_FEATURES = frozenset(
    {"causal", "window", "softcap", "alibi_slopes", "sinks", "varlen"}
    | {"mask", "block_mask", "bias", "dropout", "score_mod"}
)
LEAST_CAPABILITY = (8, 0)

_ITEMSIZE = 2
ROW_LANES = 8  # of prepare and convert: QueryRow in kernels/backward/prepare_mma.cuh
ROW_THREADS = 256
SINKS_THREADS = 256
_MAX_BIAS_BYTES = 4  # of an element in shared memory
LARGEST_FAST_SOFTCAP = 64.0  # the fast formula is off by a rounding error of the cap
_LEAST_DIVISOR = 2.0**-40

_Tile = TypeVar("_Tile", MmaForwardTile, MmaBackwardTile)


@dataclass(frozen=True)
class MmaForwardPlan:
    """How a forward call runs."""

    engine: str
    tiling: Tiling
    config: MmaForwardConfig
    blocks: int  # a multiprocessor
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
            "forward/kernel_mma.cuh",
            *definitions(self.score_mod),
            size_assertion("ForwardParams", FORWARD_PARAMS),
            constant(self.config),
            _bytes_assertion("MmaForwardShape<config>", self.launch),
            *(tile_map.entry_point("ForwardParams", "config") for tile_map in self.tile_maps),
            entry_point(self.launch, "ForwardParams", "forward_mma<config>", self.blocks),
        )


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
            _bytes_assertion("MmaBackwardShape<config>", self.main),
            *entries,
        )


@lru_cache(maxsize=1024)
def plan_forward(
    problem: Problem,
    device: Device,
    tiling: Tiling | MmaForwardTile | None = None,
    vector_bytes: int = VECTOR_BYTES,
    store_bytes: int = VECTOR_BYTES,
    bias_bytes: int = VECTOR_BYTES,
) -> MmaForwardPlan:
    """Plan a forward call.

    Parameters
    ----------
    problem, device : Problem, Device
        What is asked, and of which GPU.
    tiling : Tiling or MmaForwardTile, optional
        Default: the first of the tile table that fits the device.
    vector_bytes, store_bytes : int, default 16
        A power of two that divides all addresses and strides of the inputs, and of the output.
    bias_bytes : int, default 16
        The same for the rows of the bias.

    Raises
    ------
    UnsupportedError
        The tiling does not fit (the message names the limit), or dtype, device or lengths are not
        this engine's.
    """
    _check_problem(problem, device)
    table = FORWARD_TILES[_wider(problem)]
    tile = _choose(problem, device, table if tiling is None else (_given(tiling, table),))
    config = MmaForwardConfig(
        **_common(problem, vector_bytes, store_bytes, bias_bytes, (problem.head_dim_v,)),
        block_m=tile.block_m,
        block_n=tile.block_n,
        warps=tile.warps,
        kept_steps=tile.kept_steps,
        sinks="sinks" in problem.extras,
    )
    launch = kernel_launch(
        "cupyflash_forward_mma",
        row_tiles(problem, problem.seqlen_q, tile.block_m) * problem.num_heads,
        32 * tile.warps,
        tile.shared_memory(config.head_dim, config.head_dim_v, _bias_itemsize(problem)),
    )
    shown = Tiling(tile.block_m, tile.block_n, STAGES, tile.warps)
    visible = tile_map_of(problem, config.block_m, config.block_n)
    return MmaForwardPlan("mma", shown, config, tile.blocks, launch, visible, problem.score_mod)


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
    """Plan a backward call; parameters and errors as in `plan_forward`.

    A `tiling` that was meant for the forward and does not fit here gives way to the table.
    """
    _check_problem(problem, device)
    table = BACKWARD_TILES[_wider(problem)]
    tile = _choose(problem, device, (*_splits(tiling), *table))
    config = MmaBackwardConfig(
        **_common(
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
            tile.shared_memory(config.head_dim, config.head_dim_v, _bias_itemsize(problem)),
        ),
        kernel_launch("cupyflash_convert_mma", row_blocks, ROW_THREADS),
        grad_sinks,
        tile_map_of(problem, config.block_m, config.block_n),
        problem.score_mod,
        config.bias and not written,
        bias_sums,
        convert_bias,
    )


def _check_problem(problem: Problem, device: Device) -> None:
    if problem.dtype not in SUPPORTED_DTYPES:
        raise UnsupportedError(f"engine='mma' serves float16 and bfloat16, not {problem.dtype}")
    if device.compute_capability < LEAST_CAPABILITY:
        major, minor = device.compute_capability
        raise UnsupportedError(
            f"engine='mma' needs compute capability 8.0, and {device.name} has {major}.{minor}"
        )
    check_lengths(problem)


def _check_stages(tiling: Tiling) -> None:
    if tiling.stages != STAGES:
        raise UnsupportedError(f"the mma engine has stages={STAGES} only, got tiling={tiling}")


def _wider(problem: Problem) -> int:
    return bucket(max(problem.head_dim, problem.head_dim_v))


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


# The choice of a tile.


def _given(tiling: Tiling | MmaForwardTile, table: tuple[MmaForwardTile, ...]) -> MmaForwardTile:
    """Return a caller's tiling in the kernel's terms: as in the table where it stands there."""
    if isinstance(tiling, MmaForwardTile):
        return tiling
    _check_stages(tiling)
    sizes = tiling.block_m, tiling.block_n, tiling.warps
    for tile in table:
        if (tile.block_m, tile.block_n, tile.warps) == sizes:
            return tile
    return MmaForwardTile(*sizes, kept_steps=0, blocks=1)


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


def _choose(problem: Problem, device: Device, candidates: Iterable[_Tile]) -> _Tile:
    """Return the first tile that fits."""
    head_dims = bucket(problem.head_dim), bucket(problem.head_dim_v)
    limit = device.shared_memory_per_block_optin
    for tile in candidates:
        complaint = tile.complaint(*head_dims)
        needed = tile.shared_memory(*head_dims, _bias_itemsize(problem))
        if complaint is None and needed > limit:
            complaint = f"{needed} bytes of shared memory are needed and {limit} allowed"
        if complaint is None:
            return tile
    raise UnsupportedError(
        f"{tile} does not fit the mma engine for {problem.dtype}, head_dim {problem.head_dim},"
        f" head_dim_v {problem.head_dim_v} on {device.name}: {complaint}."
        " Give tiling=None or smaller blocks."
    )


def _bias_itemsize(problem: Problem) -> int:
    """Return the bytes of an element of the bias in shared memory: float64 is narrowed there."""
    return 0 if problem.bias_dtype is None else min(ITEMSIZE[problem.bias_dtype], _MAX_BIAS_BYTES)


def _common(
    problem: Problem,
    vector_bytes: int,
    store_bytes: int,
    bias_bytes: int,
    stored: tuple[int, ...],
) -> dict[str, Any]:
    """Return the fields that the forward's and the backward's configurations share."""
    bias_width = 1
    if problem.bias_dtype not in (None, "float64"):
        bias_width = access_width(bias_bytes, ITEMSIZE[problem.bias_dtype])
    return {
        "dtype": problem.dtype,
        "head_dim": bucket(problem.head_dim),
        "head_dim_v": bucket(problem.head_dim_v),
        "load_width": access_width(vector_bytes, _ITEMSIZE, problem.head_dim, problem.head_dim_v),
        "store_width": access_width(store_bytes, _ITEMSIZE, *stored),
        "raw_scores": _raw_scores(problem),
        "bias_width": bias_width,
        "exact_softcap": (problem.softcap or 0.0) > LARGEST_FAST_SOFTCAP,
        **score_features(problem),
    }


def _raw_scores(problem: Problem) -> bool:
    """Whether the scale can wait for the exponent; ALiBi's slopes are then divided by it."""
    if problem.softcap is not None or problem.extras & {"bias", "score_mod"}:
        return False
    least = _LEAST_DIVISOR if "alibi_slopes" in problem.extras else 0.0
    return scale_can_wait(problem) and problem.softmax_scale > least


# The stub.


def _bytes_assertion(shape: str, launch: KernelLaunch) -> str:
    text = f"{shape} differs from the plan"
    return f'static_assert({shape}::bytes == {launch.shared_memory}, "{text}");'
