"""How the wgmma engine serves a backward call: `WgmmaBackwardPlan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from cupyflash._cuda.config import constant
from cupyflash._cuda.config_mma import Scratch
from cupyflash._cuda.config_wgmma import WGMMA_BACKWARD_PARAMS, WgmmaBackwardConfig
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import (
    VECTOR_BYTES,
    KernelLaunch,
    TileMap,
    access_width,
    bytes_assertion,
    entry_point,
    kernel_launch,
    row_tiles,
    scale_can_wait,
    stub,
)
from cupyflash._cuda.params import size_assertion
from cupyflash._cuda.plan_mma_backward import ROW_LANES, ROW_THREADS, SINKS_THREADS
from cupyflash._cuda.plan_mma_common import takes_exact_softcap
from cupyflash._cuda.tiles_wgmma_backward import (
    BACKWARD_TILES,
    BANDED_BACKWARD_TILES,
    DETERMINISTIC_BACKWARD_TILES,
    WgmmaBackwardTile,
    bucket_backward,
)
from cupyflash._problem import Problem
from cupyflash.errors import UnsupportedError
from cupyflash.tiling import Tiling

__all__ = ["WgmmaBackwardPlan", "plan_backward"]

_ITEMSIZE = 2
_STATISTICS = 2  # of a row
_LEAST_BUSY = 0.9  # of the multiprocessors' time, for blocks that take whole heads


@dataclass(frozen=True)
class WgmmaBackwardPlan:
    """How a backward call runs: its kernels in the order of `launches`."""

    engine: str
    tiling: Tiling
    config: WgmmaBackwardConfig
    scratch: Scratch
    prepare: KernelLaunch
    main: KernelLaunch
    convert: KernelLaunch | None
    grad_sinks: KernelLaunch | None

    @property
    def tile_maps(self) -> tuple[TileMap, ...]:
        return ()

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        launches = self.prepare, self.main, self.convert, self.grad_sinks
        return tuple(launch for launch in launches if launch is not None)

    @cached_property
    def stub(self) -> str:
        """CUDA source that instantiates the kernels."""
        params = "WgmmaBackwardParams"
        entries = [
            entry_point(self.prepare, params, "prepare_backward_wgmma<config>"),
            entry_point(self.main, params, "backward_wgmma<config>"),
        ]
        if self.convert is not None:
            entries.append(entry_point(self.convert, params, "convert_query_gradient<config>"))
        if self.grad_sinks is not None:
            entries.append(entry_point(self.grad_sinks, params, "grad_sinks_wgmma<config>"))
        return stub(
            "backward/kernel_wgmma.cuh",
            size_assertion(params, WGMMA_BACKWARD_PARAMS),
            constant(self.config),
            bytes_assertion("WgmmaBackwardShape<config>", self.main),
            *entries,
        )


@lru_cache(maxsize=1024)
def plan_backward(
    problem: Problem,
    device: Device,
    tiling: Tiling | WgmmaBackwardTile | None = None,
    vector_bytes: int = VECTOR_BYTES,
    store_bytes: int = VECTOR_BYTES,
    deterministic: bool = False,
    bias_bytes: int = VECTOR_BYTES,
) -> WgmmaBackwardPlan:
    """Plan a backward call of a problem that the engine's forward serves.

    Parameters
    ----------
    problem, device : Problem, Device
        What is asked, and of which GPU.
    tiling : Tiling or WgmmaBackwardTile, optional
        Default: from the tile table. A `Tiling` that was meant for the forward and does not fit
        here gives way to the table.
    vector_bytes, store_bytes : int, default 16
        A power of two that divides all addresses and strides of out and grad_out, and of the
        gradients.
    deterministic : bool
        dq is the same bits in every run.
    bias_bytes : int
        Of no account: a bias is left to mma.

    Raises
    ------
    UnsupportedError
        The tile does not fit: the message names the limit.
    """
    preferred = tuple(_preferred(problem, device, deterministic))
    tile = _choose(problem, device, (*_given(tiling, preferred), *preferred))
    take_turns = deterministic and not tile.whole_heads
    if take_turns:
        # Blocks that wait for others must start in the order of their key tiles; roles add in their
        # turns themselves.
        tile = replace(tile, persistent=False, direct=tile.direct or tile.roles)
    config = WgmmaBackwardConfig(
        dtype=problem.dtype,
        head_dim=bucket_backward(problem.head_dim),
        head_dim_v=bucket_backward(problem.head_dim_v),
        block_m=tile.block_m,
        block_n=tile.block_n,
        stages=tile.stages,
        grad_out_stages=tile.grad_out_stages,
        early=tile.early,
        roles=tile.roles,
        direct=tile.direct,
        persistent=tile.persistent,
        whole_heads=tile.whole_heads,
        load_width=access_width(vector_bytes, _ITEMSIZE, problem.head_dim_v),
        store_width=access_width(store_bytes, _ITEMSIZE, problem.head_dim, problem.head_dim_v),
        raw_scores=problem.softcap is None and scale_can_wait(problem),
        window=problem.is_banded,
        softcap=problem.softcap is not None,
        exact_softcap=takes_exact_softcap(problem),
        deterministic=take_turns,
    )
    query_rows = problem.batch * problem.seqlen_q * problem.num_heads
    row_blocks = -(-query_rows * ROW_LANES // ROW_THREADS)
    key_tiles = row_tiles(problem, problem.seqlen_k, tile.block_n) * problem.num_heads_kv
    kernel_launch("all key tiles", key_tiles, tile.threads)  # they are numbered by an int
    blocks, convert = key_tiles, None
    if tile.persistent:
        heads = problem.batch * problem.num_heads_kv
        blocks = min(heads if tile.whole_heads else key_tiles, device.multiprocessors)
    if not tile.whole_heads:
        convert = kernel_launch("cupyflash_convert_wgmma", row_blocks, ROW_THREADS)
    shared_memory = tile.shared_memory(config.head_dim, config.head_dim_v)
    grad_sinks = None
    if "sinks" in problem.extras:
        grad_sinks = kernel_launch("cupyflash_grad_sinks_wgmma", problem.num_heads, SINKS_THREADS)
    return WgmmaBackwardPlan(
        "wgmma",
        Tiling(tile.block_m, tile.block_n, tile.stages, tile.warps),
        config,
        _scratch(problem, tile, config.head_dim, blocks),
        kernel_launch("cupyflash_prepare_wgmma", row_blocks, ROW_THREADS),
        kernel_launch("cupyflash_backward_wgmma", blocks, tile.threads, shared_memory),
        convert,
        grad_sinks,
    )


def _preferred(
    problem: Problem, device: Device, deterministic: bool
) -> Iterator[WgmmaBackwardTile]:
    """Yield the tables' tiles whose limits the problem keeps."""
    width = bucket_backward(max(problem.head_dim, problem.head_dim_v))
    tiles = (BANDED_BACKWARD_TILES if problem.is_banded else BACKWARD_TILES)[width]
    if deterministic:
        tiles = *DETERMINISTIC_BACKWARD_TILES.get(width, ()), *tiles
    queries = problem.seqlen_q * problem.group_size
    for tile in tiles:
        few = not tile.most_queries or queries <= tile.most_queries
        if few and (not tile.whole_heads or _heads_fill(problem, device)):
            yield tile


