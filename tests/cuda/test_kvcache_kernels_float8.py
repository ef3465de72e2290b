"""The kernels of a key-value cache where the cache is FP8 and the queries are 16-bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from tests.cuda.test_kvcache_kernels import CHANGES, SHAPES, call_of, served  # noqa: F401
from tests.harness import same_bits
from tests.kvcache_harness import call, check
from tests.unit.test_kvcache_float8 import (  # noqa: F401
    draw_float8,
    test_a_step_is_the_last_row_of_the_prompt,
    test_every_number_is_read_exactly,
    test_every_number_is_rounded_to_the_nearest,
    test_nan_stays_nan,
    test_new_tokens_in_float8_are_kept_bit_by_bit,
    test_refused,
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_of_a_block_of_float8(engine, rng, shape):
    drawn, splits = call_of(shape, rng)
    fresh = str(rng.choice(["16-bit", "FP8"]))
    if fresh == "FP8":
        drawn["rotary"] = 0  # which would have to round once more
    arguments = draw_float8(rng, fresh=fresh, **drawn)
    arguments["rotary_interleaved"] = bool(rng.integers(2))
    check(engine, arguments, num_splits=splits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_scores_of_float8(engine, rng, change, splits):
    """As for 16-bit caches; the keys' factor is a number, or only the device knows it."""
    for factor in (1.5, np.float32([[0.7], [1.2]])):
        arguments = draw_float8(
            rng, seqlen_q=3, seqlen_k=160, head_dim=96, batch=2, heads=(3, 1), leftpad=True,
            **CHANGES[change],
        )  # fmt: skip
        check(engine, arguments | {"k_descale": factor}, num_splits=splits)


@pytest.mark.parametrize("strides", ["part", "heads first", "tokens first"])
@pytest.mark.parametrize("head_dim", [32, 33, 34, 36, 40])  # rows of as few as one byte at a time
def test_strides_of_float8(engine, rng, strides, head_dim):
    arguments = draw_float8(rng, strides=strides, head_dim=head_dim, new=1, shuffled=True)
    check(engine, arguments, num_splits=2)


def test_the_dtype_of_queries_may_be_named(engine, rng):
    arguments = draw_float8(rng)
    named = call(engine, arguments, out_dtype=arguments["q"].dtype)
    assert same_bits(named[0], call(engine, arguments)[0])
    for served_elsewhere in ("float32", "float64"):
        with pytest.raises(cupyflash.UnsupportedError):
            call(engine, arguments, out_dtype=served_elsewhere)


def test_the_same_bits_in_every_run_of_float8(engine, rng):
    arguments = draw_float8(rng, seqlen_k=150, new=1, rotary=1, page_size=16)
    first = call(engine, arguments, num_splits=3)
    for _ in range(2):
        again: Any = call(engine, arguments, num_splits=3)
        assert all(map(same_bits, first, again))
