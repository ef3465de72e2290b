"""How the wgmma engine serves a backward call: `WgmmaBackwardPlan`."""

from __future__ import annotations

from dataclasses import dataclass
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
    entry_point,
    kernel_launch,
    row_tiles,
    scale_can_wait,
    stub,
)
from cupyflash._cuda.params import size_assertion
from cupyflash._cuda.plan_mma import LARGEST_FAST_SOFTCAP, ROW_LANES, ROW_THREADS, SINKS_THREADS
from cupyflash._cuda.tiles_wgmma_backward import (
    BACKWARD_TILES,
    WgmmaBackwardTile,
    bucket_backward,
)
from cupyflash._problem import Problem
from cupyflash.errors import UnsupportedError
from cupyflash.tiling import Tiling

__all__ = ["WgmmaBackwardPlan", "plan_backward"]

_ITEMSIZE = 2
_STATISTICS = 2  # of a row


@dataclass(frozen=True)
class WgmmaBackwardPlan:
    """How a backward call runs: its kernels in the order of `launches`."""

    engine: str
    tiling: Tiling
    config: WgmmaBackwardConfig
    scratch: Scratch
    prepare: KernelLaunch
    main: KernelLaunch
    convert: KernelLaunch
    grad_sinks: KernelLaunch | None

    @property
    def tile_maps(self) -> tuple[TileMap, ...]:
        return ()

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        launches = self.prepare, self.main, self.convert
        return launches if self.grad_sinks is None else (*launches, self.grad_sinks)

    @cached_property
    def stub(self) -> str:
        """CUDA source that instantiates the kernels."""
        params, shape = "WgmmaBackwardParams", "WgmmaBackwardShape<config>"
        entries = [
            entry_point(self.prepare, params, "prepare_backward_wgmma<config>"),
            entry_point(self.main, params, "backward_wgmma<config>"),
            entry_point(self.convert, params, "convert_query_gradient<config>"),
        ]
        if self.grad_sinks is not None:
            entries.append(entry_point(self.grad_sinks, params, "grad_sinks_wgmma<config>"))
        return stub(
            "backward/kernel_wgmma.cuh",
            size_assertion(params, WGMMA_BACKWARD_PARAMS),
            constant(self.config),
            f"static_assert({shape}::bytes == {self.main.shared_memory},"
            f' "{shape} differs from the plan");',
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
        Blocks add to dq in the order of their keys.
    bias_bytes : int
        Of no account: a bias is left to mma.

    Raises
    ------
    UnsupportedError
        The tile does not fit: the message names the limit.
    """
    tile = _choose(problem, device, (*_given(tiling), *BACKWARD_TILES[_wider(problem)]))
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
        direct=tile.roles or tile.direct,
        load_width=access_width(vector_bytes, _ITEMSIZE, problem.head_dim_v),
        store_width=access_width(store_bytes, _ITEMSIZE, problem.head_dim, problem.head_dim_v),
        raw_scores=problem.softcap is None and scale_can_wait(problem),
        window=problem.window_left is not None or problem.window_right is not None,
        softcap=problem.softcap is not None,
        exact_softcap=(problem.softcap or 0.0) > LARGEST_FAST_SOFTCAP,
        deterministic=deterministic,
    )
    query_rows = problem.batch * problem.seqlen_q * problem.num_heads
    row_blocks = -(-query_rows * ROW_LANES // ROW_THREADS)
    key_tiles = row_tiles(problem, problem.seqlen_k, tile.block_n) * problem.num_heads_kv
    shared_memory = tile.shared_memory(config.head_dim, config.head_dim_v)
    grad_sinks = None
    if "sinks" in problem.extras:
        grad_sinks = kernel_launch("cupyflash_grad_sinks_wgmma", problem.num_heads, SINKS_THREADS)
    return WgmmaBackwardPlan(
        "wgmma",
        Tiling(tile.block_m, tile.block_n, tile.stages, tile.warps),
        config,
        _scratch(problem, tile.block_m, config.head_dim),
        kernel_launch("cupyflash_prepare_wgmma", row_blocks, ROW_THREADS),
        kernel_launch("cupyflash_backward_wgmma", key_tiles, tile.threads, shared_memory),
        kernel_launch("cupyflash_convert_wgmma", row_blocks, ROW_THREADS),
        grad_sinks,
    )


def _wider(problem: Problem) -> int:
    return bucket_backward(max(problem.head_dim, problem.head_dim_v))


def _scratch(problem: Problem, block_m: int, head_dim: int) -> Scratch:
    tiles = -(-problem.seqlen_q // block_m)
    pairs = problem.batch * problem.num_heads
    return Scratch(tiles * block_m, tiles, pairs, -(-head_dim // 64) * 64, _STATISTICS)


def _given(tiling: Tiling | WgmmaBackwardTile | None) -> tuple[WgmmaBackwardTile, ...]:
    """Return a caller's tiling in the kernel's terms, if it can be one."""
    if isinstance(tiling, WgmmaBackwardTile):
        return (tiling,)
    if tiling is None:
        return ()
    sizes = tiling.block_m, tiling.block_n, tiling.stages, tiling.stages
    ways = ((True, False), (False, False), (True, True))
    tiles = (WgmmaBackwardTile(*sizes, early, roles) for early, roles in ways)
    return tuple(tile for tile in tiles if tile.warps == tiling.warps)


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
