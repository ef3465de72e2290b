"""The wgmma engine's kernels compile, without a GPU: nothing serialised, no spills that cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupyflash._cuda.compiler import compile_source
from cupyflash._cuda.device import Device
from cupyflash._cuda.plan_mma import after_wgmma
from cupyflash._cuda.plan_mma import plan_forward as plan_mma
from cupyflash._cuda.plan_wgmma import WgmmaForwardPlan, plan_forward
from cupyflash._cuda.tiles_wgmma import (
    BANDED_TILES,
    BIAS_TILES,
    FLOAT8_BANDED_TILES,
    FLOAT8_TILES,
    FORWARD_TILES,
    WgmmaTile,
)
from cupyflash._problem import Problem
from cupyflash.tiling import Tiling

HOPPER = Device.known("sm_90a")
CASES = [(head_dim, causal) for head_dim in FORWARD_TILES for causal in (False, True)]


def problem_of(head_dim: int, causal: bool, **options: object) -> Problem:
    dtype = "float16" if causal else "bfloat16"
    right = 0 if causal else None
    return Problem(dtype, 2, 999, 999, 4, 2, head_dim, head_dim, 0.1, None, right, **options)


def check(plan: WgmmaForwardPlan, spilled: int = 0) -> None:
    # C7508 to C7519: products that wait for each other, a register count that is ignored.
    compilation = compile_source(plan.stub, "sm_90a", plan=plan)
    assert set(compilation.entries) == {plan.launch.entry}
    assert not compilation.warnings
    assert "warning" not in compilation.log
    (usage,) = compilation.entries.values()
    assert usage.spill_stores <= spilled, plan


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tile_table(case: tuple[int, bool]) -> None:
    head_dim, causal = case
    table = (BANDED_TILES if causal else FORWARD_TILES).get(head_dim, FORWARD_TILES[head_dim])
    tile = table[CASES.index(case) % len(table)]
    # Where exponentials do not wait, scores that are found again take registers of others; where
    # three groups have wide tiles, band and mask do.
    spilled = 64 * tile.eager + 48 * (tile.shared_probabilities and causal)
    check(plan_forward(problem_of(head_dim, causal), HOPPER, tile), spilled)


@pytest.mark.parametrize(
    ("dims", "causal", "options", "spilled"),
    [
        ((128, 128), False, {}, 0),
        ((128, 128), True, {}, 48),
        ((128, 128), False, {"softcap": 3.0}, 16),
        # NVRTC 13.0 less than 128, 13.5 164.
        ((128, 128), True, {"softcap": 3.0, "extras": frozenset({"sinks"})}, 176),
        ((128, 64), True, {}, 0),
        ((96, 128), True, {}, 0),
    ],
    ids=str,
)
def test_probabilities_in_shared_memory(
    dims: tuple[int, int], causal: bool, options: dict[str, object], spilled: int
) -> None:
    problem = replace(problem_of(128, causal, **options), head_dim=dims[0], head_dim_v=dims[1])
    (tile,) = (tile for tile in FORWARD_TILES[128] if tile.shared_probabilities)
    check(plan_forward(problem, HOPPER, tile), spilled)


@pytest.mark.parametrize(
    ("head_dim", "tables"),
    [*((head_dim, FLOAT8_TILES) for head_dim in FLOAT8_TILES),
     *((head_dim, FLOAT8_BANDED_TILES) for head_dim in FLOAT8_BANDED_TILES)],
)  # fmt: skip
def test_float8(head_dim: int, tables: dict[int, tuple[WgmmaTile, ...]]) -> None:
    right = 0 if head_dim % 64 or tables is FLOAT8_BANDED_TILES else None
    shape = (2, 999, 999, 4, 2, head_dim, head_dim)
    problem = Problem("float8_e4m3fn", *shape, 0.1, None, right, out_dtype="bfloat16")
    for tile in tables[head_dim]:
        tight = head_dim == 128 or tile.block_n == 192  # for what a group keeps between query tiles
        spilled = (96 if right is None else 128) if tight else 16
        check(plan_forward(problem, HOPPER, tile), spilled if tile.consumers == 3 else 0)


@pytest.mark.parametrize(("head_dim", "spilled"), [(128, 128), (256, 160)])
def test_float8_with_every_feature(head_dim: int, spilled: int) -> None:
    shape = (2, 999, 999, 4, 2, head_dim, head_dim)
    options = {"softcap": 3.0, "extras": frozenset({"sinks"}), "out_dtype": "float16"}
    problem = Problem("float8_e4m3fn", *shape, 0.1, None, 0, **options)
    check(plan_forward(problem, HOPPER, None, 16, 2), spilled)


@pytest.mark.parametrize(("head_dim", "spilled"), [(64, 4), (256, 96)])
def test_every_feature(head_dim: int, spilled: int) -> None:
    """Stores element by element, and scores that are more than products."""
    problem = problem_of(head_dim, True, softcap=3.0, extras=frozenset({"sinks"}))
    check(plan_forward(problem, HOPPER, None, 16, 2), spilled)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_varlen(case: int) -> None:
    head_dim, causal = CASES[case]
    packed = replace(problem_of(head_dim, causal, varlen=True), seqlen_q=9999, seqlen_k=9999)
    check(plan_forward(packed, HOPPER), 128)  # what the thread that loads keeps, in 24 registers


def with_bias(head_dim: int, causal: bool, *extras: str, **options: object) -> Problem:
    options |= {"extras": frozenset({"bias", *extras}), "bias_shape": (2, 4, 999, 999)}
    bias_dtype = "bfloat16" if causal else "float16"
    return problem_of(head_dim, causal, bias_dtype=bias_dtype, **options)


BIASED = [(dim, tile) for dim, tiles in BIAS_TILES.items() for tile in tiles]


@pytest.mark.parametrize("case", range(len(BIASED)))
def test_tile_table_of_a_bias(case: int) -> None:
    head_dim, tile = BIASED[case]
    for causal in (False, True):
        check(plan_forward(with_bias(head_dim, causal), HOPPER, tile), 4 if head_dim == 256 else 0)


# Bytes that are kept from one query tile to the next; NVRTC 13.5 has 4 at 256.
@pytest.mark.parametrize(("head_dim", "spilled"), [(64, 0), (128, 16), (256, 48)])
def test_a_bias_with_every_feature(head_dim: int, spilled: int) -> None:
    problem = with_bias(head_dim, True, "sinks", "alibi_slopes", softcap=3.0)
    check(plan_forward(problem, HOPPER), spilled)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi(head_dim: int, causal: bool) -> None:
    table = (BANDED_TILES if causal else FORWARD_TILES).get(head_dim, FORWARD_TILES[head_dim])
    for tile in table:
        problem = problem_of(head_dim, causal, extras=frozenset({"alibi_slopes"}))
        # As without it: band and mask beside wide tiles of three groups.
        check(plan_forward(problem, HOPPER, tile), 48 * (tile.shared_probabilities and causal))


def test_mma_after_a_bias() -> None:
    plan = after_wgmma(plan_mma(with_bias(128, True), HOPPER))
    compilation = compile_source(plan.stub, "sm_90a", plan=plan)
    assert set(compilation.entries) == {"cupyflash_forward_again_mma"}


def test_one_consumer() -> None:
    check(plan_forward(problem_of(128, True), HOPPER, Tiling(64, 64, 3, 8)))
