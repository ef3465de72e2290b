"""FP8 inputs on engines that round probabilities to e4m3 as well, held to that rounding."""

from __future__ import annotations

import numpy as np
import pytest

from tests import cases
from tests.cases import FLOAT8, Shape
from tests.harness import call, expected, require
from tests.unit.test_float8 import draw_float8, every_number

FEATURES = ("plain", "causal", "top_left", "window", "softcap", "scale", "sinks", "gqa")
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (48, 176), (96, 80))
BFLOAT16_ULP = 2.0**-8


def serving(engine):
    if engine not in cases.FLOAT8_ROUNDING_ENGINES:
        pytest.skip(f"engine {engine!r} does not serve FP8")
    return engine


def sum_error(engine, terms):
    """How far off a sum of so many products may be, as a share of the sum without signs.

    Hopper's tensor cores align 32 products and the sum so far to the largest of them, and cut all
    off 13 bits below its first. What is cut off has random signs: it grows with the root of the
    number of terms. Simulated, it stays below a fifth of this, and is what an H200 showed.
    """
    return 2.0**-13 * np.sqrt(terms * 33 / 32) if engine == "wgmma" else 0.0


def score_errors(engine, real):
    """How far off the scores of each row may be, ``(b, h, sq)``."""
    axes = (0, 1, 2, 3) if real["layout"] == "bhsd" else (0, 2, 1, 3)
    q, k = (np.abs(real[name].transpose(axes).astype(np.float64)) for name in "qk")
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    head_dim = q.shape[-1]
    scale = real.get("softmax_scale") or 1 / np.sqrt(head_dim)
    largest = (q @ k.swapaxes(-2, -1)).max(axis=-1, initial=0)
    return sum_error(engine, head_dim) * abs(scale) * largest


def assert_within_rounding(engine, result, real):
    """Probabilities are off by 1/16 of themselves, or 2**-16 of the largest where they are small.

    So the output is off by that of the same mean of absolute values, and rounded to bfloat16. What
    scores and sums are off by, see `sum_error`, comes on top.
    """
    exact = expected(**real)
    spread = expected(**(real | {"v": np.abs(real["v"])}))
    keys = real["k"].shape[-2 if real["layout"] == "bhsd" else -3]
    of_scores = score_errors(engine, real)
    of_exponentials = np.expm1(2 * of_scores)

    def beside_out(statistic):
        return (statistic if real["layout"] == "bhsd" else statistic.swapaxes(-2, -1))[..., None]

    row_sum = beside_out(np.maximum(exact.row_sum, 1))
    small = 2.0**-16 * keys * np.abs(real["v"]).max(initial=0) / row_sum
    share = 1 / 16 + beside_out(of_exponentials) + sum_error(engine, keys)
    bound = spread.out * share + small + BFLOAT16_ULP * np.abs(exact.out) + 1e-6
    error = np.abs(result.out.astype(np.float64) - exact.out)
    assert (error <= bound).all(), (error / bound).max()
    if error.size > 100:  # the bound is a worst case: errors are random, and hardly ever so large
        assert np.sqrt(np.mean(error**2)) <= 0.4 * np.sqrt(np.mean(bound**2))
    for name, off in (("row_max", of_scores), ("row_sum", of_exponentials * exact.row_sum)):
        got, right = getattr(result, name).astype(np.float64), getattr(exact, name)
        seen = np.isfinite(right)
        np.testing.assert_array_equal(got[~seen], right[~seen], err_msg=name)
        bound = 2e-5 + 2e-5 * np.abs(right[seen]) + off[seen]
        error = np.abs(got[seen] - right[seen])
        assert (error <= bound).all(), (name, (error / bound).max())


@pytest.mark.parametrize("feature", FEATURES)
def test_float8_rounding_of_a_feature(engine, rng, feature):
    require(serving(engine), *([] if feature == "plain" else [feature]))
    layout = rng.choice(["bshd", "bhsd"])
    lengths = {"seqlen_q": int(rng.integers(150, 300)), "seqlen_k": int(rng.integers(150, 400))}
    shape = Shape(**lengths, head_dim=64, head_dim_v=64)
    features = [] if feature == "plain" else [feature]
    float8, real = draw_float8(rng, shape, features, layout)
    assert_within_rounding(engine, call(engine, **dict(float8, out_dtype="bfloat16")), real)


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_float8_rounding_of_head_dims(engine, rng, head_dims):
    shape = Shape(1, 200, 420, 2, 2, *head_dims)
    features = [("causal", "window")[int(rng.integers(2))]]
    float8, real = draw_float8(rng, shape, features)
    result = call(serving(engine), **dict(float8, out_dtype="bfloat16"))
    assert_within_rounding(engine, result, real)


def test_nothing_to_see(engine):
    x = np.zeros((1, 8, 2, 64), FLOAT8)
    result = call(serving(engine), x, x[:, :0], x[:, :0])
    assert not result.out.astype(np.float32).any() and (result.lse == -np.inf).all()


def test_one_key_a_query(engine):
    """Values come through unchanged, each with the right key: all numbers of e4m3."""
    q, _, v = every_number()
    v = np.ascontiguousarray(np.broadcast_to(v[..., :1], (1, 256, 1, 32))).view(np.uint8)
    v = np.where(v & 0x7F == 0x7F, 0, v + np.arange(32, dtype=np.uint8))
    v = np.where(v & 0x7F == 0x7F, 0, v).astype(np.uint8).view(FLOAT8)
    q = np.zeros((1, 256, 1, 32), FLOAT8)
    for window in ((0, 0), (0, None)):
        keys = slice(None) if window == (0, 0) else slice(-1, None)
        result = call(serving(engine), q[:, keys], q, v, window=window, v_descale=0.5)
        np.testing.assert_array_equal(
            result.out.astype(np.float32), v[:, keys].astype(np.float32) / 2
        )


def test_means_of_many_keys(engine, rng):
    """All probabilities alike: sums are exact, as far as the tensor cores go."""
    q = np.zeros((1, 3, 2, 64), FLOAT8)
    k, v = rng.normal(size=(2, 1, 3000, 2, 64)).astype(FLOAT8)
    result = call(serving(engine), q, k, v, v_descale=2.0)
    sums = 2 * v.astype(np.float64).cumsum(axis=1) / 3000
    right, largest = sums[:, -1:], np.abs(sums).max(axis=1, keepdims=True)
    error = np.abs(result.out.astype(np.float64) - right)
    bound = BFLOAT16_ULP * np.abs(right) + sum_error(engine, 3000) * largest + 1e-6
    assert (error <= bound).all(), (error / bound).max()
    np.testing.assert_array_equal(result.row_sum, 3000)


def test_scores_that_grow_and_shrink(engine, rng):
    """Maxima that rise from key tile to key tile, so that earlier sums are rescaled."""
    q = np.ones((1, 64, 1, 64), FLOAT8)
    k = np.repeat(np.linspace(-8, 8, 600), 64).reshape(1, 600, 1, 64).astype(FLOAT8)
    v = rng.normal(size=(1, 600, 1, 64)).astype(FLOAT8)
    for order in (slice(None), slice(None, None, -1)):
        keys, values = (np.ascontiguousarray(x[:, order]) for x in (k, v))
        real = {"q": q, "k": keys, "v": values, "layout": "bshd", "softmax_scale": 0.25}
        real = {n: x.astype(np.float32) if n in "qkv" else x for n, x in real.items()}
        result = call(serving(engine), q, keys, values, softmax_scale=0.25)
        assert_within_rounding(engine, result, real)
