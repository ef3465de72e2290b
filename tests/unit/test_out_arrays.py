"""``out=`` amid other bytes, as aligned as engines like it: each is written, and nothing beside.

`test_arrays.py` has views whose addresses and rows are not aligned; these are written as wide as an
engine can, by wgmma's copy engine as whole boxes. Some of these it cannot describe.
"""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from tests.cases import Shape
from tests.harness import call, draw, same_bits
from tests.memory import Guarded, poisoned, to_engine, to_host

# Of (b, s, h, d): the buffer's lengths, and the view of it.
PLACES = {
    "dense": lambda b, s, h, d: ((b, s, h, d), lambda x: x),
    "rows apart": lambda b, s, h, d: (
        (b, s, h * d + 64), lambda x: x[..., 16:-48].reshape(b, s, h, d)),
    "columns of wider rows": lambda b, s, h, d: (
        (b, s, h, 2 * d + 16), lambda x: x[..., 8 : 8 + d]),
    "heads first": lambda b, s, h, d: ((b, h, s, d), lambda x: x.swapaxes(1, 2)),
    "rows first": lambda b, s, h, d: ((s, b, h, d), lambda x: x.swapaxes(0, 1)),
    "rows of more": lambda b, s, h, d: ((b, s + 40, h, d), lambda x: x[:, 20 : 20 + s]),
    "rows of more, heads first": lambda b, s, h, d: (
        (b, h, s + 5, d), lambda x: x[:, :, 2 : 2 + s].swapaxes(1, 2)),
    "every other row": lambda b, s, h, d: ((b, 2 * s, h, d), lambda x: x[:, ::2]),
    "heads of more": lambda b, s, h, d: ((b, s, h + 2, d), lambda x: x[:, :, 1:-1]),
    "one of three": lambda b, s, h, d: ((b, s, 3, h, d), lambda x: x[:, :, 1]),
    "reversed rows": lambda b, s, h, d: ((b, s + 2, h, d), lambda x: x[:, s:0:-1]),
    "reversed heads": lambda b, s, h, d: ((b, s, h + 2, d), lambda x: x[:, :, h:0:-1]),
    "reversed batch": lambda b, s, h, d: ((b, s, h, d + 8), lambda x: x[::-1, ..., :d]),
    "rows half a chunk apart": lambda b, s, h, d: (
        (b, s, h, d + 4), lambda x: x[..., :d]),
    "an odd column": lambda b, s, h, d: ((b, s, h, d + 8), lambda x: x[..., 3 : 3 + d]),
}  # fmt: skip
SHAPES = {
    "narrow": Shape(2, 150, 200, 4, 2, 64, 40),
    "short": Shape(1, 5, 90, 2, 1, 128, 128),
    "wide": Shape(2, 90, 70, 2, 1, 96, 200),
    "long": Shape(1, 200, 2060, 2, 1, 128, 128),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", SHAPES)
def test_out_amid_other_bytes(engine, rng, shape, place):
    dtype = rng.choice(["float16", "bfloat16"])
    arguments = draw(rng, SHAPES[shape], dtype, ["gqa", "causal"][: int(rng.integers(1, 3))])
    del arguments["dout"]
    plain = call(engine, **arguments).out
    guarded = Guarded.inside(engine, *PLACES[place](*plain.shape), plain.dtype, rng)
    assert guarded.view.shape == plain.shape
    q, k, v = (to_engine(engine, arguments.pop(name)) for name in "qkv")
    with poisoned(engine):
        out = cupyflash.flash_attention(q, k, v, out=guarded.view, engine=engine, **arguments)
    assert out is guarded.view
    assert same_bits(np.ascontiguousarray(to_host(out)), plain)
    guarded.assert_rest_unchanged()
