from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupyflash import flash_attention_forward, merge_states
from tests.tolerance import assert_close, tiny


def dense_merge(outs, lses):
    """The softmax-weighted mean, in float64 and without care."""
    lses = np.stack(lses).astype(np.float64)
    weights = np.exp(lses - np.where(np.isinf(lses.max(0)), 0, lses.max(0)))
    total = weights.sum(0)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + np.where(np.isinf(lses.max(0)), 0, lses.max(0))
    weights = np.moveaxis(weights / np.where(total == 0, 1, total), -1, -2)[..., None]
    outs = np.stack([np.nan_to_num(out.astype(np.float64)) for out in outs])
    return (weights * outs).sum(0), lse


def parts(rng, number=17, dtype=np.float32, lead=(2,)):
    outs = rng.normal(size=(number, *lead, 40, 3, 16)).astype(dtype)
    lses = (10 * rng.normal(size=(number, *lead, 3, 40))).astype(np.float32)
    lses[rng.random(lses.shape) < 0.5] = -np.inf
    lses[..., :5] = -np.inf
    return outs, lses


@pytest.mark.parametrize("garbage", [0, np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("lead", [(), (2,), (3, 2)])
def test_against_the_formula(rng, lead, dtype, garbage):
    outs, lses = parts(rng, 17, dtype, lead)
    outs[np.swapaxes(np.isinf(lses), -1, -2)] = garbage
    out, lse = merge_states(list(outs), tuple(lses))
    expected, expected_lse = dense_merge(list(outs), list(lses))
    assert (out.dtype, lse.dtype) == (dtype, np.float32)
    # A weight is off by an ulp or two of its own, and by the rounding of lse - max.
    noise = 2 * tiny("float64" if dtype == np.float64 else "float32", np.abs(expected).max())
    assert_close(out, expected, expected.astype(dtype), noise=noise)
    assert_close(lse, expected_lse, expected_lse.astype(np.float32))
    assert not out[..., :5, :, :].any()
    assert (lse[..., :5] == -np.inf).all()


def test_stacked_parts_and_out_dtype(rng):
    outs, lses = parts(rng)
    stacked, listed = merge_states(outs, lses), merge_states(list(outs), list(lses))
    for one, other in zip(stacked, listed, strict=True):
        np.testing.assert_array_equal(one, other)
    half, lse = merge_states(outs, lses, out_dtype=ml_dtypes.bfloat16)
    assert (half.dtype, lse.dtype) == (ml_dtypes.bfloat16, np.float32)
    np.testing.assert_array_equal(half, stacked[0].astype(ml_dtypes.bfloat16))


def test_float64_stays_float64(rng):
    outs, lses = parts(rng, dtype=np.float64)
    out, lse = merge_states(outs, lses.astype(np.float64))
    expected, expected_lse = dense_merge(outs, lses)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-14)


def test_huge_lse(rng):
    out = rng.normal(size=(1, 2, 1, 4)).astype(np.float32)
    for value in (1e30, -1e30, 3e38):
        lse = np.full((1, 1, 2), value, np.float32)
        merged, total = merge_states([out, 3 * out], [lse, lse])
        np.testing.assert_allclose(merged, 2 * out, rtol=1e-6)
        np.testing.assert_array_equal(total, lse)


def test_one_part_comes_back_bit_for_bit(rng):
    outs, lses = parts(rng, number=1)
    out, lse = merge_states(outs, lses)
    seen = np.swapaxes(np.isfinite(lses[0]), -1, -2)
    np.testing.assert_array_equal(out[seen], outs[0][seen])
    np.testing.assert_array_equal(lse, lses[0])


def test_inputs_are_left_alone(rng):
    outs, lses = parts(rng)
    before = outs.copy(), lses.copy()
    out, lse = merge_states(outs, lses)
    np.testing.assert_array_equal((outs, lses)[0], before[0])
    np.testing.assert_array_equal(lses, before[1])
    assert not np.shares_memory(out, outs)
    assert not np.shares_memory(lse, lses)


def test_attention_over_parts_of_the_keys(rng):
    q, k, v = (rng.normal(size=(2, n, 4, 8)) for n in (9, 30, 30))
    whole, saved = flash_attention_forward(q, k, v)
    states = [flash_attention_forward(q, k[:, keys], v[:, keys])
              for keys in (slice(0, 7), slice(7, 7), slice(7, 30))]  # fmt: skip
    out, lse = merge_states([out for out, _ in states], [state.lse for _, state in states])
    np.testing.assert_allclose(out, whole, atol=1e-14)
    np.testing.assert_allclose(lse, saved.lse, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda o, s: ([], []), ValueError, "outs has no parts"),
        (lambda o, s: (o, s[:2]), ValueError, "3 outs and 2 lses"),
        (lambda o, s: (o[0, 0], s), ValueError, "40 outs and 3 lses"),
        (lambda o, s: (o, [x.T for x in s]), ValueError, r"lses\[0\] must have shape \(2, 3, 40\)"),
        (lambda o, s: ([*o[:2], o[2][:1]], s), ValueError, r"outs\[2\] must have shape"),
        (lambda o, s: ([x[0, 0] for x in o], s), ValueError, r"outs\[0\]"),
        (lambda o, s: (o, ["a"] * 3), TypeError, r"lses\[0\] must be an array"),
        (lambda o, s: (o, s.astype(np.float16)), TypeError, "float32, float64"),
        (lambda o, s: (o.astype(int), s), TypeError, r"outs\[0\] must have"),
        (lambda o, s: ([*o[:2], o[2].astype(float)], s), TypeError, "one dtype"),
        (lambda o, s: (np.float32(1), s), (TypeError, ValueError), "outs"),
    ],
)
def test_errors(rng, change, error, words):
    outs, lses = change(*parts(rng, number=3))
    with pytest.raises(error, match=words):
        merge_states(outs, lses)


@pytest.mark.parametrize("out_dtype", [int, "nonsense", bool])
def test_out_dtype_errors(rng, out_dtype):
    with pytest.raises(TypeError, match="out_dtype"):
        merge_states(*parts(rng, number=2), out_dtype=out_dtype)


@pytest.mark.parametrize("lse", [np.inf, np.nan])
def test_what_is_no_number_warns_of_nothing(lse):
    """Warnings are errors in tests: an lse that has overflowed gives NaN, and no more."""
    outs = np.ones((2, 1, 1, 1), np.float32)
    out, total = merge_states(outs, np.full((2, 1, 1), lse, np.float32))
    assert np.isnan(out).all() and not np.isfinite(total).any()
