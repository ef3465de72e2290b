"""FlashAttention-2's matrix in full, judged on the device; odd widths and lengths."""

from __future__ import annotations

import pytest

from tests.cases import DTYPES, HEADS, Shape, matrix
from tests.harness import check, draw

WIDTHS = (1, 2, 5, 8, 15, 16, 23, 33, 48, 63, 72, 100, 127, 136, 200, 255, 256)


@pytest.mark.parametrize("case", matrix(full=True), ids=str)
def test_flash_attention_2_matrix(engine, rng, case):
    heads, heads_kv = HEADS[case.heads]
    arguments = draw(
        rng, Shape(1, *case.seqlens, heads, heads, case.head_dim, case.head_dim), case.dtype
    )
    for name in ("k", "v"):
        arguments[name] = arguments[name][:, :, :heads_kv]
    check(engine, on=engine, causal=case.causal, **arguments)


@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths(engine, rng, head_dim, dtype):
    head_dim_v = int(rng.choice(WIDTHS))
    shape = Shape(
        2, int(rng.integers(1, 150)), int(rng.integers(1, 150)), 2, 2, head_dim, head_dim_v
    )
    check(engine, **draw(rng, shape, dtype, ["causal"]))


@pytest.mark.parametrize("seqlens", [(1, 1), (1, 2000), (2000, 1), (1, 64), (65, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_length_one(engine, rng, seqlens, dtype):
    check(engine, **draw(rng, Shape(2, *seqlens, 4, 4, 64, 64), dtype, ["gqa", "dlse"]))
