"""Tiles of the wgmma engine that no table names, but `bench --tune` tries: are they right?"""

from __future__ import annotations

from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from cupyflash._cuda import plan_wgmma
from cupyflash._cuda.tiles_wgmma import WgmmaTile
from tests.cases import Shape
from tests.harness import call, check, draw

TILES = {
    64: (
        WgmmaTile(256, 64, 3, False, query_tiles=2),
        WgmmaTile(192, 128, 2, False, turns=False, staged=64),
        WgmmaTile(128, 128, 2, True, eager=True, staged=32),
    ),
    128: (
        WgmmaTile(128, 64, 3, True, staged=64),
        WgmmaTile(128, 128, 3, False, eager=True, turns=False),
        WgmmaTile(192, 80, 2, False, eager=True),
    ),
    256: (WgmmaTile(128, 80, 2, False), WgmmaTile(128, 64, 2, False, eager=True, staged=32)),
}


@pytest.mark.parametrize(
    ("head_dim", "tile"), [(dim, tile) for dim, tiles in TILES.items() for tile in tiles], ids=str
)
def test_other_tiles(engine, rng, monkeypatch, head_dim, tile):
    if engine != "wgmma":
        pytest.skip("other engines have other tiles")
    plan_wgmma.plan_forward.cache_clear()
    lengths = map(int, rng.integers(1, 700, 2))
    shape = Shape(1, *lengths, head_dim=head_dim, head_dim_v=head_dim)
    feature = rng.choice(["plain", "causal", "window"])
    arguments = draw(rng, shape, "bfloat16", [] if feature == "plain" else [feature])
    del arguments["dout"]
    monkeypatch.setattr(plan_wgmma, "_choose", mock.Mock(return_value=tile))
    check(engine, **arguments)
    plan_wgmma.plan_forward.cache_clear()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("growth", [4.0, 12.0, 60.0, 500.0])
@pytest.mark.parametrize("kept", [False, True])
def test_scores_that_grow(engine, rng, monkeypatch, dtype, growth, kept):
    """Key tiles come from right to left: the exponentials of later ones are out of reach."""
    if engine != "wgmma":
        pytest.skip("other engines have other tiles")
    tile = WgmmaTile(128, 64, 3, kept, eager=True, staged=64)
    plan_wgmma.plan_forward.cache_clear()
    shape = Shape(1, 200, 500, head_dim=64, head_dim_v=64)
    arguments = draw(rng, shape, dtype, ["causal"] if growth < 50 else [])
    del arguments["dout"]
    key = arguments["k"]
    rows = key.shape.index(500)
    shaped = [1] * key.ndim
    shaped[rows] = 500
    factor = growth ** np.linspace(1, 0, 500).round(1).reshape(shaped)
    arguments["k"] = (key.astype(np.float32) * factor).astype(key.dtype)
    monkeypatch.setattr(plan_wgmma, "_choose", mock.Mock(return_value=tile))
    check(engine, **arguments)
    plan_wgmma.plan_forward.cache_clear()


def test_probabilities_leave_room_for_large_values(engine, rng, monkeypatch):
    """Keys that come later weigh exp(17) times as much, and values are 1e30."""
    if engine != "wgmma":
        pytest.skip("other engines have other tiles")
    plan_wgmma.plan_forward.cache_clear()
    q = np.full((1, 64, 1, 64), 0.25, np.float32)
    k = np.zeros((1, 512, 1, 64), np.float32)
    k[:, :256] = 17 / (0.25 * 64 * 0.125)  # q . k times the scale
    v = (1e30 * (1 + rng.random((1, 512, 1, 64)))).astype(np.float32)
    tile = WgmmaTile(128, 128, 2, True, eager=True)
    monkeypatch.setattr(plan_wgmma, "_choose", mock.Mock(return_value=tile))
    out = call(engine, *(x.astype(ml_dtypes.bfloat16) for x in (q, k, v))).out
    right = v[:, :256].mean(1)
    assert np.abs(out.astype(np.float64)[:, 0] / right - 1).max() < 0.01
    plan_wgmma.plan_forward.cache_clear()
