"""The largest lengths of flash-attn's own test of the cache, FP8 caches too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import FLOAT8, usual_dtype
from tests.kvcache_harness import check, draw

pytestmark = pytest.mark.large
# Contiguous and paged; each entry is filled up to its last token.
CALLS: tuple[dict[str, Any], ...] = (
    {"seqlen_q": 16, "new": 16, "seqlen_k": 20_000},
    {"seqlen_q": 1, "new": 1, "seqlen_k": 131_072, "page_size": 256},
)


def check_large(engine: str, rng: Any, call: dict[str, Any], **dtypes: Any) -> None:
    check(engine, draw(rng, batch=1, heads=(6, 2), head_dim=64, **call, **dtypes))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_large(engine, rng, call):
    check_large(engine, rng, call, dtype=usual_dtype(engine))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_large_in_float8(engine, rng, call):
    if engine != "mma":
        pytest.skip("the kernels of a cache belong to mma")
    check_large(engine, rng, call, dtype="bfloat16", cache_dtype=FLOAT8)
