"""How the mma engine serves a problem: `MmaForwardPlan`.

Tensor cores by ``mma.sync``, for float16 and bfloat16 on compute capability 8.0 and above. As in
`plan`, ``plan = plan_forward(problem, device)`` is a pure function, and a plan holds its stub. The
backward is in `plan_mma_backward`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from cupyflash._cuda.config import constant
from cupyflash._cuda.config_mma import MmaForwardConfig
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
from cupyflash._cuda.params import FORWARD_PARAMS, size_assertion
from cupyflash._cuda.plan_mma_backward import plan_backward
from cupyflash._cuda.plan_mma_common import (
    LEAST_CAPABILITY,
    SUPPORTED_DTYPES,
    bias_itemsize,
    check_problem,
    choose_tile,
    common_fields,
    wider,
)
from cupyflash._cuda.score_source import ScoreSource, definitions
from cupyflash._cuda.tiles_mma import FORWARD_TILES, STAGES, TURNS, MmaForwardTile, Turns
from cupyflash._problem import Problem
from cupyflash.errors import UnsupportedError
from cupyflash.tiling import Tiling

__all__ = [
    "LEAST_CAPABILITY",
    "SUPPORTED_DTYPES",
    "SUPPORTED_FEATURES",
    "MmaForwardPlan",
    "after_wgmma",
    "plan_backward",
    "plan_forward",
]

_MEASURED = (9, 0)  # where turns are known to pay

SUPPORTED_FEATURES = frozenset(
    {"causal", "window", "softcap", "alibi_slopes", "sinks", "varlen"}
    | {"mask", "block_mask", "bias", "dropout", "score_mod"}
)


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
    again: bool = False  # only if wgmma, which has served the call, has met NaN

    @property
    def tile_maps(self) -> tuple[TileMap, ...]:
        return () if self.tile_map is None else (self.tile_map,)

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        return (*(tile_map.launch for tile_map in self.tile_maps), self.launch)

    @cached_property
    def stub(self) -> str:
        """CUDA source that instantiates the kernel."""
        kernel = "forward_again_mma" if self.again else "forward_mma"
        return stub(
            "forward/kernel_again_mma.cuh" if self.again else "forward/kernel_mma.cuh",
            *definitions(self.score_mod),
            size_assertion("ForwardParams", FORWARD_PARAMS),
            constant(self.config),
            bytes_assertion("MmaForwardShape<config>", self.launch),
            *(tile_map.entry_point("ForwardParams", "config") for tile_map in self.tile_maps),
            entry_point(self.launch, "ForwardParams", f"{kernel}<config>", self.blocks),
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
        Default: the first of the tile tables that fits the device.
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
    check_problem(problem, device)
    tile = choose_tile(
        problem, device, _table(problem, device) if tiling is None else (_given(tiling, problem),)
    )
    config = MmaForwardConfig(
        **common_fields(problem, vector_bytes, store_bytes, bias_bytes, (problem.head_dim_v,)),
        block_m=tile.block_m,
        block_n=tile.block_n,
        warps=tile.warps,
        kept_steps=tile.kept_steps,
        turns=tile.turns,
        sinks="sinks" in problem.extras,
    )
    launch = kernel_launch(
        "cupyflash_forward_mma",
        row_tiles(problem, problem.seqlen_q, tile.block_m) * problem.num_heads,
        32 * tile.warps,
        tile.shared_memory(config.head_dim, config.head_dim_v, bias_itemsize(problem)),
    )
    shown = Tiling(tile.block_m, tile.block_n, STAGES, tile.warps)
    visible = tile_map_of(problem, config.block_m, config.block_n)
    return MmaForwardPlan("mma", shown, config, tile.blocks, launch, visible, problem.score_mod)


def after_wgmma(plan: MmaForwardPlan) -> MmaForwardPlan:
    """Return the plan by which a call that wgmma has served is done again if need be."""
    launch = replace(plan.launch, entry="cupyflash_forward_again_mma")
    return replace(plan, launch=launch, again=True)


def _check_stages(tiling: Tiling) -> None:
    if tiling.stages != STAGES:
        raise UnsupportedError(f"the mma engine has stages={STAGES} only, got tiling={tiling}")


def _table(problem: Problem, device: Device) -> tuple[MmaForwardTile, ...]:
    """Return the tiles for a problem, by preference."""
    turns = (each.tile for each in _turns(problem) if _pays(each, problem, device))
    return (*turns, *FORWARD_TILES[wider(problem)])


def _turns(problem: Problem) -> tuple[Turns, ...]:
    """Return the tiles whose warps multiply in turns and that serve the problem."""
    return () if "bias" in problem.extras else TURNS.get(wider(problem), ())


def _pays(turns: Turns, problem: Problem, device: Device) -> bool:
    """Whether such a tile is faster: calls are long, and fill the GPU with large tiles.

    Where queries see different keys of a mask, fewer of them are hidden.
    """
    if device.compute_capability != _MEASURED or "block_mask" in problem.extras:
        return False
    tiles = row_tiles(problem, problem.seqlen_q, turns.tile.block_m) * problem.num_heads
    if tiles < device.multiprocessors or problem.mask_shape[2:3] not in ((), (1,)):
        return False
    least = turns.plain
    if problem.softcap is not None:
        least = turns.softcap
    elif problem.dropout_p or problem.extras - {"sinks"}:
        least = turns.others
    needed = least.banded if problem.is_banded else least.full
    return needed is not None and _length(problem) >= needed


def _length(problem: Problem) -> int:
    """Return how many queries a sequence has, or keys a query, whichever are fewer.

    Of packed sequences the average.
    """
    length = min(problem.seqlen_q, problem.seqlen_k)
    if problem.varlen:
        length //= max(problem.batch, 1)
    left, right = problem.window_left, problem.window_right
    return length if left is None or right is None else min(length, left + right + 1)


def _given(tiling: Tiling | MmaForwardTile, problem: Problem) -> MmaForwardTile:
    """Return a caller's tiling in the kernel's terms: as in the tables where it stands there."""
    if isinstance(tiling, MmaForwardTile):
        return tiling
    _check_stages(tiling)
    sizes = tiling.block_m, tiling.block_n, tiling.warps
    turns = (each.tile for each in _turns(problem))
    for tile in (*turns, *FORWARD_TILES[wider(problem)]):
        if (tile.block_m, tile.block_n, tile.warps) == sizes:
            return tile
    return MmaForwardTile(*sizes, kept_steps=0, blocks=1)
