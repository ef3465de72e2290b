"""``deterministic=True``: right, and the same bits in every run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import Shape
from tests.harness import call, compare, draw, expected, same_bits

# Several tiles of keys see a tile of queries, and several heads take part. Queries that see no key,
# keys that no query sees, first queries whose first keys are not the first ones. What wgmma does:
# dq by way of shared memory, up to 128 columns; above, by warpgroups that have roles; where v alone
# is wide, by one of them.
CASES: dict[str, tuple[Shape, tuple[str, ...], dict[str, Any]]] = {
    "full": (Shape(2, 150, 400, 2, 1, 64, 64), ("gqa",), {}),
    "causal": (Shape(1, 400, 400, 2, 1, 64, 64), ("gqa", "causal"), {}),
    "fewer keys": (Shape(2, 330, 270, 2, 2, 128, 128), ("causal",), {}),
    "more keys": (Shape(1, 140, 500, 2, 2, 96, 128), ("causal",), {}),
    "top left": (Shape(1, 270, 500, 1, 1, 128, 96), ("top_left",), {}),
    "window": (Shape(1, 400, 500, 2, 1, 128, 128), ("gqa",), {"window": (90, 150)}),
    "wide": (Shape(1, 150, 200, 2, 1, 256, 256), ("gqa",), {}),
    "wide, causal": (Shape(2, 200, 270, 1, 1, 192, 256), ("causal",), {}),
    "wide, window": (Shape(1, 200, 330, 2, 1, 256, 192), ("gqa",), {"window": (100, 30)}),
    "left": (Shape(1, 300, 270, 1, 1, 256, 256), (), {"window": (70, None)}),
    "right": (Shape(1, 150, 300, 1, 1, 64, 64), (), {"window": (None, 50)}),
    "wide values": (Shape(1, 200, 300, 2, 1, 64, 192), ("gqa", "causal"), {}),
    "softcap": (Shape(1, 150, 270, 1, 1, 64, 64), ("softcap",), {"window": (120, 70)}),
}


@pytest.mark.parametrize("case", CASES)
def test_deterministic_gradients(engine: str, rng: Any, case: str) -> None:
    shape, features, options = CASES[case]
    arguments = draw(rng, shape, "float16", features) | options
    results = [call(engine, deterministic=True, **arguments) for _ in range(3)]
    compare(results[0], expected(**arguments), **arguments)
    for again in results[1:]:
        for name in ("dq", "dk", "dv"):
            assert same_bits(getattr(again, name), getattr(results[0], name)), name
