"""What the callables of a ScoreMod are given, and the gradients of its parameters."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from cupyflash import ScoreMod, Tiling
from tests.cases import Shape
from tests.harness import call, draw, expected
from tests.tolerance import assert_result

SHAPE = Shape(seqlen_q=19, seqlen_k=26, heads=4, head_dim=8, head_dim_v=8)


def forward(score, b, h, i, j, table, gain, offset):
    return score * gain[h] + table[b, np.abs(i - j) + offset]


def backward(score, b, h, i, j, table, gain, offset):
    by_table = (b, np.abs(i - j) + offset), 1.0
    return gain[h], {"table": by_table, "gain": ((h,), score), "offset": ((0,), 0.0)}


@pytest.mark.parametrize("tiling", [None, Tiling(7, 5)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("features", [[], ["causal"], ["mask", "bias"], ["softcap", "dropout"]])
def test_parameter_gradients(rng, features, dtype, tiling):
    params = {
        "table": rng.normal(size=(SHAPE.batch, 40)).astype(dtype),
        "gain": rng.uniform(0.5, 1.5, SHAPE.heads).astype(dtype),
        "offset": np.array([3]),
    }
    mod = ScoreMod("", "", params, numpy_forward=forward, numpy_backward=backward)
    arguments = draw(rng, SHAPE, dtype, [*features, "gqa", "dlse"])
    got = call("numpy", tiling=tiling, score_mod=mod, **arguments)
    assert sorted(got.dscore_params) == ["gain", "table"]

    # d loss / d gain = sum of d loss / d score times the score before the change
    seen = []

    def dense_forward(score, b, h, i, j):
        seen.append(score)
        return score * params["gain"][h] + params["table"][b, np.abs(i - j) + 3]

    dense_mod = ScoreMod(
        "", "", numpy_forward=dense_forward,
        numpy_backward=lambda score, b, h, i, j: params["gain"][h],
    )  # fmt: skip
    exact = expected(score_mod=dense_mod, **arguments)
    rows, cols = np.ogrid[: SHAPE.seqlen_q, : SHAPE.seqlen_k]
    table = np.zeros(params["table"].shape, exact.dscores.dtype)
    for entry in range(SHAPE.batch):
        np.add.at(table[entry], np.abs(rows - cols) + 3, exact.dscores[entry].sum(axis=0))
    gain = (exact.dscores * seen[0]).sum(axis=(0, 2, 3))
    tolerance = {"float32": 1e-5, "float64": 1e-13}[dtype] * exact.dscores.size**0.5
    np.testing.assert_allclose(got.dscore_params["table"], table, rtol=0, atol=tolerance)
    np.testing.assert_allclose(got.dscore_params["gain"], gain, rtol=0, atol=tolerance)
    assert got.dscore_params["gain"].dtype == dtype
    naive = expected(dtype=dtype, score_mod=dense_mod, **arguments)
    assert_result("dq", got.dq, exact, naive)


def test_callables_see_indices_inside_the_sequence(rng):
    calls = []

    def record(score, b, h, i, j):
        calls.append((score.shape, b, h, i.copy(), j.copy()))
        return score

    mod = ScoreMod("", numpy_forward=record)
    cu = np.array([0, 5, 9], np.int32), np.array([0, 3, 10], np.int32)
    q, k, v = (rng.normal(size=(n, 2, 4)).astype("f") for n in (9, 10, 10))
    call("numpy", q=q, k=k, v=v, cu_seqlens=cu, score_mod=mod, tiling=Tiling(4, 4))
    assert {entry for _, entry, *_ in calls} == {0, 1}
    for shape, entry, head, i, j in calls:
        assert head in (0, 1)
        assert shape == (len(i), j.shape[1])
        assert i.max() < (5, 4)[entry]
        assert j.max() < (3, 7)[entry]


def test_minus_infinity_hides(rng):
    arguments = draw(rng, SHAPE)
    even = np.arange(SHAPE.seqlen_k) % 2 == 0
    mod = ScoreMod(
        "", "",
        numpy_forward=lambda score, b, h, i, j: np.where(j % 2 == 0, score, -np.inf),
        numpy_backward=lambda score, b, h, i, j: np.where(j % 2 == 0, 1.0, np.nan),
    )  # fmt: skip
    got = call("numpy", score_mod=mod, tiling=Tiling(7, 5), **arguments)
    masked = call("numpy", mask=even, tiling=Tiling(7, 5), **arguments)
    for name in ("out", "row_max", "row_sum", "dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, name), getattr(masked, name), err_msg=name)


def test_callables_may_write_to_the_scores(rng):
    def destructive(score, b, h, i, j):
        score *= 0.5
        return score

    mods = [
        ScoreMod("", "", numpy_forward=f, numpy_backward=lambda score, b, h, i, j: 0.5 + 0 * score)
        for f in (destructive, lambda score, b, h, i, j: score * 0.5)
    ]
    arguments = draw(rng, SHAPE)
    results = [call("numpy", score_mod=mod, **arguments) for mod in mods]
    np.testing.assert_array_equal(results[0].dq, results[1].dq)


def _attend(forward, backward=None, **params):
    q = np.linspace(-1, 1, 160, dtype=np.float32).reshape(1, 20, 2, 4)
    mod = ScoreMod("score", params=params, numpy_forward=forward, numpy_backward=backward)
    out, saved = cupyflash.flash_attention_forward(q, q, q, score_mod=mod, tiling=Tiling(7, 6))
    return cupyflash.flash_attention_backward(out, saved).dscore_params


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (None, TypeError),
        ("x", TypeError),
        (1j, TypeError),
        ([1.0, {}], TypeError),
        (np.ones((2, 3)), ValueError),
        (np.ones((1, 1, 1)), ValueError),
    ],
    ids=str,
)
def test_callables_that_return_something_else_are_named(returned, error):
    with pytest.raises(error, match=r"score_mod\.numpy_forward must return"):
        _attend(lambda score, b, h, i, j: returned)
    with pytest.raises(error, match=r"score_mod\.numpy_backward must return"):
        _attend(lambda score, b, h, i, j: score, lambda score, b, h, i, j: returned)


@pytest.mark.parametrize(
    ("derivatives", "error"),
    [
        (({}, 1), TypeError),
        ((3,), TypeError),
        (({"w": 3},), TypeError),
        (({"w": ((0,), None)},), TypeError),
        (({"w": ((0,), np.ones((2, 3)))},), ValueError),
        (({"w": ((0, 0), 1.0)},), ValueError),
    ],
    ids=str,
)
def test_derivatives_of_another_form_are_named(derivatives, error):
    with pytest.raises(error, match=r"score_mod\.numpy_backward"):
        _attend(
            lambda score, b, h, i, j, w: score,
            lambda score, b, h, i, j, w: (1.0, *derivatives),
            w=np.ones(3, np.float32),
        )


def test_a_parameter_without_axes_has_a_gradient(rng):
    def gradient(w, index):
        return _attend(
            lambda score, b, h, i, j, w: score + w[index] * (i - j),
            lambda score, b, h, i, j, w: (1.0, {"w": (index, i - j)}),
            w=w,
        )["w"]

    alone, in_a_row = gradient(np.array(0.1), ()), gradient(np.array([0.1]), (0,))
    assert alone.shape == () and alone != 0
    np.testing.assert_allclose(alone, in_a_row[0], rtol=1e-4)
