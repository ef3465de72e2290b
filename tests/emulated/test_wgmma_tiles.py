"""Tiles of the wgmma engine that no table names, but `bench --tune` tries: are they right?"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from cupyflash._cuda import forward, plan_wgmma
from cupyflash._cuda.plan_wgmma import COUNTER_BYTES
from cupyflash._cuda.tiles_wgmma import FLOAT8_BANDED_TILES, FLOAT8_TILES, WgmmaTile
from tests.cases import Shape
from tests.cuda.test_wgmma_scores import bias_of, suspects_of
from tests.harness import call, check, draw
from tests.unit.test_float8 import draw_float8
from tests.unit.test_float8_rounding import assert_within_rounding

TILES = {
    64: (
        WgmmaTile(256, 64, 3, False, query_tiles=2),
        WgmmaTile(192, 128, 2, False, turns=False, staged=64),
        WgmmaTile(128, 128, 2, True, eager=True, staged=64),
    ),
    128: (
        WgmmaTile(128, 64, 3, True, staged=64),
        WgmmaTile(128, 128, 3, False, eager=True, turns=False),
        WgmmaTile(192, 80, 2, False, eager=True),
    ),
    256: (WgmmaTile(128, 80, 2, False), WgmmaTile(128, 64, 2, False, eager=True, staged=64)),
}


@contextmanager
def chosen(monkeypatch, tile):
    """Let every plan of this context take `tile`."""
    plan_wgmma.plan_forward.cache_clear()
    forward._prepare.cache_clear()
    with monkeypatch.context() as patched:
        choose = mock.Mock(return_value=tile)
        patched.setattr(plan_wgmma, "_choose", choose)
        yield
        assert choose.called
    plan_wgmma.plan_forward.cache_clear()
    forward._prepare.cache_clear()


def check_tile(rng, monkeypatch, tile, shape, sinks=0, **options):
    """One call that takes `tile`, against the reference."""
    dtype = rng.choice(["float16", "bfloat16"])
    arguments = draw(rng, shape, dtype, ["gqa"] if shape.heads_kv < shape.heads else [])
    del arguments["dout"]
    if sinks:
        arguments["sinks"] = rng.normal(size=sinks).astype(np.float32)
    with chosen(monkeypatch, tile):
        check("wgmma", **arguments, **options)


@pytest.mark.parametrize(
    ("head_dim", "tile"), [(dim, tile) for dim, tiles in TILES.items() for tile in tiles], ids=str
)
def test_other_tiles(engine, rng, monkeypatch, head_dim, tile):
    if engine != "wgmma":
        pytest.skip("other engines have other tiles")
    lengths = map(int, rng.integers(1, 700, 2))
    shape = Shape(1, *lengths, head_dim=head_dim, head_dim_v=head_dim)
    feature = rng.choice(["plain", "causal", "window"])
    arguments = draw(rng, shape, "bfloat16", [] if feature == "plain" else [feature])
    del arguments["dout"]
    with chosen(monkeypatch, tile):
        check(engine, **arguments)


# P in shared memory, out in its place: tiles, (head_dim, head_dim_v), options. Blocks of the
# emulator's three multiprocessors walk over many query tiles, and some end between two heads.
SHARED = WgmmaTile(192, 128, 2, False, shared_probabilities=True)
TWO = replace(SHARED, block_m=128)
SHARED_CASES = {
    "full": (replace(SHARED, staged=128, joined=False), (128, 128), {}),
    "causal": (replace(SHARED, staged=128, joined=False), (128, 128), {"causal": True}),
    "window": (replace(SHARED, staged=128, joined=False), (128, 128), {"window": (150, 40)}),
    "joined": (replace(SHARED, staged=128), (128, 128), {}),
    "joined, causal": (replace(SHARED, staged=128, turns=False), (128, 128), {"causal": True}),
    "halves": (replace(SHARED, staged=64, joined=False), (128, 128), {"window": (70, 0)}),
    "lanes": (replace(SHARED, staged=0, joined=False), (128, 128), {"causal": "top-left"}),
    "no turns": (replace(SHARED, staged=128, turns=False, joined=False), (128, 128), {}),
    "eager": (replace(SHARED, staged=64, eager=True), (64, 64), {}),
    "eager, apart": (
        replace(SHARED, staged=64, eager=True, turns=False, joined=False), (64, 64),
        {"window": (90, 60)},
    ),
    "clipped": (replace(SHARED, staged=64), (64, 40), {"causal": True}),
    "wide out": (replace(SHARED, staged=128, joined=False), (96, 104), {"causal": True}),
    "narrow out": (replace(SHARED, staged=128, joined=False), (128, 56), {}),
    "two": (replace(TWO, staged=128, eager=True), (128, 128), {"causal": True}),
    "two, halves": (replace(TWO, staged=64, joined=False), (128, 128), {}),
    "two, narrow": (replace(TWO, staged=64, eager=True, joined=False), (64, 64), {"causal": True}),
    "odd keys": (replace(SHARED, block_n=80, staged=128, joined=False), (128, 128), {}),
    "odd keys, lanes": (replace(TWO, block_n=112, turns=False), (128, 128), {"window": (9, 200)}),
    "deep": (replace(SHARED, block_n=64, stages=3, query_tiles=2, staged=64), (64, 64), {}),
    "sinks": (replace(SHARED, staged=128, joined=False), (128, 128), {"causal": True, "sinks": 4}),
    "softcap": (replace(SHARED, staged=128, joined=False), (128, 128), {"softcap": 1.5}),
}  # fmt: skip
LENGTHS = [(450, 330), (200, 520), (385, 385)]  # rows past the end; few keys, and many


@pytest.mark.parametrize("case", SHARED_CASES)
def test_probabilities_in_shared_memory(engine, rng, monkeypatch, case):
    if engine != "wgmma":
        pytest.skip("other engines have other tiles")
    tile, dims, options = SHARED_CASES[case]
    lengths = LENGTHS[int(rng.integers(len(LENGTHS)))]
    check_tile(rng, monkeypatch, tile, Shape(2, *lengths, 4, 2, *dims), **options)


# One tile of the bias or two, groups that pass over key tiles or not, query tiles joined or not.
BIASED = {
    "one stage": (128, WgmmaTile(128, 128, 2, False, staged=64, bias_stages=1), {}),
    "no turns": (64, WgmmaTile(192, 80, 2, False, turns=False, bias_stages=1), {"causal": True}),
    "four groups": (64, WgmmaTile(256, 64, 3, False, 2, bias_stages=2), {"window": (70, 30)}),
    "joined": (64, WgmmaTile(192, 128, 2, False, staged=64, bias_stages=2), {"causal": True}),
    "shared": (64, replace(SHARED, staged=64, bias_stages=1), {"window": (90, 0)}),
    "odd keys": (192, WgmmaTile(128, 80, 2, False, bias_stages=1), {"causal": "top-left"}),
}


@pytest.mark.parametrize("case", BIASED)
def test_tiles_of_a_bias(engine, rng, monkeypatch, case):
    if engine != "wgmma":
        pytest.skip("other engines have other tiles")
    head_dim, tile, options = BIASED[case]
    shape = Shape(2, int(rng.integers(200, 600)), 424, 3, 3, head_dim, head_dim)
    bias = bias_of(rng, shape, "float16", batch=2)
    bias[..., 5::9] = bias[..., 7, :] = -np.inf
    said = suspects_of(monkeypatch)
    check_tile(rng, monkeypatch, tile, shape, bias=bias, **options)
    assert len(said) == 1 and not said[0].any()


@pytest.mark.parametrize("staged", [0, 64, 128, 192])
@pytest.mark.parametrize("causal", [False, True])
def test_columns_that_pass_shared_memory(engine, rng, monkeypatch, staged, causal):
    """All at a time or panel by panel; the last panel of 184 columns is not whole."""
    if engine != "wgmma":
        pytest.skip("other engines have other tiles")
    tile = WgmmaTile(128, 64, 2, False, staged=staged)
    check_tile(rng, monkeypatch, tile, Shape(2, 150, 200, 2, 1, 64, 184), causal=causal)


@pytest.mark.parametrize("window", [{}, {"causal": True}, {"window": (100, 30)}], ids=str)
def test_float8_rows_pass_shared_memory(engine, rng, monkeypatch, window):
    """Panel by panel: out has 16 bits."""
    if engine != "wgmma":
        pytest.skip("other engines have other tiles")
    tile = WgmmaTile(128, 128, 2, False, staged=64, itemsize=1)
    shape = Shape(2, 300, 330, 4, 2, 192, 192)
    float8, real = draw_float8(rng, shape, ["gqa"], "bshd")
    with chosen(monkeypatch, tile):
        result = call(engine, **dict(float8, out_dtype="bfloat16"), **window)
    assert_within_rounding(engine, result, real | window)


# Three groups, scores and a tile's sums in the same registers: head dims, keys, options.
APART_CASES = {
    "full": ((128, 128), 128, {}),
    "causal": ((128, 128), 128, {"causal": True}),
    "window": ((128, 128), 128, {"window": (150, 40)}),
    "narrow": ((64, 64), 128, {"causal": True}),
    "medium": ((96, 96), 128, {}),
    "narrow out": ((128, 48), 128, {"window": (90, 0)}),
    "wide steps": ((64, 64), 192, {}),
    "wide steps, causal": ((64, 48), 192, {"causal": True}),
    "wide steps, window": ((32, 64), 192, {"window": (150, 40)}),
    "wide steps, softcap": ((64, 64), 192, {"softcap": 3.0, "window": (0, 0)}),
    "without turns": ((128, 128), 128, {"causal": True}),
}


@pytest.mark.parametrize("case", APART_CASES)
def test_products_apart(engine, rng, monkeypatch, case):
    if engine != "wgmma":
        pytest.skip("other engines have other tiles")
    dims, keys, options = APART_CASES[case]
    turns = case != "without turns"
    tables = FLOAT8_TILES if turns else FLOAT8_BANDED_TILES
    (tile,) = (
        tile
        for tile in tables[dims[0]]
        if (tile.apart, tile.block_n, tile.turns) == (True, keys, turns)
    )
    lengths = LENGTHS[int(rng.integers(len(LENGTHS)))]
    float8, real = draw_float8(rng, Shape(2, *lengths, 4, 2, *dims), ["gqa"], "bshd")
    with chosen(monkeypatch, tile):
        result = call(engine, **dict(float8, out_dtype="bfloat16"), **options)
    assert_within_rounding(engine, result, real | options)


@pytest.mark.parametrize("window", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "block_m", "by_tile"), [(64, 192, True), (128, 192, False), (128, 128, True)]
)
def test_float8_probabilities_in_shared_memory(
    engine, rng, monkeypatch, head_dim, block_m, by_tile, window
):
    if engine != "wgmma":
        pytest.skip("other engines have other tiles")
    tile = WgmmaTile(
        block_m, 128, 2, False, staged=64, itemsize=1, sums_by_tile=by_tile,
        shared_probabilities=True, joined=False,
    )  # fmt: skip
    float8, real = draw_float8(rng, Shape(2, 300, 330, 4, 2, head_dim, head_dim), ["gqa"], "bshd")
    with chosen(monkeypatch, tile):
        result = call(engine, **dict(float8, out_dtype="bfloat16"), **window)
    assert_within_rounding(engine, result, real | window)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("growth", [4.0, 12.0, 60.0, 500.0])
@pytest.mark.parametrize("queries", ["shared", "kept", "shared, and P"])
def test_scores_that_grow(engine, rng, monkeypatch, dtype, growth, queries):
    """Key tiles come from right to left: the exponentials of later ones are out of reach."""
    if engine != "wgmma":
        pytest.skip("other engines have other tiles")
    tile = WgmmaTile(128, 64, 3, queries == "kept", eager=True, staged=64)
    tile = replace(tile, shared_probabilities=queries == "shared, and P")
    shape = Shape(1, 200, 500, head_dim=64, head_dim_v=64)
    arguments = draw(rng, shape, dtype, ["causal"] if growth < 50 else [])
    del arguments["dout"]
    key = arguments["k"]
    rows = key.shape.index(500)
    shaped = [1] * key.ndim
    shaped[rows] = 500
    factor = growth ** np.linspace(1, 0, 500).round(1).reshape(shaped)
    arguments["k"] = (key.astype(np.float32) * factor).astype(key.dtype)
    with chosen(monkeypatch, tile):
        check(engine, **arguments)


def test_probabilities_leave_room_for_large_values(engine, rng, monkeypatch):
    """Keys that come later weigh exp(17) times as much, and values are 1e30."""
    if engine != "wgmma":
        pytest.skip("other engines have other tiles")
    q = np.full((1, 64, 1, 64), 0.25, np.float32)
    k = np.zeros((1, 512, 1, 64), np.float32)
    k[:, :256] = 17 / (0.25 * 64 * 0.125)  # q . k times the scale
    v = (1e30 * (1 + rng.random((1, 512, 1, 64)))).astype(np.float32)
    tile = WgmmaTile(128, 128, 2, True, eager=True)
    with chosen(monkeypatch, tile):
        out = call(engine, *(x.astype(ml_dtypes.bfloat16) for x in (q, k, v))).out
    right = v[:, :256].mean(1)
    assert np.abs(out.astype(np.float64)[:, 0] / right - 1).max() < 0.01


# Queries and keys of entries: none, fewer than a tile has, more.
ENTRIES = np.array([[0, 40], [150, 400], [64, 130], [300, 0], [1, 260], [210, 210]])
VARLEN_OPTIONS = (
    {},
    {"causal": True},
    {"causal": "top-left"},
    {"window": (70, 30)},
    {"window": (5, 0), "softcap": 2.0},
    {"causal": True, "sinks": np.linspace(-1, 2, 4, dtype=np.float32)},
    {"alibi_slopes": np.linspace(0, 0.2, 4, dtype=np.float32)},
)


def packed(rng, lengths, spare, heads, dims, dtype):
    """Entries of these lengths (of queries and of keys), and `spare` tokens of NaN behind them."""
    totals = lengths.sum(0) + spare
    arguments = draw(rng, Shape(1, *totals, *heads, *dims), dtype, ["gqa"])
    tokens = {name: arguments[name][0] for name in "qkv"}
    for each in tokens.values():
        each[-spare:] = np.nan
    starts = np.concatenate([[[0, 0]], lengths.cumsum(0)]).astype(np.int32)
    return tokens | {"cu_seqlens": tuple(np.ascontiguousarray(each) for each in starts.T)}


@pytest.mark.parametrize("options", VARLEN_OPTIONS, ids=str)
def test_varlen_tiles(engine, rng, options):
    """Entries end within tiles, and begin where copies of boxes may begin anywhere."""
    if engine != "wgmma":
        pytest.skip("other engines have other tiles")
    dims = [(64, 64), (128, 72), (192, 256)][rng.integers(3)]
    arguments = packed(rng, rng.permutation(ENTRIES), 9, (4, 2), dims, "bfloat16")
    result, _ = check(engine, **arguments, **options)
    assert not result.out[-9:].astype(np.float32).any()


@pytest.mark.parametrize(("last", "again"), [(260, False), (100, True)])
def test_varlen_calls_that_are_done_again(engine, rng, monkeypatch, last, again):
    """Those with NaN behind an entry that is shorter than a key tile; the result is right."""
    if engine != "wgmma":
        pytest.skip("other engines do nothing again")
    lengths = np.array([[300, 300], [last, last]])
    arguments = packed(rng, lengths, 30, (2, 1), (128, 128), "float16")
    said = suspects_of(monkeypatch)
    check(engine, **arguments, causal=True)
    assert said[0][:-COUNTER_BYTES].view(np.ndarray).any() == again
