"""Numbers at the ends of their ranges, and gradients against central differences."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import Tiling
from cupyflash._numpy.online_softmax import OnlineSoftmax, probabilities
from tests.cases import DTYPES, Shape
from tests.harness import call, check, draw

TILING = Tiling(7, 5)


def test_a_hidden_first_tile_leaves_the_maximum_alone():
    softmax = OnlineSoftmax(2, "float32", None)
    first = np.full((2, 3), -np.inf, np.float32)
    assert not softmax.update(first).any()
    assert not first.any()
    assert (softmax.row_max == -np.inf).all()
    scores = np.array([[-1e30, -1e30, -np.inf], [-np.inf] * 3], np.float32)
    softmax.update(scores)
    np.testing.assert_array_equal(scores, [[1, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(softmax.row_max[:, 0], np.float32([-1e30, -np.inf]))
    np.testing.assert_array_equal(softmax.normaliser()[:, 0], [0.5, 0])


def test_probabilities_of_rows_without_keys_are_zero():
    scores = np.full((2, 3), -np.inf, np.float32)
    scores[0, 1] = -1e30
    probabilities(scores, np.float32([[-1e30], [-np.inf]]), np.float32([[1], [0]]))
    np.testing.assert_array_equal(scores, [[0, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [-1e30, 1e30, -6e4])
def test_huge_finite_bias_is_an_ordinary_number(rng, dtype, value):
    arguments = draw(rng, Shape(seqlen_q=12, seqlen_k=17), dtype)
    bias = rng.choice([0.0, value], size=(12, 17)).astype(np.float32)
    bias[:4] = value
    if dtype == "float16":
        bias = bias.clip(-6e4, 6e4)  # beyond, the yardstick itself overflows
    check("numpy", tiling=TILING, bias=bias, **arguments)


def test_bias_beyond_the_accumulator_stays_finite(rng):
    arguments = draw(rng, Shape(seqlen_q=6, seqlen_k=9))
    got = call("numpy", tiling=TILING, bias=np.full((6, 9), -1e300), **arguments)
    mean = arguments["v"].mean(axis=1, keepdims=True).repeat(6, axis=1)
    np.testing.assert_allclose(got.out, mean, atol=1e-6)


def test_extreme_scores_neither_fail_nor_warn(rng):
    for dtype in DTYPES.values():
        largest = np.float32(6e4 if dtype == np.float16 else 1e38)
        arguments = draw(rng, Shape(seqlen_q=9, seqlen_k=11), dtype.name, ["dlse"])
        for name in ("q", "k", "v", "dout"):
            arguments[name] = (np.sign(arguments[name].astype("f")) * largest).astype(dtype)
        call("numpy", tiling=TILING, **arguments)


def test_a_loss_on_lse_alone_leaves_values_alone(rng):
    arguments = draw(rng, Shape(), features=["dlse", "dropout"])
    arguments["dout"] = np.zeros_like(arguments["dout"])
    got = call("numpy", tiling=TILING, **arguments)
    assert not got.dv.any()
    assert got.dk.any()


@pytest.mark.parametrize("features", [["softcap", "alibi"], ["bias", "sinks"], ["score_mod"]])
def test_central_differences(rng, features):
    shape = Shape(batch=1, seqlen_q=5, seqlen_k=6, heads=2, head_dim=3, head_dim_v=2)
    arguments = draw(rng, shape, "float64", [*features, "dlse", "causal"])
    dout, dlse = arguments.pop("dout"), arguments.pop("dlse")
    got = call("numpy", tiling=TILING, dout=dout, dlse=dlse, **arguments)

    def loss(**changed):
        result = call("numpy", tiling=TILING, **(arguments | changed))
        return float((result.out * dout).sum() + (result.lse * dlse).sum())

    for name in ("q", "k", "v", "bias"):
        gradient = getattr(got, f"d{name}")
        if gradient is None:
            continue
        direction = rng.normal(size=gradient.shape)
        x, step = arguments[name], 1e-3 if name == "bias" else 1e-5
        up, down = ((x + sign * step * direction).astype(x.dtype) for sign in (1, -1))
        # The step that is left of it after rounding: bias is float32.
        exact = float((gradient * (up.astype(np.float64) - down)).sum())
        difference = loss(**{name: up}) - loss(**{name: down})
        assert exact == pytest.approx(difference, rel=1e-4, abs=2e-4 * step), name
