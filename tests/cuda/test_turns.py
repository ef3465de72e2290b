"""``deterministic=True`` where more blocks wait for their turns than a GPU runs at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import Shape
from tests.harness import call, compare, draw, expected, same_bits


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (700, 300)}], ids=str)
def test_many_blocks_take_turns(
    engine: str, rng: Any, head_dim: int, options: dict[str, Any]
) -> None:
    arguments = draw(rng, Shape(2, 1900, 2100, 12, 12, head_dim, head_dim), "float16") | options
    first, *others = (call(engine, deterministic=True, **arguments) for _ in range(5))
    compare(first, expected(on=engine, **arguments), on=engine, **arguments)
    for again in others:
        for name in ("dq", "dk", "dv"):
            assert same_bits(getattr(again, name), getattr(first, name)), name
