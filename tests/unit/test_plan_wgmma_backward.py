"""Planning of the wgmma engine's backward: tiles, scratch memory, what it can read."""

from __future__ import annotations

import re
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
from cupyflash._cuda.tiles_wgmma_backward import BACKWARD_TILES, WgmmaBackwardTile
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


def test_tiles_of_the_table_are_for_something() -> None:
    for head_dim, tiles in BACKWARD_TILES.items():
        chosen = {
            plan_backward(problem_of(d, dv, softcap=softcap), HOPPER).tiling
            for d, dv in ((head_dim, head_dim), (64, head_dim), (head_dim, 64))
            for softcap in (None, 3.0)
        }
        assert len(chosen) == len(tiles)


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
    assert BACKWARD_TILES[128][0] not in tiles


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
    own = re.findall(r"^  (?:int|float|TensorMap) (\w+);", body, re.MULTILINE)
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
