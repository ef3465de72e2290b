"""Planning of the wgmma engine: tiles, the order in which blocks take them, what it can read."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from cupyflash._cuda import config_wgmma, forward, tensor_map
from cupyflash._cuda.arguments import OptionalLayout
from cupyflash._cuda.candidates import candidates
from cupyflash._cuda.device import Device
from cupyflash._cuda.engines import PLANNERS, backward_engine, lacks, runs_on, yields
from cupyflash._cuda.launch import Moved
from cupyflash._cuda.operand_maps import is_mappable
from cupyflash._cuda.order_table import order_table
from cupyflash._cuda.params import FORWARD_PARAMS
from cupyflash._cuda.plan_wgmma import plan_forward
from cupyflash._cuda.tile_order import (
    key_tile_order,
    key_tiles,
    query_tiles,
    seen_keys,
    tile_order,
    tile_places,
)
from cupyflash._cuda.tiles_wgmma import (
    BANDED_TILES,
    BIAS_TILES,
    FLOAT8_TILES,
    FORWARD_TILES,
    WgmmaTile,
)
from cupyflash._problem import Operands, Problem
from cupyflash.errors import UnsupportedError
from cupyflash.tiling import Tiling
from tests.unit.test_plan import struct_fields

HOPPER = Device.known("sm_90a")


def float8(**options: object) -> Problem:
    return problem_of(dtype="float8_e4m3fn", out_dtype="bfloat16", **options)


def problem_of(d: int = 64, dv: int = 64, dtype: str = "bfloat16", **options: object) -> Problem:
    shape = {"batch": 2, "seqlen_q": 300, "seqlen_k": 500, "num_heads": 4, "num_heads_kv": 2}
    settings = {**shape, "head_dim": d, "head_dim_v": dv, "softmax_scale": 0.125, **options}
    return Problem(dtype, **settings)  # type: ignore[arg-type]


WINDOWS = [
    {"window_right": 0},
    {"window_right": 0, "top_left": True},
    {"window_right": 0, "seqlen_q": 500, "seqlen_k": 300},
    {"window_left": 40, "window_right": 7},
    {"window_left": 3, "top_left": True, "seqlen_q": 700},
    {"window_left": 0, "window_right": 0, "top_left": True, "seqlen_q": 40, "seqlen_k": 9},
]


def visible(problem: Problem) -> np.ndarray:
    """Which query sees which key."""
    rows = np.arange(problem.seqlen_q)[:, None]
    distance = np.arange(problem.seqlen_k) - rows
    distance = distance - problem.diagonal(problem.seqlen_q, problem.seqlen_k)
    seen = np.ones(distance.shape, bool)
    if problem.window_left is not None:
        seen &= distance >= -problem.window_left
    if problem.window_right is not None:
        seen &= distance <= problem.window_right
    return seen


# --- tiles --------------------------------------------------------------------------------------


def test_every_head_dim_fits() -> None:
    for d in range(1, 257):
        for dv in {d, 1, 256, 257 - d}:
            for length in (100, 8192):
                plan = plan_forward(problem_of(d, dv, seqlen_q=length), HOPPER)
                assert plan.launch.shared_memory <= HOPPER.shared_memory_per_block_optin
                assert d <= plan.config.head_dim < d + 32
                assert dv <= plan.config.head_dim_v


@pytest.mark.parametrize(("tables", "right"), [(FORWARD_TILES, None), (BANDED_TILES, 0)])
def test_every_line_of_the_tile_table_is_taken(
    tables: dict[int, tuple[WgmmaTile, ...]], right: int | None
) -> None:
    for head_dim, tiles in tables.items():
        problem = replace(problem_of(head_dim, head_dim), window_right=right)
        taken = set()
        for rows, keys in product((128, 192, 256), (1023, 1024, 8192)):
            config = plan_forward(replace(problem, seqlen_q=rows, seqlen_k=keys), HOPPER).config
            taken.add((config.block_m, config.block_n, config.stages, config.turns, config.eager))
        assert taken == {(t.block_m, t.block_n, t.stages, t.turns, t.eager) for t in tiles}


def test_a_given_tiling_is_taken() -> None:
    plan = plan_forward(problem_of(128, 128), HOPPER, Tiling(128, 80, 3, 12))
    assert (plan.config.block_n, plan.config.query_in_registers) == (80, False)
    assert plan_forward(problem_of(128, 128), HOPPER, Tiling(128, 128, 2, 12)) == plan_forward(
        problem_of(128, 128), HOPPER
    )


@pytest.mark.parametrize(
    ("tiling", "limit"),
    [
        (Tiling(96, 128, 2, 8), "block_m must be 64, 128, 192 or 256"),
        (Tiling(128, 96, 2, 12), "block_n must be one of"),
        (Tiling(128, 128, 1, 12), "stages"),
        (Tiling(128, 128, 2, 8), "4 warps for each 64"),
        (Tiling(256, 128, 2, 20), "registers"),
        (Tiling(128, 128, 4, 12), "shared memory"),
        (WgmmaTile(128, 80, 2, True), "block_n must be one of"),
        (WgmmaTile(256, 96, 2, False, itemsize=1), "FP8 takes up to 192 queries"),
        (WgmmaTile(192, 128, 2, False, apart=True), "sums of its own"),
    ],
)
def test_a_tiling_that_does_not_fit_names_the_limit(tiling: Tiling, limit: str) -> None:
    with pytest.raises(UnsupportedError, match=limit):
        plan_forward(problem_of(128, 128), HOPPER, tiling)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (63, 0), (20, 43)])
def test_a_query_tile_sees_as_many_keys_as_a_key_tile_has(left: int, right: int) -> None:
    problem = replace(problem_of(64, 64), window_left=left, window_right=right)
    with pytest.raises(UnsupportedError, match=f"64 queries see {64 + left + right} keys"):
        plan_forward(problem, HOPPER, Tiling(64, 128, 2, 8))
    with pytest.raises(UnsupportedError, match="4 warps for each 64"):
        plan_forward(problem, HOPPER, Tiling(64, 128, 2, 4))
    bias = {"bias_dtype": "float16", "bias_shape": (1, 1, 1, 1), "extras": frozenset({"bias"})}
    wider = {"window_left": 64 - right}
    for taken in (wider, {"window_left": None}, {"seqlen_q": 64}, bias):
        assert plan_forward(replace(problem, **taken), HOPPER, Tiling(64, 128, 2, 8))


def test_a_tile_of_the_table_may_be_asked_for_at_any_length() -> None:
    config = plan_forward(problem_of(128, 128), HOPPER, Tiling(192, 128, 2, 16)).config
    assert config.shared_probabilities and config.block_m == 192


def test_columns_of_out_that_pass_shared_memory() -> None:
    """All of them, or whole panels of 64, as one that is narrower lies elsewhere."""
    right = {(0, 64): 0, (64, 64): 64, (128, 64): 64, (96, 96): 96, (128, 96): 96, (64, 96): 0,
             (32, 64): 0, (64, 128): 64, (96, 128): 0, (128, 128): 128, (128, 192): 64,
             (192, 192): 192, (96, 192): 0, (128, 256): 128, (64, 256): 64,
             (32, 256): 0}  # fmt: skip
    for (staged, head_dim_v), columns in right.items():
        tile = WgmmaTile(128, 64, 2, False, staged=staged)
        assert tile.staged_columns(head_dim_v) == columns, (staged, head_dim_v)
        panels = 128 * 2 * -(-columns // 64) * 64
        without = replace(tile, staged=0).shared_memory(64, head_dim_v)
        assert tile.shared_memory(64, head_dim_v) == without + panels


SHARED = WgmmaTile(192, 128, 2, False, staged=128, shared_probabilities=True, joined=False)


@pytest.mark.parametrize(
    ("changes", "head_dim_v", "complaint"),
    [
        ({}, 128, None),
        ({}, 64, None),
        ({"block_m": 128}, 128, None),
        ({"block_n": 64, "staged": 64}, 128, None),
        ({"block_n": 80}, 128, None),
        ({"shared_probabilities": False}, 128, "160 registers"),
        ({"query_in_registers": True}, 128, "only beside Q"),
        ({"itemsize": 1, "block_n": 96}, 128, "takes the place of P"),
        ({}, 96, "up to 64, or 97 to 128"),
        ({}, 192, "up to 64, or 97 to 128"),
        ({"block_n": 64}, 128, "takes the place of P"),
        ({"block_m": 256}, 128, "128 registers"),
    ],
    ids=str,
)
def test_tiles_with_probabilities_in_shared_memory(
    changes: dict[str, object], head_dim_v: int, complaint: str | None
) -> None:
    tile = replace(SHARED, **changes)  # type: ignore[arg-type]
    found = tile.complaint(128, head_dim_v)
    assert (found is None) == (complaint is None)
    assert complaint is None or complaint in (found or "")


def test_rows_of_out_lie_in_the_place_of_probabilities() -> None:
    without = replace(SHARED, staged=0)
    assert SHARED.shared_memory(128, 128) == without.shared_memory(128, 128)
    beside = replace(SHARED, shared_probabilities=False)
    assert SHARED.shared_memory(128, 128) == beside.shared_memory(128, 128)
    assert SHARED.shared_memory(128, 64) == beside.shared_memory(128, 64) + 192 * 64 * 2


@pytest.mark.parametrize(("d", "dv"), [(128, 96), (128, 90), (100, 80), (96, 128), (128, 64)])
@pytest.mark.parametrize("right", [None, 0])
def test_a_tile_that_complains_is_not_chosen(d: int, dv: int, right: int | None) -> None:
    """Of the tiles for long sequences the first one has no product for 96 columns of V."""
    problem = problem_of(d, dv, seqlen_q=16384, seqlen_k=16384, window_right=right)
    config = plan_forward(problem, HOPPER).config
    assert config.shared_probabilities == (config.head_dim_v != 96)
    assert (config.block_m, config.eager) == (
        (192, False) if config.shared_probabilities else (128, True)
    )


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match="serves bfloat16, float16, float8_e4m3fn"):
        plan_forward(problem_of(dtype="float32"), HOPPER)
    with pytest.raises(UnsupportedError, match=r"compute capability 9\.0"):
        plan_forward(problem_of(), Device.known("sm_100"))
    with pytest.raises(UnsupportedError, match="aligned to 8 bytes"):
        plan_forward(problem_of(), HOPPER, None, 8)


def test_hopper_alone_runs_it() -> None:
    known = {arch: Device.known(arch) for arch in ("sm_75", "sm_80", "sm_90a", "sm_100", "sm_120")}
    assert [arch for arch, device in known.items() if runs_on("wgmma", device)] == ["sm_90a"]
    assert next(name for name in PLANNERS if not lacks(name, problem_of(), HOPPER)) == "wgmma"
    assert lacks("wgmma", problem_of(varlen=True), HOPPER) == []


@pytest.mark.parametrize(("batch", "served"), [(1, True), (8, True), (9, False), (4000, False)])
def test_short_varlen_entries_are_left_to_mma(batch: int, served: bool) -> None:
    """Their mean counts, as the host knows no more."""
    packed = problem_of(varlen=True, batch=batch, seqlen_q=4096, seqlen_k=8192)
    assert yields("wgmma", packed) != served
    assert not yields("wgmma", problem_of(seqlen_q=16, seqlen_k=16))
    assert not yields("mma", packed)


def test_varlen_plans() -> None:
    """Lanes write out, as a box would overlap the next entry; tiles go by the mean length."""
    packed = problem_of(128, 128, varlen=True, batch=4, seqlen_q=16384, seqlen_k=16384)
    plan = plan_forward(packed, HOPPER)
    assert plan.config.varlen and plan.config.staged == 0
    assert plan.config.block_m == 192
    assert plan_forward(replace(packed, batch=16), HOPPER).config.block_m == 128
    assert plan.suspects == plan.launch.blocks * 12
    assert plan_forward(problem_of(128, 128), HOPPER).suspects == 0


# --- what the kernel is given -------------------------------------------------------------------


def test_structs_have_the_fields_of_the_headers() -> None:
    names = list(config_wgmma.WGMMA_FORWARD_PARAMS.names or ())
    common = list(FORWARD_PARAMS.names or ())
    assert struct_fields("WgmmaForwardParams", "params_wgmma.cuh") == [
        "common", *names[len(common) :]
    ]  # fmt: skip
    assert names[: len(common)] == common
    fields = struct_fields("WgmmaForwardConfig", "config_wgmma.cuh")
    assert fields == list(config_wgmma.WgmmaForwardConfig.__dataclass_fields__)


def test_maps_are_aligned() -> None:
    params = config_wgmma.WGMMA_FORWARD_PARAMS
    for name in config_wgmma.MAPPED:
        assert (params.fields or {})[f"{name}_map"][1] % tensor_map.ALIGNMENT == 0
    assert params.itemsize % tensor_map.ALIGNMENT == 0


def bytes_of(*shape: int) -> tuple[int, ...]:
    return np.empty(shape, np.float16).strides


@pytest.mark.parametrize("scale", [1e-50, 1e38, 0.0, -1.0])
def test_scales_beyond_the_exponents_range_are_applied_to_scores(scale: float) -> None:
    assert not plan_forward(problem_of(softmax_scale=scale), HOPPER).config.raw_scores
    assert plan_forward(problem_of(softmax_scale=0.1), HOPPER).config.raw_scores


# --- which key tiles, and in which order --------------------------------------------------------


@pytest.mark.parametrize("window", [{}, *WINDOWS], ids=str)
def test_seen_keys(window: dict[str, object]) -> None:
    problem = problem_of(**window)
    (seen,) = visible(problem).any(0).nonzero()
    assert seen_keys(problem) == (seen[0], seen[-1] + 1)


@pytest.mark.parametrize("window", [{}, *WINDOWS], ids=str)
def test_key_tiles(window: dict[str, object]) -> None:
    problem = problem_of(**window)
    seen = visible(problem)
    for first, count in zip(
        range(0, problem.seqlen_q, 128), key_tiles(problem, 128, 80), strict=True
    ):
        (keys,) = seen[first : first + 128].any(0).nonzero()
        assert count == (keys[-1] // 80 - keys[0] // 80 + 1 if len(keys) else 1)


@pytest.mark.parametrize("window", [{}, *WINDOWS], ids=str)
def test_query_tiles(window: dict[str, object]) -> None:
    """Those that pass by each key tile: none where no query sees it."""
    problem = problem_of(**window)
    seen = visible(problem)
    for first, count in zip(
        range(0, problem.seqlen_k, 128), query_tiles(problem, 80, 128), strict=True
    ):
        (queries,) = seen[:, first : first + 128].any(1).nonzero()
        assert count == (queries[-1] // 80 - queries[0] // 80 + 1 if len(queries) else 0)


@pytest.mark.parametrize("limit", [0, 10**9])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_tile_is_taken_once(
    window: dict[str, object], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cupyflash._cuda.tile_order._BALANCED", limit)
    problem = problem_of(**window)
    of_queries, of_keys = -(-problem.seqlen_q // 64) * 8, -(-problem.seqlen_k // 80) * 4
    for make, tiles in ((tile_order, of_queries), (key_tile_order, of_keys)):
        for blocks in {1, min(7, tiles), tiles}:
            order = make(problem, 64, 80, blocks)
            assert sorted(order[order >= 0]) == list(range(tiles))
            # Each block's column begins and ends, and nothing comes after its end.
            ended = order < 0
            assert not ended[0].any()
            assert ended[-1].all()
            assert not (ended[:-1] & ~ended[1:]).any()


@pytest.mark.parametrize("window", [{}, {"window_left": 9000}, {"window_left": 700}], ids=str)
@pytest.mark.parametrize(
    ("batch", "length", "heads"),
    [(1, 4096, 16), (1, 16384, 64), (16, 16384, 64), (2, 1521, 64), (9, 3599, 4), (3, 12126, 2)],
)
def test_blocks_have_equally_much_to_do(
    window: dict[str, int], batch: int, length: int, heads: int
) -> None:
    problem = problem_of(128, 128, batch=batch, seqlen_q=length, seqlen_k=length, num_heads=heads,
                         num_heads_kv=heads, window_right=0, **window)  # fmt: skip
    lengths = key_tiles(problem, 128, 128)
    order = tile_order(problem, 128, 128, 132)
    assert np.array_equal(np.sort(order[order >= 0]), np.arange(len(lengths) * batch * heads))
    costs = costs_of_query_tiles(problem, lengths)
    loads = np.where(order >= 0, costs[order % len(costs)], 0).sum(0)
    # As dealing out one by one would: at the end a block may lack one tile of the last group.
    assert loads.max() <= 1.03 * loads.mean() + costs.max()
    assert loads.max() <= 1.03 * dealt_one_by_one(problem, costs, 132)


def costs_of_query_tiles(problem: Problem, lengths: np.ndarray) -> np.ndarray:
    """In key tiles: two more to begin and end, and less where a warpgroup has no rows."""
    costs = lengths + 2.0
    if 0 < problem.seqlen_q % 128 <= 64:
        costs[-1] *= 0.4 + 0.6 / 2
    return costs


def test_a_query_tile_with_few_rows_counts_less() -> None:
    """Causal, the last tile of a head is the longest, unless one of its two groups has no rows."""
    for rows, first in ((128, 9), (65, 9), (64, 8), (1, 8)):
        length = 9 * 128 + rows
        problem = problem_of(batch=1, seqlen_q=length, seqlen_k=length, num_heads=1,
                             num_heads_kv=1, window_right=0)  # fmt: skip
        assert tile_order(problem, 128, 128, 3)[0, 0] == first


@pytest.mark.parametrize(("length", "heads"), [(512, 1024), (2048, 256), (8192, 32)])
def test_the_backwards_blocks_have_equally_much_to_do(length: int, heads: int) -> None:
    """Of causal calls: the longest key tile is a head's first one."""
    problem = problem_of(batch=1, seqlen_q=length, seqlen_k=length, num_heads=heads,
                         num_heads_kv=heads // 2, window_right=0)  # fmt: skip
    lengths = 2 * query_tiles(problem, 128, 128)
    assert lengths[0] == 2 * length // 128
    assert lengths[-1] == 2
    order = key_tile_order(problem, 128, 128, 132)
    loads = np.where(order >= 0, lengths[order % len(lengths)] + 1, 0).sum(0)
    assert loads.max() <= 1.04 * loads.mean() + lengths.min() + 1


def dealt_one_by_one(problem: Problem, costs: np.ndarray, blocks: int) -> float:
    """The largest load if every tile went to the block with the least to do so far."""
    heads = max(1, (8 << 20) // 256 // problem.seqlen_k)
    loads = [0.0] * blocks
    pairs = problem.batch * problem.num_heads
    for first in range(0, pairs, heads):
        for cost in np.repeat(np.sort(costs)[::-1], min(heads, pairs - first)).tolist():
            heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


@pytest.mark.parametrize(
    ("batch", "heads", "group"), [(2, 64, 4), (3, 3, 3), (1, 5, 3), (1, 4, 4), (1, 2, 2)]
)
def test_tiles_are_taken_by_equal_groups_of_heads_the_longest_first(
    batch: int, heads: int, group: int
) -> None:
    """So that the keys of a group, four heads at most, are in the L2 cache while blocks use them.

    A small group at the end would not keep all blocks busy.
    """
    problem = problem_of(128, 128, batch=batch, seqlen_q=16384, seqlen_k=16384, num_heads=2 * heads,
                         num_heads_kv=heads, window_right=0)  # fmt: skip
    lengths = key_tiles(problem, 128, 128)
    order = tile_order(problem, 128, 128, 12)
    number, length = order // len(lengths) // (2 * group), lengths[order % len(lengths)]
    later = order[1:] >= 0
    grows = (number[1:] > number[:-1]) & later
    assert (grows | (number[1:] == number[:-1]) | ~later).all()
    assert ((length[1:] <= length[:-1]) | grows | ~later).all()


def walked(places: np.ndarray, blocks: int) -> list[list[tuple[int, ...]]]:
    """(first_row, head, batch) of what each block takes, and whether no place is left over."""
    taken, left = [], set(range(len(places)))
    for block in range(blocks):
        place, mine = block, []
        left.discard(place)
        while place >= 0 and places[place, 0] >= 0:
            mine.append(tuple(places[place, :3].tolist()))
            place = int(places[place, 3])
            left.discard(place)
        taken.append(mine)
    assert not left
    return taken


@pytest.mark.parametrize("limit", [0, 10**9])
@pytest.mark.parametrize("window", [{}, *WINDOWS], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (1, 1)], ids=str)
def test_places_are_the_order_of_tiles(
    window: dict[str, object], heads: tuple[int, int], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block's tiles are those of its column, one after the other, and all are taken once."""
    monkeypatch.setattr("cupyflash._cuda.tile_order._BALANCED", limit)
    problem = problem_of(num_heads=heads[0], num_heads_kv=heads[1], **window)
    tiles = -(-problem.seqlen_q // 64)
    count = tiles * heads[0] * 2
    for blocks in (1, 7, count, count + 3):
        order = tile_order(problem, 64, 80, blocks)
        places = tile_places(problem, 64, 80, blocks)
        assert places.dtype == np.int32 and places.flags.c_contiguous
        taken = walked(places, blocks)
        for block, mine in enumerate(taken):
            numbers = [((b * heads[0]) + h) * tiles + row // 64 for row, h, b in mine]
            assert numbers == order[order[:, block] >= 0, block].tolist()
            assert all(row % 64 == 0 and row < problem.seqlen_q for row, _, _ in mine)
            assert all(h < heads[0] and b < 2 for _, h, b in mine)
        assert len({each for mine in taken for each in mine}) == sum(map(len, taken)) == count
        # What comes after the first tile of a block lies side by side.
        following = places[blocks:, 3]
        assert (
            following[following >= 0] == np.arange(blocks, len(places))[following >= 0] + 1
        ).all()


def test_a_block_without_a_tile_has_a_place_that_says_so() -> None:
    problem = problem_of(batch=1, seqlen_q=64, num_heads=2)
    places = tile_places(problem, 64, 80, 5)
    assert sorted(places[:2].tolist()) == [[0, 0, 0, -1], [0, 1, 0, -1]]
    assert (places[2:] == -1).all() and len(places) == 5


def test_no_block_that_is_launched_is_without_a_tile() -> None:
    for length, heads in product((1, 300, 5000), (1, 8)):
        problem = problem_of(seqlen_q=length, num_heads=heads, num_heads_kv=1, batch=1)
        plan = plan_forward(problem, HOPPER)
        places = tile_places(problem, plan.config.block_m, plan.config.block_n, plan.launch.blocks)
        assert (places[: plan.launch.blocks, 0] >= 0).all()


# --- what is launched ---------------------------------------------------------------------------


class Handed(NamedTuple):
    """What a launcher was made of."""

    device_id: int
    params: np.ndarray
    pointers: tuple[str, ...]
    settings: dict[str, object]


def shape_of_out(problem: Problem) -> tuple[int, ...]:
    return problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Handed]:
    """`forward._prepare` of one problem, without a GPU: what it hands to the launcher."""

    def launcher(_: object, device_id: int, params: object, pointers: object, **rest: object):
        return Handed(device_id, params, pointers, rest)

    def encode(dtype: str, address: int, lengths: object, strides: object, box: object) -> bytes:
        encoded.append((lengths, strides, box))
        return address.to_bytes(8, "little").rjust(16, b"\1").ljust(tensor_map.BYTES, b"\2")

    encoded: list[object] = []
    functions = SimpleNamespace(get_function=lambda entry, shared_memory: entry)
    monkeypatch.setattr(forward, "describe", lambda device_id: HOPPER)
    monkeypatch.setattr(forward, "load", lambda *arguments, **rest: functions)
    monkeypatch.setattr(forward, "Launcher", launcher)
    monkeypatch.setattr(forward.tuned, "find", lambda *arguments: None)
    monkeypatch.setattr(tensor_map, "encode", encode)
    tensor_map.address_offset.cache_clear()

    def run(
        problem: Problem,
        key_strides: tuple[int, ...] | None = None,
        out_strides: tuple[int, ...] | None = None,
    ) -> Handed:
        encoded.clear()
        query = bytes_of(problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim)
        key = bytes_of(problem.batch, problem.seqlen_k, problem.num_heads_kv, problem.head_dim)
        optional = OptionalLayout.of(Operands(None, None, None))
        key = key_strides or key
        out = out_strides or bytes_of(*shape_of_out(problem))
        layout = forward.ForwardLayout(query, key, key, out, None, None, optional, 16, 16)
        prepared = forward._prepare.__wrapped__("wgmma", problem, 0, None, layout)
        ((handed, blocks),) = prepared.launches
        assert blocks > 0
        del encoded[:-4]  # others find where addresses stand
        return handed._replace(settings={**handed.settings, "encoded": encoded})

    yield run
    tensor_map.address_offset.cache_clear()


def test_a_launch_is_given_maps_that_move_with_the_pointers(
    prepare: Callable[..., Handed],
) -> None:
    problem = problem_of(window_left=40, window_right=7)  # its first query sees key 160
    handed = prepare(problem)
    assert handed.params["first_key"] == 160
    assert handed.params["exponent_factor"] == np.float32(0.125 * np.log2(np.e))
    plan = plan_forward(problem, HOPPER)
    blocks = plan.launch.blocks
    tile = plan.tiling
    made = handed.settings["tables"]["places"].make()
    np.testing.assert_array_equal(made, tile_places(problem, tile.block_m, tile.block_n, blocks))
    fields = handed.params.dtype.fields
    row = 2 * 2 * 64  # bytes of a key
    shifts = {"query": 0, "key": 160 * row, "value": 160 * row, "out": 0}
    assert handed.settings["moved"] == [
        Moved(fields[f"{name}_map"][1] + 8, name, shifts[name]) for name in shifts
    ]
    query, key, value, out = handed.settings["encoded"]
    assert query == ((64, 300, 4, 2), (512, 128, 300 * 512), (64, plan.config.block_m, 1, 1))
    assert key == value == ((64, 340, 2, 2), (row, 128, 500 * row), (64, plan.config.block_n, 1, 1))
    assert out == ((64, 300, 4, 2), (512, 128, 300 * 512), (64, 16, 1, 1))  # a warp's rows


def test_a_full_call_has_places_too(prepare: Callable[..., Handed]) -> None:
    problem = problem_of()
    handed = prepare(problem)
    plan = plan_forward(problem, HOPPER)
    made = handed.settings["tables"]["places"].make()
    right = tile_places(problem, plan.config.block_m, plan.config.block_n, plan.launch.blocks)
    np.testing.assert_array_equal(made, right)
    assert handed.params["first_key"] == 0


ROW = 2 * 64
HEADS = {
    "dense": ((300 * 4 * ROW, 4 * ROW, ROW, 2), True),
    "padded": ((300 * 4 * ROW, 5 * ROW, ROW + 16, 2), True),
    "heads first": ((300 * 4 * ROW, ROW, 300 * ROW, 2), True),
    "reversed rows": ((300 * 4 * ROW, -4 * ROW, ROW, 2), False),
    "reversed heads": ((300 * 4 * ROW, 4 * ROW, -ROW, 2), False),
    "reversed batch": ((-300 * 4 * ROW, 4 * ROW, ROW, 2), False),
    "far apart": ((2**40, 4 * ROW, ROW, 2), False),
    "as far as may be": ((2**40 - 16, 4 * ROW, ROW, 2), True),
    "odd rows": ((300 * 4 * ROW, 4 * ROW + 8, ROW, 2), False),
    "odd heads": ((301 * 4 * ROW, 4 * ROW + 32, ROW + 2, 2), False),
}


@pytest.mark.parametrize("case", HEADS)
def test_the_copy_engine_writes_what_a_map_can_describe(
    prepare: Callable[..., Handed], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    strides, mapped = HEADS[case]
    planned = []

    def plan(*arguments: object) -> object:
        planned.append(plan_forward(*arguments))
        return planned[-1]

    monkeypatch.setattr(forward.PLANNERS["wgmma"], "plan_forward", plan)
    handed = prepare(problem_of(), out_strides=strides)
    assert planned[-1].config.staged == (64 if mapped else 0)
    fields = [moved.field for moved in handed.settings["moved"]]
    assert fields == ["query", "key", "value", "out"][: 3 + mapped]
    if mapped:
        batch, row, head = strides[:3]
        assert handed.settings["encoded"][-1][1] == (row, head, batch)


def test_what_a_map_can_describe() -> None:
    assert is_mappable((4096, 128, 64, 2), (2, 3, 4))
    assert is_mappable((2**40 - 1, 128, 64, 2), (2, 3, 4))
    for axis, stride in product(range(3), (-128, 0, 2**40)):
        strides = [4096, 128, 64, 2]
        strides[axis] = stride
        lengths = [2, 3, 4]
        assert not is_mappable(tuple(strides), tuple(lengths))
        lengths[axis] = 1  # no row is found by that stride
        assert is_mappable(tuple(strides), tuple(lengths))


def test_lengths_share_an_order_whatever_the_scale_and_not_across_devices() -> None:
    problem = problem_of(window_right=0)
    order = order_table(tile_order, problem, 128, 128, 8, 0)
    scaled = replace(problem, softmax_scale=2.0)
    assert order_table(tile_order, scaled, 128, 128, 8, 0) is order
    assert order_table(tile_order, problem, 128, 128, 8, 1) is not order
    assert order_table(key_tile_order, problem, 128, 128, 8, 0) is not order


@pytest.mark.parametrize("head_dim", [20, 64])
def test_strides_of_single_rows_and_heads_do_not_matter(
    prepare: Callable[..., Handed], head_dim: int
) -> None:
    one = problem_of(
        head_dim, head_dim, batch=1, seqlen_q=1, seqlen_k=1, num_heads=1, num_heads_kv=1
    )
    handed = prepare(one, (2 * head_dim + 6, 7, 3, 2))
    mapped = ("query", "key", "value", "out")[: 3 + (head_dim % 8 == 0)]
    assert tuple(moved.field for moved in handed.settings["moved"]) == mapped


def with_bias(d: int = 64, dv: int = 64, **options: object) -> Problem:
    shape = 2, 4, options.get("seqlen_q", 300), options.get("seqlen_k", 500)
    extras = frozenset({"bias"})
    settings = {"extras": extras, "bias_dtype": "float16", "bias_shape": shape, **options}
    return problem_of(d, dv, **settings)


@pytest.mark.parametrize("right", [None, 0])
def test_every_head_dim_fits_beside_a_bias(right: int | None) -> None:
    for d in range(1, 257):
        for dv in {d, 1, 256, 257 - d}:
            plan = plan_forward(with_bias(d, dv, window_right=right), HOPPER)
            assert plan.launch.shared_memory <= HOPPER.shared_memory_per_block_optin
            assert plan.config.bias_stages == 2


def test_every_line_of_the_tile_table_of_a_bias_is_taken() -> None:
    for head_dim, tiles in BIAS_TILES.items():
        taken = set()
        for rows in (128, 192, 256):
            config = plan_forward(with_bias(head_dim, head_dim, seqlen_q=rows), HOPPER).config
            taken.add((config.block_m, config.block_n, config.query_in_registers))
        assert taken == {(t.block_m, t.block_n, t.query_in_registers) for t in tiles}


def test_tiles_of_a_bias_are_for_calls_that_have_one() -> None:
    tile = BIAS_TILES[128][0]
    assert tile.bias_stages == 2
    bare = plan_forward(problem_of(128, 128), HOPPER, tile)
    assert bare.config.bias_stages == 0
    panels = 2 * tile.block_m * tile.block_n * 2
    plan = plan_forward(with_bias(128, 128), HOPPER, tile)
    assert plan.launch.shared_memory == bare.launch.shared_memory + panels
    given = plan_forward(with_bias(128, 128), HOPPER, replace(tile, bias_stages=0))
    assert given.config.bias_stages == 1
    wide = replace(tile, itemsize=1, block_n=128)
    assert "a bias" in (wide.complaint(128, 128) or "")
    with pytest.raises(UnsupportedError, match="a bias of float32"):
        plan_forward(with_bias(bias_dtype="float32"), HOPPER)


def test_tuning_tries_tiles_of_a_bias() -> None:
    tiles = candidates("wgmma", "forward", with_bias(128, 128), HOPPER)
    assert {tile.bias_stages for tile in tiles if isinstance(tile, WgmmaTile)} == {1, 2}
    bare = candidates("wgmma", "forward", problem_of(128, 128), HOPPER)
    assert {tile.bias_stages for tile in bare if isinstance(tile, WgmmaTile)} == {0}


def test_warps_that_say_whether_they_met_nan() -> None:
    plan = plan_forward(with_bias(128, 128), HOPPER)
    assert plan.suspects == plan.launch.blocks * 8  # two warpgroups compute
    assert plan_forward(with_bias(seqlen_q=192), HOPPER).suspects == 8 * 12


def test_who_serves_a_bias_and_alibi() -> None:
    for problem in (with_bias(), problem_of(extras=frozenset({"alibi_slopes"}))):
        assert lacks("wgmma", problem, HOPPER) == []
        assert backward_engine("wgmma", problem) == "mma"
    assert lacks("wgmma", problem_of(extras=frozenset({"mask"})), HOPPER) == ["mask"]
    wide = float8(extras=frozenset({"bias"}), bias_dtype="float16", bias_shape=(1, 4, 300, 500))
    assert lacks("wgmma", wide, HOPPER) == ["bias"]
    assert lacks("wgmma", float8(extras=frozenset({"alibi_slopes"})), HOPPER) == ["alibi_slopes"]
    assert backward_engine("wgmma", problem_of(softcap=1.0, window_right=0)) == "wgmma"
    assert backward_engine("simt", with_bias()) == "simt"


@pytest.mark.parametrize("extras", ["bias", "alibi_slopes"])
def test_scores_of_any_size_are_formed(extras: str) -> None:
    """A bias needs its scale at once; ALiBi's slopes can be divided by it."""
    problem = with_bias() if extras == "bias" else problem_of(extras=frozenset({extras}))
    config = plan_forward(problem, HOPPER).config
    assert (config.raw_scores, config.eager) == (extras != "bias", False)
    for softcap, exact in ((30.0, False), (65.0, True)):
        config = plan_forward(replace(problem, softcap=softcap), HOPPER).config
        assert (config.raw_scores, config.exact_softcap) == (False, exact)
    assert not plan_forward(problem_of(softcap=30.0), HOPPER).config.exact_softcap
    # Scales whose factor in the fast formula would be no float32.
    huge = replace(problem_of(softcap=1e-37), softmax_scale=20.0)
    assert plan_forward(huge, HOPPER).config.exact_softcap


def test_who_serves_float8() -> None:
    assert lacks("wgmma", float8(), HOPPER) == []
    assert lacks("simt", float8(), HOPPER) == []
    assert lacks("wgmma", float8(varlen=True), HOPPER) == ["varlen"]
    wide = problem_of(dtype="float8_e4m3fn", out_dtype="float32")
    assert lacks("wgmma", wide, HOPPER) == ["float32_output"]
    assert lacks("mma", float8(), HOPPER) == ["float8_e4m3fn"]


def test_a_tiling_is_not_taken_for_a_tile_that_complains() -> None:
    """The table's tile of that size has no product for 96 columns of V; another way has."""
    tiling = Tiling(128, 128, 2, 12)
    for dv, shared in ((128, True), (80, False)):
        plan = plan_forward(float8(d=128, dv=dv), HOPPER, tiling)
        assert plan.tiling == tiling
        assert plan.config.shared_probabilities == shared


@pytest.mark.parametrize("head_dim", FLOAT8_TILES)
def test_float8_tiles_fit(head_dim: int) -> None:
    for tile in FLOAT8_TILES[head_dim]:
        plan = plan_forward(float8(d=head_dim, dv=head_dim), HOPPER, tile)
        assert plan.launch.shared_memory <= HOPPER.shared_memory_per_block_optin
        assert plan.config.sums_by_tile == (head_dim <= 128)


@pytest.mark.parametrize(
    ("head_dim", "length", "block_m", "block_n"),
    [(64, 8192, 192, 192), (96, 8192, 192, 128), (64, 1535, 192, 128), (128, 8192, 192, 128),
     (128, 1024, 192, 128), (64, 512, 192, 128), (128, 640, 128, 128), (128, 511, 128, 128),
     (64, 511, 128, 128)],
)  # fmt: skip
@pytest.mark.parametrize("right", [None, 0])
def test_float8_tiles_by_length(
    head_dim: int, length: int, block_m: int, block_n: int, right: int | None
) -> None:
    """Up to an eighth of the rows may be wasted where products are apart."""
    problem = float8(d=head_dim, dv=head_dim, seqlen_q=length, seqlen_k=length, window_right=right)
    config = plan_forward(problem, HOPPER).config
    assert (config.block_m, config.block_n) == (block_m, block_n)
    assert config.apart == (block_m == 192)


@pytest.mark.parametrize(
    ("head_dim", "length", "full", "causal"),
    [(64, 512, True, True), (128, 1024, True, False), (128, 2048, True, True),
     (192, 2048, False, False), (256, 4096, True, False), (256, 8192, False, False)],
)  # fmt: skip
def test_float8_tiles_with_turns(head_dim: int, length: int, full: bool, causal: bool) -> None:
    problem = float8(d=head_dim, dv=head_dim, seqlen_q=length, seqlen_k=length)
    for right, turns in ((None, full), (0, causal)):
        config = plan_forward(replace(problem, window_right=right), HOPPER).config
        assert config.turns == turns
