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
from cupyflash._cuda.device import Device
from cupyflash._cuda.engines import PLANNERS, lacks, runs_on
from cupyflash._cuda.launch import Moved
from cupyflash._cuda.order_table import order_table
from cupyflash._cuda.params import FORWARD_PARAMS
from cupyflash._cuda.plan_wgmma import plan_forward
from cupyflash._cuda.tile_order import key_tile_order, key_tiles, query_tiles, seen_keys, tile_order
from cupyflash._cuda.tiles_wgmma import BANDED_TILES, FLOAT8_TILES, FORWARD_TILES, WgmmaTile
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
        (Tiling(192, 128, 2, 16), "registers"),
        (Tiling(128, 128, 4, 12), "shared memory"),
        (WgmmaTile(128, 80, 2, True), "block_n must be one of"),
    ],
)
def test_a_tiling_that_does_not_fit_names_the_limit(tiling: Tiling, limit: str) -> None:
    with pytest.raises(UnsupportedError, match=limit):
        plan_forward(problem_of(128, 128), HOPPER, tiling)


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
    assert lacks("wgmma", problem_of(varlen=True), HOPPER) == ["varlen"]


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
    loads = np.where(order >= 0, lengths[order % len(lengths)] + 1, 0).sum(0)
    # As dealing out one by one would: at the end a block may lack one tile of the last group.
    assert loads.max() <= 1.03 * loads.mean() + lengths.max() + 1
    assert loads.max() <= 1.03 * dealt_one_by_one(problem, lengths, 132)


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


def dealt_one_by_one(problem: Problem, lengths: np.ndarray, blocks: int) -> int:
    """The largest load if every tile went to the block with the least to do so far."""
    heads = max(1, (8 << 20) // 256 // problem.seqlen_k)
    loads = [0] * blocks
    pairs = problem.batch * problem.num_heads
    for first in range(0, pairs, heads):
        for cost in np.repeat(np.sort(lengths)[::-1] + 1, min(heads, pairs - first)).tolist():
            heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def test_tiles_are_taken_by_groups_of_heads_the_longest_first() -> None:
    """So that the keys of a group are in the L2 cache while blocks work on it."""
    problem = problem_of(128, 128, batch=2, seqlen_q=16384, seqlen_k=16384, num_heads=64,
                         num_heads_kv=64, window_right=0)  # fmt: skip
    lengths = key_tiles(problem, 128, 128)
    order = tile_order(problem, 128, 128, 132)
    group, length = order // len(lengths) // 2, lengths[order % len(lengths)]
    later = order[1:] >= 0
    grows = (group[1:] > group[:-1]) & later
    assert (grows | (group[1:] == group[:-1]) | ~later).all()
    assert ((length[1:] <= length[:-1]) | grows | ~later).all()


# --- what is launched ---------------------------------------------------------------------------


class Handed(NamedTuple):
    """What a launcher was made of."""

    device_id: int
    params: np.ndarray
    pointers: tuple[str, ...]
    settings: dict[str, object]


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

    def run(problem: Problem, key_strides: tuple[int, ...] | None = None) -> Handed:
        query = bytes_of(problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim)
        key = bytes_of(problem.batch, problem.seqlen_k, problem.num_heads_kv, problem.head_dim)
        optional = OptionalLayout.of(Operands(None, None, None))
        key = key_strides or key
        layout = forward.ForwardLayout(query, key, key, query, None, None, optional, 16, 16)
        prepared = forward._prepare.__wrapped__("wgmma", problem, 0, None, layout)
        ((handed, blocks),) = prepared.launches
        assert blocks > 0
        del encoded[:-3]
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
    order = handed.settings["tables"]["order"]
    blocks = plan_forward(problem, HOPPER).launch.blocks
    tile = plan_forward(problem, HOPPER).tiling
    made = order.make()
    np.testing.assert_array_equal(made, tile_order(problem, tile.block_m, tile.block_n, blocks))
    fields = handed.params.dtype.fields
    row = 2 * 2 * 64  # bytes of a key
    shifts = {"query": 0, "key": 160 * row, "value": 160 * row}
    assert handed.settings["moved"] == [
        Moved(fields[f"{name}_map"][1] + 8, name, shifts[name]) for name in config_wgmma.MAPPED
    ]
    query, key, value = handed.settings["encoded"]
    plan = plan_forward(problem, HOPPER)
    assert query == ((64, 300, 4, 2), (512, 128, 300 * 512), (64, plan.config.block_m, 1, 1))
    assert key == value == ((64, 340, 2, 2), (row, 128, 500 * row), (64, plan.config.block_n, 1, 1))


def test_a_full_call_has_no_order(prepare: Callable[..., Handed]) -> None:
    handed = prepare(problem_of())
    assert handed.params["first_key"] == 0 and not handed.settings["tables"]


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
    assert len(handed.settings["moved"]) == 3


def test_who_serves_float8() -> None:
    assert lacks("wgmma", float8(), HOPPER) == []
    assert lacks("simt", float8(), HOPPER) == []
    assert lacks("wgmma", float8(varlen=True), HOPPER) == ["varlen"]
    wide = problem_of(dtype="float8_e4m3fn", out_dtype="float32")
    assert lacks("wgmma", wide, HOPPER) == ["float32_output"]
    assert lacks("mma", float8(), HOPPER) == ["float8_e4m3fn"]


@pytest.mark.parametrize("head_dim", FLOAT8_TILES)
def test_float8_tiles_fit(head_dim: int) -> None:
    for tile in FLOAT8_TILES[head_dim]:
        plan = plan_forward(float8(d=head_dim, dv=head_dim), HOPPER, tile)
        assert plan.launch.shared_memory <= HOPPER.shared_memory_per_block_optin
        assert plan.config.sums_by_tile == (head_dim <= 128)
