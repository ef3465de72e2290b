"""How the wgmma engine serves a problem: `WgmmaForwardPlan`.

Hopper's tensor cores and copy engine, for float16, bfloat16 and FP8 on compute capability 9.0; the
backward, which FP8 has not, is in `plan_wgmma_backward`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from cupyflash._cuda import tensor_map
from cupyflash._cuda.config import constant
from cupyflash._cuda.config_wgmma import WGMMA_FORWARD_PARAMS, WgmmaForwardConfig
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import (
    VECTOR_BYTES,
    KernelLaunch,
    TileMap,
    access_width,
    bytes_assertion,
    check_lengths,
    entry_point,
    kernel_launch,
    row_tiles,
    stub,
)
from cupyflash._cuda.params import ITEMSIZE, size_assertion
from cupyflash._cuda.plan_mma_common import leaves_scale, takes_exact_softcap
from cupyflash._cuda.plan_wgmma_backward import plan_backward
from cupyflash._cuda.tiles_wgmma import (
    BANDED_TILES,
    BIAS_TILES,
    FLOAT8_BANDED_TILES,
    FLOAT8_TILES,
    FORWARD_TILES,
    WgmmaTile,
    bucket,
    bucket_v,
)
from cupyflash._cuda.warpgroup import WARP_THREADS, WARPGROUP_WARPS
from cupyflash._problem import Array, Operands, Problem
from cupyflash.errors import UnsupportedError
from cupyflash.tiling import Tiling

__all__ = [
    "BACKWARD_FEATURES",
    "COUNTER_BYTES",
    "LAST_CAPABILITY",
    "LEAST_CAPABILITY",
    "SUPPORTED_DTYPES",
    "SUPPORTED_FEATURES",
    "SUSPECTS",
    "WIDE_FEATURES",
    "WgmmaForwardPlan",
    "plan_backward",
    "plan_forward",
    "unreadable",
    "yields",
]

SUPPORTED_DTYPES = frozenset({"float16", "bfloat16", "float8_e4m3fn"})
SUPPORTED_FEATURES = frozenset({"causal", "window", "softcap", "sinks"})
WIDE_FEATURES = SUPPORTED_FEATURES | {"alibi_slopes", "bias", "varlen"}  # of 16-bit calls
BACKWARD_FEATURES = SUPPORTED_FEATURES
LEAST_CAPABILITY = LAST_CAPABILITY = (9, 0)

SUSPECTS = "visibility"  # the pointer to what warps say: attention/suspects.cuh
COUNTER_BYTES = 4  # behind that, of varlen query tiles: forward/dealt_tiles_wgmma.cuh

_LEAST_MEAN_LENGTH = 512  # of varlen entries
_BIAS_DTYPES = ("float16", "bfloat16")
_BIAS_BYTES = 2  # of an element
# Times the fewest: beyond, a tile with less waste is faster. FP8's three warpgroups whose products
# are apart are so far ahead that six tiles for 1024 rows are faster still.
_MOST_ROWS, _MOST_ROWS_APART = 1.04, 1.125


@dataclass(frozen=True)
class WgmmaForwardPlan:
    """How a forward call runs."""

    engine: str
    tiling: Tiling
    config: WgmmaForwardConfig
    launch: KernelLaunch

    @property
    def tile_maps(self) -> tuple[TileMap, ...]:
        return ()

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        return (self.launch,)

    @property
    def suspects(self) -> int:
        """Bytes in which warps say whether they have met NaN; another kernel follows then."""
        if not self.config.meets_others:
            return 0
        return self.launch.blocks * (self.launch.threads // WARP_THREADS - WARPGROUP_WARPS)

    @cached_property
    def stub(self) -> str:
        """CUDA source that instantiates the kernel."""
        return stub(
            "forward/kernel_wgmma.cuh",
            size_assertion("WgmmaForwardParams", WGMMA_FORWARD_PARAMS),
            constant(self.config),
            bytes_assertion("WgmmaForwardShape<config>", self.launch),
            entry_point(self.launch, "WgmmaForwardParams", "forward_wgmma<config>"),
        )


@lru_cache(maxsize=1024)
def plan_forward(
    problem: Problem,
    device: Device,
    tiling: Tiling | WgmmaTile | None = None,
    vector_bytes: int = VECTOR_BYTES,
    store_bytes: int = VECTOR_BYTES,
    bias_bytes: int = VECTOR_BYTES,
) -> WgmmaForwardPlan:
    """Plan a forward call.

    Parameters
    ----------
    problem, device : Problem, Device
        What is asked, and of which GPU.
    tiling : Tiling or WgmmaTile, optional
        Default: from the tile table.
    vector_bytes : int, default 16
        A power of two that divides all addresses and strides of the inputs: 16, see `unreadable`.
    store_bytes : int, default 16
        One that divides those of the output.
    bias_bytes : int, default 16
        The same for the rows of the bias: 16, see `unreadable`.

    Raises
    ------
    UnsupportedError
        The tiling does not fit (the message names the limit), or dtype, device or lengths are not
        this engine's.
    """
    _check_problem(problem, device, vector_bytes)
    table = _table(problem)
    tile = _choose(problem, table) if tiling is None else _given(tiling, table, problem)
    has_bias = "bias" in problem.extras
    tile = replace(tile, bias_stages=max(1, tile.bias_stages) if has_bias else 0)
    store_width = access_width(store_bytes, ITEMSIZE[problem.output_dtype], problem.head_dim_v)
    if store_width * ITEMSIZE[problem.output_dtype] < VECTOR_BYTES or problem.varlen:
        tile = replace(tile, staged=0)  # the copy engine would not write such rows, or too many
    head_dims = bucket(problem.head_dim), bucket_v(problem.head_dim_v)
    shared_memory = tile.shared_memory(*head_dims)
    complaint = tile.complaint(*head_dims)
    limit = device.shared_memory_per_block_optin
    if complaint is None and shared_memory > limit:
        complaint = f"{shared_memory} bytes of shared memory are needed and {limit} allowed"
    complaint = complaint or _too_few_keys(tile, problem)
    if complaint is not None:
        raise UnsupportedError(
            f"{tile} does not fit the wgmma engine for {problem.dtype}, head_dim"
            f" {problem.head_dim}, head_dim_v {problem.head_dim_v} on {device.name}: {complaint}."
            " Give tiling=None or smaller blocks."
        )
    raw_scores, alibi = leaves_scale(problem), "alibi_slopes" in problem.extras
    config = WgmmaForwardConfig(
        dtype=problem.dtype,
        out_dtype=problem.output_dtype,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        block_m=tile.block_m,
        block_n=tile.block_n,
        stages=tile.stages,
        query_tiles=tile.query_tiles,
        store_width=store_width,
        staged=tile.staged_columns(head_dims[1]),
        query_in_registers=tile.query_in_registers,
        shared_probabilities=tile.shared_probabilities,
        joined=tile.joined,
        apart=tile.apart,
        sums_by_tile=tile.sums_by_tile,
        turns=tile.turns,
        eager=tile.eager and raw_scores and not alibi and not problem.is_float8,
        raw_scores=raw_scores,
        window=problem.is_banded,
        softcap=problem.softcap is not None,
        exact_softcap=takes_exact_softcap(problem),
        sinks="sinks" in problem.extras,
        alibi=alibi,
        bias=has_bias,
        bias_dtype=problem.bias_dtype or "float32",
        bias_stages=tile.bias_stages,
        varlen=problem.varlen,
    )
    query_tiles = row_tiles(problem, problem.seqlen_q, tile.block_m) * problem.num_heads
    kernel_launch("all query tiles", query_tiles, tile.threads)  # they are numbered by an int
    launch = kernel_launch(
        "cupyflash_forward_wgmma",
        min(query_tiles, device.multiprocessors),
        tile.threads,
        shared_memory,
    )
    shown = Tiling(tile.block_m, tile.block_n, tile.stages, tile.warps)
    return WgmmaForwardPlan("wgmma", shown, config, launch)


def yields(problem: Problem) -> bool:
    """Whether mma, whose tiles are smaller, is faster: with short varlen entries."""
    return problem.varlen and min(_mean_lengths(problem)) < _LEAST_MEAN_LENGTH


def unreadable(problem: Problem, operands: Operands) -> str | None:
    """Return what the copy engine would have to support to read q, k, v and the bias.

    None: it reads them.
    """
    if problem.bias_dtype not in (None, *_BIAS_DTYPES) and not problem.is_float8:
        readable = " and ".join(_BIAS_DTYPES)
        return (
            f"support for a bias's dtype {problem.bias_dtype}: its copy engine reads {readable}"
            " (engine=None takes another one)"
        )
    if problem.is_empty:
        return None  # nothing is read
    if operands.bias is not None and problem.varlen:
        return "varlen entries of a bias in its copy engine (engine=None takes another one)"
    for name, array in (("q", operands.query), ("k", operands.key), ("v", operands.value)):
        reason = _unreadable(array)
        if reason is not None:
            return f"support for {name}'s {reason} (engine=None takes another one)"
    if operands.bias is not None and not problem.is_float8:
        reason = _unreadable_bias(operands.bias, problem)
        if reason is not None:
            return f"support for a bias's {reason} (engine=None takes another one)"
    return None


def _unreadable(array: Array) -> str | None:
    address = getattr(array.data, "ptr", 0)  # a host array will be copied to an aligned one
    if address % VECTOR_BYTES:
        return f"address {address:#x}: its copy engine reads multiples of {VECTOR_BYTES}"
    names = ("batch", "seqlen", "heads")[1 - array.ndim :]
    return _unreadable_axis(names, array)


def _unreadable_axis(names: tuple[str, ...], array: Array) -> str | None:
    for axis, length, stride in zip(names, array.shape, array.strides, strict=False):
        if length > 1 and not tensor_map.is_legal_stride(stride):
            return (
                f"{axis} axis, whose stride is {stride} bytes: its copy engine reads positive"
                f" multiples of {VECTOR_BYTES} below 2**40"
            )
    return None


def _unreadable_bias(bias: Array, problem: Problem) -> str | None:
    whole = problem.seqlen_q, problem.seqlen_k
    for axis, length, needed in zip(("queries", "keys"), bias.shape[2:], whole, strict=True):
        if length != needed:
            return f"axis of {axis}, which is broadcast: its copy engine reads whole ones"
    address = getattr(bias.data, "ptr", 0)
    if address % VECTOR_BYTES:
        return f"address {address:#x}: its copy engine reads multiples of {VECTOR_BYTES}"
    stride = bias.strides[3]
    if bias.shape[3] > 1 and stride != _BIAS_BYTES:
        return f"axis of keys, whose stride is {stride} bytes: its copy engine reads neighbours"
    return _unreadable_axis(("batch", "heads", "queries"), bias)


def _check_problem(problem: Problem, device: Device, vector_bytes: int) -> None:
    if problem.dtype not in SUPPORTED_DTYPES:
        served = ", ".join(sorted(SUPPORTED_DTYPES))
        raise UnsupportedError(f"engine='wgmma' serves {served}, not {problem.dtype}")
    if device.compute_capability != LEAST_CAPABILITY:
        major, minor = device.compute_capability
        raise UnsupportedError(
            f"engine='wgmma' needs compute capability 9.0, and {device.name} has {major}.{minor}"
        )
    if vector_bytes != VECTOR_BYTES:
        raise UnsupportedError(f"engine='wgmma' cannot read arrays aligned to {vector_bytes} bytes")
    if problem.bias_dtype not in (None, *_BIAS_DTYPES):
        raise UnsupportedError(f"engine='wgmma' cannot read a bias of {problem.bias_dtype}")
    check_lengths(problem)


def _given(tiling: Tiling | WgmmaTile, table: tuple[WgmmaTile, ...], problem: Problem) -> WgmmaTile:
    """Return a caller's tiling in the kernel's terms: as in the table where it stands there."""
    if isinstance(tiling, WgmmaTile):
        return tiling
    sizes = tiling.block_m, tiling.block_n, tiling.stages
    tile = replace(table[-1], query_in_registers=False, staged=0)
    tile = replace(tile, block_m=tiling.block_m, block_n=tiling.block_n, stages=tiling.stages)
    for other in _fitting((*_for_length(table, problem), *table), problem):
        if (other.block_m, other.block_n, other.stages) == sizes:
            tile = other
            break
    if tile.warps != tiling.warps:
        raise UnsupportedError(
            f"the wgmma engine has 4 warps for each 64 of block_m, and 4 more; got tiling={tiling}"
        )
    return tile


def _too_few_keys(tile: WgmmaTile, problem: Problem) -> str | None:
    """Say that a query tile sees fewer keys than a key tile, which then holds others' too.

    Not where the sequence ends on both sides of it, nor with a bias or varlen: see `first_key` in
    kernels/forward/walk_wgmma.cuh.
    """
    left, right = problem.window_left, problem.window_right
    if left is None or right is None or problem.varlen or "bias" in problem.extras:
        return None
    seen = tile.block_m + left + right
    if problem.seqlen_q <= tile.block_m or seen >= tile.block_n:
        return None
    return f"with this window {tile.block_m} queries see {seen} keys, fewer than block_n"


def _table(problem: Problem) -> tuple[WgmmaTile, ...]:
    width = bucket(max(problem.head_dim, problem.head_dim_v))
    full, banded = FORWARD_TILES, BANDED_TILES
    if problem.is_float8:
        full, banded = FLOAT8_TILES, FLOAT8_BANDED_TILES
    elif "bias" in problem.extras:
        full = banded = BIAS_TILES
    return banded.get(width, full[width]) if problem.is_banded else full[width]


def _for_length(table: tuple[WgmmaTile, ...], problem: Problem) -> tuple[WgmmaTile, ...]:
    _, keys = _mean_lengths(problem)
    return tuple(tile for tile in table if keys >= tile.least_keys)


def _mean_lengths(problem: Problem) -> tuple[int, int]:
    """Return those of a sequence; only the device knows how long varlen entries are."""
    entries = max(1, problem.batch) if problem.varlen else 1
    return -(-problem.seqlen_q // entries), -(-problem.seqlen_k // entries)


def _fitting(tiles: Iterable[WgmmaTile], problem: Problem) -> tuple[WgmmaTile, ...]:
    """Return those whose rules the head dims keep."""
    dims = bucket(problem.head_dim), bucket_v(problem.head_dim_v)
    return tuple(tile for tile in tiles if tile.complaint(*dims) is None)


def _choose(problem: Problem, table: tuple[WgmmaTile, ...]) -> WgmmaTile:
    """Return the first tile that computes few more rows than exist, or the one with the fewest."""
    table = _fitting(_for_length(table, problem), problem) or table
    length, _ = _mean_lengths(problem)
    rows = {tile: -(-length // tile.block_m) * tile.block_m for tile in table}
    least = min(rows.values())

    def wastes_little(tile: WgmmaTile) -> bool:
        return rows[tile] <= least * (_MOST_ROWS_APART if tile.apart else _MOST_ROWS)

    return next(filter(wastes_little, table))
