"""Results must not depend on how a call is cut into tiles."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import Tiling, flash_attention_backward, flash_attention_forward
from tests import cases
from tests.cases import Shape
from tests.harness import call, check, draw, same_bits

SMALL = Shape(seqlen_q=23, seqlen_k=34, head_dim=12, head_dim_v=9)


@pytest.mark.parametrize("tiling", [(1, 6), (7, 5), (5, 64), (64, 3), (10**9, 10**9)])
@pytest.mark.parametrize("feature", ["plain", *cases.FEATURES])
def test_feature_in_tiles_that_divide_nothing(rng, feature, tiling):
    features = ["dlse"] if feature == "plain" else [feature, "dlse"]
    check("numpy", tiling=Tiling(*tiling), **draw(rng, SMALL, features=features))


@given(
    pair=st.sampled_from(cases.PAIRS),
    tiling=st.builds(Tiling, st.integers(1, 40), st.integers(1, 40)),
    lengths=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    dtype=st.sampled_from(sorted(cases.DTYPES)),
    seed=st.integers(0, 2**32),
)
def test_any_pair_in_any_tiles(pair, tiling, lengths, dtype, seed):
    shape = SMALL._replace(seqlen_q=lengths[0], seqlen_k=lengths[1])
    arguments = draw(np.random.default_rng(seed), shape, dtype, [*pair, "gqa"])
    check("numpy", tiling=tiling, **arguments)


def test_threads_do_not_disturb_each_other(rng):
    calls = [draw(rng, SMALL, features=pair) for pair in cases.PAIRS[:12]]

    def attend(arguments):
        arrays = [arguments[name] for name in "qkv"]
        options = {k: x for k, x in arguments.items() if k not in ("q", "k", "v", "dout", "dlse")}
        out, saved = flash_attention_forward(*arrays, tiling=Tiling(7, 5), **options)
        return out, *flash_attention_backward(arguments["dout"], saved)[:3]

    calls = [arguments for arguments in calls if "cu_seqlens" not in arguments]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(attend, calls * 3))
    alone = [attend(arguments) for arguments in calls] * 3
    for one, other in zip(together, alone, strict=True):
        assert all(map(same_bits, one, other))


def test_repeated_calls_are_bit_equal(rng):
    features = ["bias", "sinks", "dropout", "gqa", "causal"]
    arguments = draw(rng, SMALL, features=features)
    first, second = (call("numpy", tiling=Tiling(7, 5), **arguments) for _ in range(2))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True) if a is not None)
