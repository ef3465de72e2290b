"""Memory grows with the lengths, never with their product."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import cupyflash
from cupyflash import Tiling

SEQLEN = 2000


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_peak_memory(rng, dtype):
    q, k, v, dout = (rng.normal(size=(1, SEQLEN, 1, 16)).astype(dtype) for _ in range(4))
    bias = rng.normal(size=(SEQLEN, 1)).astype(np.float32)
    options = {
        "tiling": Tiling(64, 250),
        "mask": rng.random(SEQLEN) < 0.5,
        "bias": bias,
        "alibi_slopes": np.ones(1, np.float32),
        "dropout_p": 0.1,
    }
    tracemalloc.start()
    try:
        _, saved = cupyflash.flash_attention_forward(q, k, v, **options)
        cupyflash.flash_attention_backward(dout, saved)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Copies of rows in float32 and a few tiles; one bool an element of (sq, sk) would be 4 MB.
    assert peak < 20 * SEQLEN * 16 * 4
