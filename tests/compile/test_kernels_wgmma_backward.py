"""The kernels of wgmma's backward compile, without a GPU: nothing serialised, no costly spills."""

from __future__ import annotations

import pytest

from cupyflash._cuda.compiler import compile_source
from cupyflash._cuda.device import Device
from cupyflash._cuda.plan_wgmma_backward import WgmmaBackwardPlan, plan_backward
from cupyflash._cuda.tiles_wgmma_backward import (
    BACKWARD_TILES,
    BANDED_BACKWARD_TILES,
    WgmmaBackwardTile,
)
from cupyflash._problem import Problem

HOPPER = Device.known("sm_90a")
CASES = [
    (head_dim, causal, tile)
    for causal, table in ((False, BACKWARD_TILES), (True, BANDED_BACKWARD_TILES))
    for head_dim, tiles in table.items()
    for tile in tiles
]
# Of the producer, which has 24 registers and time. Of a consumer a word or two a query tile, where
# blocks of 128 queries stay; else everything is in its registers.
MOST_SPILLED = 112


def problem_of(head_dim: int, head_dim_v: int, causal: bool, **options: object) -> Problem:
    dtype = "float16" if causal else "bfloat16"
    right = 0 if causal else None
    return Problem(dtype, 2, 999, 999, 4, 2, head_dim, head_dim_v, 0.1, None, right, **options)


def check(plan: WgmmaBackwardPlan) -> None:
    # C7508 to C7519: products that wait for each other, a register count that is ignored.
    compilation = compile_source(plan.stub, "sm_90a", plan=plan)
    assert set(compilation.entries) == {launch.entry for launch in plan.launches}
    assert not compilation.warnings
    assert "warning" not in compilation.log
    for entry, usage in compilation.entries.items():
        spilled = MOST_SPILLED if entry == plan.main.entry else 0
        assert usage.spill_stores <= spilled, (entry, plan)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tile_table(case: tuple[int, bool, WgmmaBackwardTile]) -> None:
    head_dim, causal, tile = case
    other = 64 if tile.complaint(head_dim, head_dim) else head_dim
    plan = plan_backward(problem_of(other, head_dim, causal), HOPPER, tile)
    assert (plan.config.block_m, plan.config.block_n) == (tile.block_m, tile.block_n)
    check(plan)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [
        (64, WgmmaBackwardTile(128, 128, 2, 1, False, False, True, True)),
        (128, WgmmaBackwardTile(64, 128, 2, 2, True, False, True, True)),
        (256, WgmmaBackwardTile(64, 64, 2, 2, True, True, True, True)),
        (256, WgmmaBackwardTile(64, 64, 2, 2, True, True, True, True, True)),
    ],
    ids=str,
)
def test_blocks_that_stay_in_other_ways(
    head_dim: int, causal: bool, tile: WgmmaBackwardTile
) -> None:
    plan = plan_backward(problem_of(head_dim, head_dim, causal), HOPPER, tile)
    assert plan.config.persistent
    check(plan)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", BACKWARD_TILES)
def test_blocks_that_take_turns(head_dim: int, causal: bool) -> None:
    plan = plan_backward(problem_of(head_dim, head_dim, causal), HOPPER, deterministic=True)
    assert plan.config.deterministic
    check(plan)


@pytest.mark.parametrize("head_dim", BACKWARD_TILES)
def test_every_feature(head_dim: int) -> None:
    """Loads and stores element by element, scores that are more than products, turns."""
    problem = problem_of(head_dim, head_dim, True, softcap=3.0, extras=frozenset({"sinks"}))
    check(plan_backward(problem, HOPPER, None, 2, 2, True))
