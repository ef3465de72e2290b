"""FP8 calls long enough for the tiles of long calls: three groups whose products are apart."""

from __future__ import annotations

from typing import Any

import pytest

from cupyflash._cuda import device
from tests.cases import Shape
from tests.harness import call, same_bits
from tests.unit.test_float8 import draw_float8
from tests.unit.test_float8_rounding import assert_within_rounding


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (700, 90)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_long(engine: str, rng: Any, head_dim: int, options: dict[str, Any]) -> None:
    """Query tiles of which a group or rows are missing, heads that blocks pass between."""
    if engine != "wgmma" or device.current().compute_capability != (9, 0):
        pytest.skip("others have no such tiles")
    shape = Shape(2, 1300, 2100, 48, 24, head_dim, head_dim)
    float8, real = draw_float8(rng, shape, ["gqa"], "bshd")
    first, *others = (
        call(engine, **dict(float8, out_dtype="bfloat16"), **options) for _ in range(5)
    )
    assert all(same_bits(other.out, first.out) for other in others)
    real |= {"q": real["q"][:, :, :2], "k": real["k"][:, :, :1], "v": real["v"][:, :, :1]}
    few = first._replace(
        out=first.out[:, :, :2], row_max=first.row_max[:, :2], row_sum=first.row_sum[:, :2]
    )
    assert_within_rounding(engine, few, real | options)