def _heads_fill(problem: Problem, device: Device) -> bool:
    """Whether blocks with a head each leave few multiprocessors idle at the end."""
    heads = problem.batch * problem.num_heads_kv
    rounds = -(-heads // device.multiprocessors)
    return heads >= _LEAST_BUSY * rounds * device.multiprocessors


def _scratch(problem: Problem, tile: WgmmaBackwardTile, head_dim: int, blocks: int) -> Scratch:
    tiles = -(-problem.seqlen_q // tile.block_m)
    rows, dim = tiles * tile.block_m, -(-head_dim // 64) * 64
    pairs = problem.batch * problem.num_heads
    sum_pairs = blocks * problem.group_size if tile.whole_heads else None
    return Scratch(rows, tiles, pairs, dim, _STATISTICS, sum_pairs)


def _given(
    tiling: Tiling | WgmmaBackwardTile | None, preferred: tuple[WgmmaBackwardTile, ...]
) -> tuple[WgmmaBackwardTile, ...]:
    """Return a caller's tiling in the kernel's terms, if it can be one: as in the table first."""
    if isinstance(tiling, WgmmaBackwardTile):
        return (tiling,)
    if tiling is None:
        return ()
    sizes = tiling.block_m, tiling.block_n, tiling.stages, tiling.stages
    ways = ((True, False), (False, False), (True, True))
    tiles = (*preferred, *(WgmmaBackwardTile(*sizes, early, roles) for early, roles in ways))
    given = tiling.block_m, tiling.block_n, tiling.stages, tiling.warps
    return tuple(
        tile for tile in tiles if (tile.block_m, tile.block_n, tile.stages, tile.warps) == given
    )


def _choose(
    problem: Problem, device: Device, candidates: tuple[WgmmaBackwardTile, ...]
) -> WgmmaBackwardTile:
    """Return the first tile that fits."""
    head_dims = bucket_backward(problem.head_dim), bucket_backward(problem.head_dim_v)
    limit = device.shared_memory_per_block_optin
    for tile in candidates:
        complaint = tile.complaint(*head_dims)
        if problem.softcap is not None and not tile.early:
            complaint = "softcap needs P rounded at once"
        needed = tile.shared_memory(*head_dims)
        if complaint is None and needed > limit:
            complaint = f"{needed} bytes of shared memory are needed and {limit} allowed"
        if complaint is None:
            return tile
    raise UnsupportedError(
        f"{tile} does not fit the wgmma engine's backward for {problem.dtype}, head_dim"
        f" {problem.head_dim}, head_dim_v {problem.head_dim_v} on {device.name}: {complaint}."
        " Give tiling=None or smaller blocks."
    )
