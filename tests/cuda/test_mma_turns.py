"""mma's tiles whose warps multiply in turns, which calls of tests would be too short for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash._cuda.tiles_mma import TURNS
from cupyflash.tiling import Tiling
from tests.cases import Shape
from tests.harness import call, check, draw, same_bits

Options = dict[str, Any]

# One key tile, two, and more; query tiles of which rows, a warp or a group are missing.
CASES: dict[str, tuple[Shape, str, tuple[str, ...], Options]] = {
    "full": (Shape(2, 300, 270, 2, 1, 64, 64), "float16", ("gqa", "dlse"), {}),
    "one tile": (Shape(1, 257, 20, 2, 2, 64, 64), "bfloat16", (), {}),
    "two tiles": (Shape(1, 40, 64, 1, 1, 128, 128), "float16", ("sinks",), {}),
    "causal": (Shape(1, 290, 350, 2, 1, 128, 128), "bfloat16", ("gqa", "causal"), {}),
    "fewer keys": (Shape(1, 330, 170, 1, 1, 64, 64), "float16", ("causal",), {}),
    "top left": (Shape(1, 270, 330, 1, 1, 192, 192), "float16", ("top_left",), {}),
    "window": (Shape(1, 300, 330, 2, 1, 256, 256), "float16", ("gqa",), {"window": (90, 40)}),
    "wide": (Shape(1, 150, 230, 2, 2, 256, 256), "bfloat16", ("softcap",), {}),
    "wide values": (Shape(1, 140, 150, 1, 1, 64, 160), "float16", ("dropout",), {}),
    "narrow values": (Shape(1, 140, 150, 1, 1, 190, 40), "bfloat16", ("causal",), {}),
    "softcap": (Shape(1, 270, 208, 2, 2, 128, 128), "float16", ("softcap",), {}),
    "softcap, alibi": (
        Shape(1, 90, 150, 4, 2, 64, 64), "float16", ("softcap", "alibi", "gqa", "causal"), {}
    ),
    "alibi": (Shape(1, 270, 208, 2, 2, 128, 128), "bfloat16", ("alibi",), {}),
    "dropout": (Shape(1, 270, 208, 2, 2, 128, 128), "float16", ("dropout", "causal"), {}),
    "mask": (Shape(2, 270, 201, 2, 2, 128, 128), "float16", ("mask",), {}),
    "block mask": (Shape(1, 270, 308, 2, 2, 64, 64), "bfloat16", ("block_mask",), {}),
    "score_mod": (Shape(1, 100, 150, 2, 2, 64, 64), "bfloat16", ("score_mod",), {}),
    "varlen": (Shape(3, 300, 270, 2, 1, 128, 128), "float16", ("varlen", "gqa", "causal"), {}),
}  # fmt: skip


def tiling_of(shape: Shape) -> Tiling:
    """The tile that multiplies in turns, in the terms of the public interface."""
    tile = TURNS[-(-max(shape.head_dim, shape.head_dim_v) // 32) * 32][0].tile
    return Tiling(tile.block_m, tile.block_n, 2, tile.warps)


@pytest.mark.parametrize("case", CASES)
def test_turns(rng: Any, case: str) -> None:
    shape, dtype, features, options = CASES[case]
    check("mma", tiling=tiling_of(shape), **draw(rng, shape, dtype, features), **options)


def test_values_that_nobody_sees_may_hold_anything(rng: Any) -> None:
    """A mask hides whole key tiles and single keys."""
    shape = Shape(2, 270, 208, 2, 2, 128, 128)
    arguments = draw(rng, shape, "float16", ())
    mask = rng.random((2, 1, 1, 208)) < 0.8
    mask[..., 64:96], mask[0, ..., 150:] = False, False
    hidden = ~mask[:, 0, 0, :]
    for name in ("k", "v"):
        arguments[name][hidden] = 0
    clean = call("mma", mask=mask, tiling=tiling_of(shape), **arguments)
    for name in ("k", "v"):
        arguments[name][hidden] = np.nan
    poisoned = call("mma", mask=mask, tiling=tiling_of(shape), **arguments)
    for name in ("out", "lse"):
        assert same_bits(getattr(poisoned, name), getattr(clean, name)), name


def test_turns_give_the_same_bits_again(rng: Any) -> None:
    shape = Shape(1, 600, 500, 2, 2, 64, 64)
    arguments = draw(rng, shape, "bfloat16", ("causal",))
    del arguments["dout"]
    first, *others = (call("mma", tiling=tiling_of(shape), **arguments) for _ in range(20))
    assert all(same_bits(other.out, first.out) for other in others)
