"""Planning of the wgmma engine's backward: tiles, scratch memory, what it can read."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cupyflash._cuda import backward, config_wgmma, tensor_map
from cupyflash._cuda.backward_wgmma import can_read
from cupyflash._cuda.candidates import candidates
from cupyflash._cuda.config_mma import MMA_BACKWARD_PARAMS
from cupyflash._cuda.device import Device
from cupyflash._cuda.plan_wgmma_backward import plan_backward
from cupyflash._cuda.source import kernels_root
from cupyflash._cuda.tile_order import seeing_queries
from cupyflash._cuda.tiles_wgmma_backward import WgmmaBackwardTile
from cupyflash.tiling import Tiling
from tests.unit.test_plan import struct_fields
from tests.unit.test_plan_wgmma import WINDOWS, problem_of, visible

HOPPER = Device.known("sm_90a")
HEAD_DIMS = [(d, dv) for d in (8, 64, 72, 128, 136, 256) for dv in (16, 64, 96, 160, 256)]


@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
def test_every_head_dim_has_a_tile_with_and_without_softcap(d: int, dv: int) -> None:
    for softcap in (None, 3.0):
        plan = plan_backward(problem_of(d, dv, softcap=softcap), HOPPER)
        assert plan.main.shared_memory <= HOPPER.shared_memory_per_block_optin
        assert plan.config.early or softcap is None


# --- which tile of the table --------------------------------------------------------------------


def tile_of(d: int = 64, dv: int = 0, **options: object) -> WgmmaBackwardTile:
    """What the default is made of, less its limits; 1024 heads unless told."""
    heads = {"batch": 32, "num_heads": 32, "num_heads_kv": 32}
    config = plan_backward(problem_of(d, dv or d, **{**heads, **options}), HOPPER).config
    sizes = config.block_m, config.block_n, config.stages, config.grad_out_stages
    ways = config.early, config.roles, config.direct, config.persistent, config.whole_heads
    return WgmmaBackwardTile(*sizes, *ways)


CAUSAL = {"window_right": 0}
NARROW, NARROW_STAYING = (
    WgmmaBackwardTile(128, 128, 2, 2, False, persistent=stays) for stays in (False, True)
)
NARROW_HEADS = WgmmaBackwardTile(128, 128, 2, 2, False, False, True, True, True)
MEDIUM, MEDIUM_STAYING = (
    WgmmaBackwardTile(64, 128, 2, 2, True, persistent=stays) for stays in (False, True)
)
MEDIUM_LONG = WgmmaBackwardTile(64, 128, 2, 1, True)
MEDIUM_HEADS = WgmmaBackwardTile(64, 128, 2, 2, True, False, True, True, True)
ROLES = WgmmaBackwardTile(64, 64, 2, 1, True, True)


@pytest.mark.parametrize(
    ("d", "band", "most_queries", "few", "many"),
    [
        (64, {}, 512, NARROW_HEADS, NARROW_STAYING),
        (64, {}, 2048, NARROW_STAYING, NARROW),
        (64, CAUSAL, 1024, NARROW_HEADS, NARROW_STAYING),
        (64, {"window_left": 900}, 1024, NARROW_HEADS, NARROW_STAYING),
        (64, CAUSAL, 4096, NARROW_STAYING, NARROW),
        (96, CAUSAL, 512, MEDIUM_HEADS, MEDIUM_STAYING),
        (128, CAUSAL, 512, MEDIUM_HEADS, MEDIUM_STAYING),
        (128, CAUSAL, 4096, MEDIUM_STAYING, MEDIUM_LONG),
        (192, CAUSAL, 512, ROLES, replace(ROLES, persistent=True)),
        (256, CAUSAL, 512, ROLES, replace(ROLES, persistent=True)),
    ],
)
def test_tiles_by_how_many_queries_pass_a_key_tile(
    d: int,
    band: dict[str, int],
    most_queries: int,
    few: WgmmaBackwardTile,
    many: WgmmaBackwardTile,
) -> None:
    assert tile_of(d, seqlen_q=most_queries, **band) == few
    assert tile_of(d, seqlen_q=most_queries + 1, **band) == many
    grouped = {"num_heads": 128, **band}
    assert tile_of(d, seqlen_q=most_queries // 4, **grouped) == few
    assert tile_of(d, seqlen_q=most_queries // 4 + 1, **grouped) == many


@pytest.mark.parametrize("seqlen_q", [512, 8192])
def test_without_a_band_the_number_of_queries_does_not_matter_to_wider_heads(
    seqlen_q: int,
) -> None:
    for d, tile in ((96, MEDIUM), (128, MEDIUM), (192, ROLES), (256, ROLES)):
        assert tile_of(d, seqlen_q=seqlen_q) == replace(tile, persistent=tile is ROLES)


@pytest.mark.parametrize("band", [{}, CAUSAL])
def test_roles_are_for_softcap_and_for_wider_values(band: dict[str, int]) -> None:
    assert tile_of(64, softcap=3.0, **band) == tile_of(64, 128, **band) == ROLES
    wide = tile_of(128, softcap=3.0, seqlen_q=8192, **band)
    assert wide == (MEDIUM_LONG if band else MEDIUM)


def test_whole_heads_are_for_calls_that_fill_the_multiprocessors() -> None:
    sms = HOPPER.multiprocessors
    for heads in (sms, 2 * sms - 1, 2 * sms, 5 * sms):
        assert tile_of(batch=heads, num_heads=1, num_heads_kv=1).whole_heads, heads
    for heads in (1, sms // 2, sms + 1, 3 * sms // 2):
        assert tile_of(batch=heads, num_heads=1, num_heads_kv=1) == NARROW_STAYING, heads
        assert tile_of(batch=heads, num_heads=1, num_heads_kv=1, **CAUSAL) == NARROW_STAYING, heads


# --- what tiles become ---------------------------------------------------------------------------


def test_a_forwards_tiling_is_taken_where_it_fits() -> None:
    narrow = problem_of(64, 64)
    for tiling in (Tiling(64, 64, 3, 8), Tiling(64, 64, 3, 12)):
        assert plan_backward(narrow, HOPPER, tiling).tiling == tiling
    table = plan_backward(narrow, HOPPER).tiling
    for tiling in (Tiling(192, 128, 2, 16), Tiling(128, 128, 2, 8), Tiling(128, 96, 2, 12)):
        assert plan_backward(narrow, HOPPER, tiling).tiling == table


def test_tuning_has_other_tiles_to_try() -> None:
    tiles = candidates("wgmma", "backward", problem_of(128, 128), HOPPER)
    assert WgmmaBackwardTile(64, 128, 3, 2, True) in tiles
    assert WgmmaBackwardTile(64, 128, 3, 3, True, False, True) in tiles
    assert WgmmaBackwardTile(64, 128, 2, 2, True, False, True, True, True) in tiles
    assert MEDIUM_STAYING in tiles
    assert MEDIUM not in tiles  # the default


def test_blocks_that_stay_are_as_many_as_multiprocessors() -> None:
    tile = WgmmaBackwardTile(128, 128, 2, 1, False, False, True, True)
    few, many = problem_of(), problem_of(batch=100)
    assert plan_backward(few, HOPPER, tile).main.blocks == 4 * 4
    assert plan_backward(many, HOPPER, tile).main.blocks == HOPPER.multiprocessors
    assert plan_backward(many, HOPPER, replace(tile, persistent=False)).main.blocks == 400 * 2


def test_blocks_that_take_turns_do_not_stay() -> None:
    """One that has not started yet could be waited for by all that have."""
    tile, problem = (
        WgmmaBackwardTile(128, 128, 2, 1, False, False, True, True),
        problem_of(batch=100),
    )
    plan = plan_backward(problem, HOPPER, tile, deterministic=True)
    leaving = replace(tile, persistent=False)
    assert plan == plan_backward(problem, HOPPER, leaving, deterministic=True)
    assert plan.main.blocks > HOPPER.multiprocessors


@pytest.mark.parametrize("band", [{}, CAUSAL])
def test_consumers_do_not_wait_for_turns_unless_they_have_roles(band: dict[str, int]) -> None:
    for d, direct in ((64, False), (96, False), (128, False), (192, True), (256, True)):
        problem = problem_of(d, d, seqlen_q=9000, **band)
        config = plan_backward(problem, HOPPER, deterministic=True).config
        assert config.deterministic and config.direct == direct and config.roles == direct
    for tile in (replace(MEDIUM, direct=True), ROLES):  # given by a caller, or by tuning
        assert plan_backward(problem_of(128, 128), HOPPER, tile, deterministic=True).config.direct


@pytest.mark.parametrize(
    ("d", "band", "most_queries"),
    [(64, {}, 1024), (64, CAUSAL, 1024), (96, {}, 512), (128, {}, 512), (128, CAUSAL, 512)],
)
def test_whole_heads_are_preferred_to_turns(
    d: int, band: dict[str, int], most_queries: int
) -> None:
    heads = {"batch": 32, "num_heads": 32, "num_heads_kv": 32}
    for seqlen_q in (most_queries, most_queries + 1):
        problem = problem_of(d, d, seqlen_q=seqlen_q, **heads, **band)
        config = plan_backward(problem, HOPPER, deterministic=True).config
        assert config.whole_heads == (seqlen_q == most_queries)


def test_blocks_that_take_whole_heads() -> None:
    """One a key-value head, which writes dq itself and keeps the sums of its own heads only."""
    tile = WgmmaBackwardTile(128, 128, 2, 1, False, False, True, True, True)
    few, many = (plan_backward(problem_of(batch=b), HOPPER, tile) for b in (2, 100))
    assert few.main.blocks == 2 * 2
    assert many.main.blocks == HOPPER.multiprocessors
    for plan in (few, many):
        assert plan.scratch.query_sums == plan.main.blocks * 2 * 384 * 64
        assert [launch.entry for launch in plan.launches] == [plan.prepare.entry, plan.main.entry]
    assert many.scratch.statistics == 100 * 4 * 384 * 2
    staged = replace(tile, direct=False).complaint(64, 64)
    assert staged and "registers" in staged


def test_whole_heads_need_no_turns() -> None:
    tile = WgmmaBackwardTile(128, 128, 2, 1, False, False, True, True, True)
    plans = {
        plan_backward(problem_of(), HOPPER, tile, deterministic=deterministic)
        for deterministic in (False, True)
    }
    (plan,) = plans
    assert plan.config.whole_heads and not plan.config.deterministic


def test_scratch_holds_whole_tiles_and_whole_panels() -> None:
    plan = plan_backward(problem_of(96, 64), HOPPER, None, 16, 16, True)
    sizes, rows = plan.scratch, 320  # 300 queries in tiles of 64
    assert (sizes.rows, sizes.tiles) == (rows, 5)
    assert (sizes.query_sums, sizes.statistics) == (8 * rows * 128, 8 * rows * 2)
    assert sizes.turns == 8 * 5


@pytest.mark.parametrize("window", [{}, *WINDOWS], ids=str)
def test_queries_that_see(window: dict[str, object]) -> None:
    problem = problem_of(**window)
    (seeing,) = visible(problem).any(1).nonzero()
    assert seeing_queries(problem) == (seeing[0], seeing[-1] + 1)


def test_structs_have_the_fields_of_the_headers() -> None:
    params = config_wgmma.WGMMA_BACKWARD_PARAMS
    names, common = list(params.names or ()), list(MMA_BACKWARD_PARAMS.names or ())
    assert names[: len(common)] == common
    text = (kernels_root() / "attention" / "params_wgmma.cuh").read_text()
    body = text.partition("struct WgmmaBackwardParams : MmaBackwardParams {")[2]
    own = re.findall(r"^  (?:const int\*|int|float|TensorMap) (\w+);", body, re.MULTILINE)
    assert names[len(common) :] == own
    for name in config_wgmma.MAPPED_BACKWARD:
        assert (params.fields or {})[f"{name}_map"][1] % tensor_map.ALIGNMENT == 0
    fields = struct_fields("WgmmaBackwardConfig", "config_wgmma.cuh")
    assert fields == list(config_wgmma.WgmmaBackwardConfig.__dataclass_fields__)


def layout_of(alignment: int = 16, **strides: tuple[int, ...]) -> backward.BackwardLayout:
    """Dense arrays for `problem_of(64, 64)`, but for the strides given."""
    query, key = (np.empty((2, n, h, 64), np.float16).strides for n, h in ((300, 4), (500, 2)))
    dense = {"query": query, "key": key, "value": key, "out": query, "grad_out": query}
    loaded = tuple((dense | strides).values())
    return SimpleNamespace(loaded=loaded, mapped_alignment=alignment)  # type: ignore[return-value]


def test_what_the_copy_engine_cannot_read_is_left_to_mma() -> None:
    problem = problem_of()
    assert can_read(problem, layout_of())
    assert can_read(problem, layout_of(out=(1, 2, 3, 2)))  # no matter: it is not mapped
    assert not can_read(problem, layout_of(8))
    assert not can_read(problem, layout_of(grad_out=(0, 512, 128, 2)))
    assert not can_read(problem, layout_of(value=(128008, 256, 128, 2)))
    assert not can_read(problem, layout_of(query=(153600, -512, 128, 2)))
    assert can_read(problem_of(batch=1), layout_of(grad_out=(3, 512, 128, 2)))
    assert not can_read(problem_of(seqlen_k=0), layout_of())
