"""Tiles of the wgmma engine that no table names yet, `bench --tune` tries them: are they right?"""

from __future__ import annotations

from unittest import mock

import pytest

from cupyflash._cuda import plan_wgmma
from cupyflash._cuda.tiles_wgmma import WgmmaTile
from tests.cases import Shape
from tests.harness import check, draw

# Two Q tiles in shared memory, prefetching, interleaved maxima, and tiles that consumers pass over.
TILES = {
    64: (WgmmaTile(256, 64, 3, False, 2, 8), WgmmaTile(192, 128, 2, False, 2, 4, True)),
    128: (WgmmaTile(128, 128, 2, True, 1, 4, True), WgmmaTile(128, 64, 3, True)),
    256: (WgmmaTile(128, 80, 2, False, 1, 6, True),),
}


@pytest.mark.parametrize(
    ("head_dim", "tile"), [(dim, tile) for dim, tiles in TILES.items() for tile in tiles], ids=str
)
def test_tiles_that_fetch_ahead(engine, rng, monkeypatch, head_dim, tile):
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
