"""Changes of the score by the user: values, derivatives, and gradients of the arrays they read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import cupyflash
from cupyflash import ScoreMod
from tests import cases
from tests.cases import Shape
from tests.harness import call, compare, draw, expected, require, same_bits
from tests.memory import to_engine, to_host
from tests.tolerance import assert_close

SHAPE = Shape()
ROWS, COLS = SHAPE.seqlen_q, SHAPE.seqlen_k


class Case(NamedTuple):
    """A ScoreMod without its arrays, and how to draw them."""

    forward: str
    backward: str | None
    numpy_forward: Any
    numpy_backward: Any
    draw: Any  # rng, dtype -> params

    def mod(self, rng: Any, dtype: Any) -> ScoreMod:
        callables = {"numpy_forward": self.numpy_forward, "numpy_backward": self.numpy_backward}
        return ScoreMod(self.forward, self.backward, self.draw(rng, dtype), **callables)


def _table(rng, dtype):
    return {"table": rng.normal(size=(SHAPE.heads, ROWS + COLS)).astype(dtype)}


def _distance(i, j):
    return j - i + ROWS - 1


CASES = {
    "table": Case(
        f"score + table[h * {ROWS + COLS} + j - i + {ROWS - 1}]",
        "1.0f",
        lambda score, b, h, i, j, table: score + table[h, _distance(i, j)],
        lambda score, b, h, i, j, table: (1.0, {"table": ((h, _distance(i, j)), 1.0)}),
        _table,
    ),
    "without backward": Case(
        f"tanh(score) * table[h * {ROWS + COLS} + j - i + {ROWS - 1}]",
        None,
        lambda score, b, h, i, j, table: np.tanh(score) * table[h, _distance(i, j)],
        lambda score, b, h, i, j, table: (
            (1 - np.tanh(score) ** 2) * table[h, _distance(i, j)],
            {"table": ((h, _distance(i, j)), np.tanh(score))},
        ),
        _table,
    ),
    "gain and shift": Case(
        "gain[h] * score + shift[b] * score * score",
        "gain[h] + 2 * shift[b] * score",
        lambda score, b, h, i, j, gain, shift: gain[h] * score + shift[b] * score * score,
        lambda score, b, h, i, j, gain, shift: (
            gain[h] + 2 * shift[b] * score,
            {"gain": ((h,), score), "shift": ((b,), score * score)},
        ),
        lambda rng, dtype: {
            "gain": rng.uniform(0.5, 1.5, SHAPE.heads).astype(dtype),
            "shift": rng.uniform(-0.1, 0.1, SHAPE.batch).astype(dtype),
        },
    ),
    "flags": Case(
        "flags[j] ? score : score * level[0]",
        None,
        lambda score, b, h, i, j, flags, level: np.where(flags[j], score, score * level[0]),
        lambda score, b, h, i, j, flags, level: (
            np.where(flags[j], 1.0, level[0]),
            {"level": ((0 * j,), np.where(flags[j], 0.0, score))},
        ),
        lambda rng, dtype: {
            "flags": rng.random(COLS) < 0.5,
            "level": rng.uniform(0.5, 1.5, 1).astype(dtype),
        },
    ),
    "documents": Case(
        f"ids[b * {COLS} + i] == ids[b * {COLS} + j] ? score : -INFINITY",
        "1.0f",
        lambda score, b, h, i, j, ids: np.where(ids[b, i] == ids[b, j], score, -np.inf),
        lambda score, b, h, i, j, ids: 1.0,
        lambda rng, dtype: {"ids": np.sort(rng.integers(0, 4, (SHAPE.batch, COLS)), axis=1)},
    ),
}


def dense(mod: ScoreMod, arguments: Any, dtype: Any = None) -> tuple[Any, Any, ScoreMod, Any]:
    """The dense result, gradients of the arrays, the mod of the reference, noise of gradients."""
    seen = []

    def forward(score, b, h, i, j):
        seen.append(score)
        return mod.numpy_forward(score, b, h, i, j, **mod.params)

    def backward(score, b, h, i, j):
        factor = mod.numpy_backward(score, b, h, i, j, **mod.params)
        return factor[0] if isinstance(factor, tuple) else factor

    judge = ScoreMod("score", numpy_forward=forward, numpy_backward=backward)
    result = expected(score_mod=judge, dtype=dtype, **arguments)
    indices = np.ix_(*map(np.arange, result.dscores.shape))
    by_params = mod.numpy_backward(seen[0], *indices, **mod.params)
    gradients, noise = {}, {}
    for name, (index, derivative) in (by_params[1] if isinstance(by_params, tuple) else {}).items():
        gradient = np.zeros(mod.params[name].shape, result.dscores.dtype)
        index = tuple(np.broadcast_to(axis, result.dscores.shape) for axis in index)
        np.add.at(gradient, index, result.dscores * derivative)
        gradients[name] = gradient
        if result.noise:
            noise[name] = sum_noise(result, gradient.shape, index, derivative)
    return result, gradients, judge, noise


def sum_noise(exact: Any, shape: Any, index: Any, derivative: Any) -> float:
    """How far rounding may carry the sums of dS * derivative at the places of an index."""
    squares = np.zeros(shape, exact.dscores.dtype)
    np.add.at(squares, index, (exact.noise["dscores"] * derivative) ** 2)
    return float(np.sqrt(squares.max(initial=0)))


def check(engine: str, mod: ScoreMod, arguments: Any, **options: Any) -> Any:
    """Every result against the dense formula, those of the arrays too."""
    result = call(engine, score_mod=mod, **arguments, **options)
    exact, gradients, judge, noise = dense(mod, arguments)
    narrow = max(arguments["q"].dtype, np.dtype("f4"), key=lambda dtype: dtype.itemsize)
    compare(result, exact, score_mod=judge, **arguments)
    near = dense(mod, arguments, arguments["q"].dtype)[1]
    assert sorted(result.dscore_params) == sorted(gradients)
    for name, gradient in gradients.items():
        got = result.dscore_params[name]
        assert got.dtype == narrow and got.shape == mod.params[name].shape
        assert_close(got, gradient, near[name], 3, name, noise[name])
    return result


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "features", [[], ["causal", "gqa"], ["mask", "bias"], ["softcap", "alibi", "dlse"], ["dropout"]]
)  # fmt: skip
def test_values_and_gradients(engine, rng, features, name, dtype):
    if name == "documents":
        require(engine, "score_mod")
        features = [feature for feature in features if feature != "mask"]
    array_dtype = "float32" if dtype == "float16" else dtype
    check(engine, CASES[name].mod(rng, array_dtype), draw(rng, SHAPE, dtype, features),
          deterministic=bool(rng.integers(2)))  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_arrays_of_any_float(engine, rng, dtype):
    mod = CASES["gain and shift"].mod(rng, cases.DTYPES[dtype])
    result = check(engine, mod, draw(rng, SHAPE, "float32"))
    assert result.dscore_params["gain"].dtype == np.float32


def test_arrays_of_any_strides(engine, rng):
    require(engine, "score_mod")
    arguments = draw(rng, SHAPE)
    mod = CASES["table"].mod(rng, "float32")
    (table,) = mod.params.values()
    spread = np.zeros((table.shape[1] * 2, table.shape[0] * 3), np.float32)
    view = spread.T[::3, ::-2]
    view[...] = table
    strided = ScoreMod(mod.forward, mod.backward, {"table": view}, numpy_forward=mod.numpy_forward,
                       numpy_backward=mod.numpy_backward)  # fmt: skip
    plain, other = (call(engine, score_mod=m, **arguments) for m in (mod, strided))
    assert same_bits(plain.out, other.out)
    assert same_bits(plain.dscore_params["table"], other.dscore_params["table"])


def test_the_same_element_read_twice(engine, rng):
    mod = ScoreMod(
        "score * table[h] * table[j % 4] + table[h]", None,
        {"table": rng.uniform(0.5, 1.5, 4).astype(np.float32)},
        numpy_forward=lambda score, b, h, i, j, table: (
            score * table[h] * table[j % 4] + table[h]
        ),
        numpy_backward=lambda score, b, h, i, j, table: table[h] * table[j % 4],
    )  # fmt: skip
    require(engine, "score_mod")
    arguments = draw(rng, SHAPE)
    result = call(engine, score_mod=mod, **arguments)
    if engine == "numpy":
        return  # one index a parameter is what its callables can say
    seen = []

    def forward(score, b, h, i, j):
        seen.append(score)
        return mod.numpy_forward(score, b, h, i, j, **mod.params)

    judge = ScoreMod("", numpy_forward=forward, numpy_backward=lambda score, b, h, i, j: (
        mod.numpy_backward(score, b, h, i, j, **mod.params)))  # fmt: skip
    exact = expected(score_mod=judge, **arguments)
    _, h, _, j = np.ix_(*map(np.arange, exact.dscores.shape))
    table, gradient = mod.params["table"].astype(np.float64), np.zeros(4)
    noise = 0.0
    for index, derivative in ((h, seen[0] * table[j % 4] + 1), (j % 4, seen[0] * table[h])):
        index = np.broadcast_to(index, exact.dscores.shape)
        np.add.at(gradient, index, exact.dscores * derivative)
        noise += sum_noise(exact, 4, index, derivative)
    assert_close(result.dscore_params["table"], gradient, gradient, name="table", noise=noise)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_deterministic_is_the_same_bits(engine, rng, dtype):
    require(engine, "score_mod")
    arguments = draw(rng, Shape(2, 200, 300, 4, 4, 32, 32), dtype)
    mod = ScoreMod(
        "score * gain[h] + table[(i + j) % 7]", "gain[h]",
        {"gain": np.ones(4, np.float32), "table": np.zeros(7, np.float32)},
        numpy_forward=lambda score, b, h, i, j, gain, table: score * gain[h] + table[(i + j) % 7],
        numpy_backward=lambda score, b, h, i, j, gain, table: (
            gain[h], {"gain": ((h,), score), "table": (((i + j) % 7,), 1.0)}
        ),
    )  # fmt: skip
    first, *others = (
        call(engine, score_mod=mod, deterministic=True, **arguments).dscore_params for _ in range(3)
    )
    loose = call(engine, score_mod=mod, deterministic=False, **arguments).dscore_params
    for name, gradient in first.items():
        assert all(same_bits(gradient, other[name]) for other in others)
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(loose[name], gradient, rtol=0, atol=2e-2 * scale)


def test_hidden_keys_are_not_looked_at(engine, rng):
    require(engine, "score_mod", "gqa", "dlse")
    arguments = draw(rng, SHAPE, features=["gqa", "dlse"])
    even = ScoreMod(
        "j % 2 == 0 ? score * gain[h] : -INFINITY", "j % 2 == 0 ? gain[h] : NAN[0]",
        {"gain": np.ones(4, np.float32), "NAN": np.full(1, np.nan, np.float32)},
        numpy_forward=lambda score, b, h, i, j, gain, NAN: np.where(
            j % 2 == 0, score * gain[h], -np.inf
        ),
        numpy_backward=lambda score, b, h, i, j, gain, NAN: (
            np.where(j % 2 == 0, gain[h], np.nan), {"gain": ((h,), score)}
        ),
    )  # fmt: skip
    results = []
    for value in (0.0, np.nan):
        poisoned = {name: arguments[name].copy() for name in ("k", "v")}
        for array in poisoned.values():
            array[:, 1::2] = value
        results.append(call(engine, score_mod=even, **arguments | poisoned))
    for name in ("out", "row_max", "row_sum", "dq", "dk", "dv"):
        assert same_bits(getattr(results[0], name), getattr(results[1], name)), name
        assert np.isfinite(getattr(results[1], name)).all(), name
    gains = [result.dscore_params["gain"] for result in results]
    assert same_bits(*gains) and np.isfinite(gains[0]).all()
    if engine != "numpy":
        assert not results[0].dscore_params["NAN"].any()


def test_varlen_counts_inside_the_entry(engine, rng):
    mod = CASES["table"].mod(rng, "float32")
    require(engine, "score_mod", "varlen")
    arguments = draw(rng, SHAPE, features=["varlen"])
    result = call(engine, score_mod=mod, **arguments)
    judge = dense(mod, draw(rng, SHAPE))[2]
    compare(result, expected(score_mod=judge, **arguments), score_mod=judge, **arguments)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_index_outside_reads_the_nearest_element(engine, rng, deterministic):
    require(engine, "score_mod")
    if engine == "numpy":
        pytest.skip("NumPy raises IndexError")
    arguments = draw(rng, SHAPE)
    inside, outside = (
        ScoreMod(f"score + table[{index}]", "1", {"table": np.array([0.5, 1, 2], np.float32)})
        for index in ("min(max(j - 9, 0), 2)", "(j - 9) * (j < 5 || j > 20 ? 9999LL * 9999 : 1)")
    )
    right, clamped = (
        call(engine, score_mod=mod, deterministic=deterministic, **arguments)
        for mod in (inside, outside)
    )
    assert same_bits(right.out, clamped.out)
    np.testing.assert_allclose(
        clamped.dscore_params["table"], right.dscore_params["table"], rtol=1e-4, atol=1e-4
    )
    empty = ScoreMod("score + table[j]", "1", {"table": np.zeros(0, np.float32)})
    assert call(engine, score_mod=empty, **arguments).dscore_params["table"].shape == (0,)


@pytest.mark.parametrize(
    ("forward", "complaint"),
    [("scor * 2", "scor"), ("score; 2", "';'"), ("score *", "score_mod.forward")],
)
def test_a_bad_expression_writes_nothing(engine, rng, forward, complaint):
    require(engine, "score_mod")
    if engine == "numpy":
        pytest.skip("NumPy calls the callables instead")
    q, k, v = (to_engine(engine, draw(rng, SHAPE, "float16")[name]) for name in "qkv")
    out = q[..., : v.shape[-1]].copy()
    before = to_host(out)
    with pytest.raises((cupyflash.CompileError, ValueError), match=complaint):
        cupyflash.flash_attention(q, k, v, score_mod=ScoreMod(forward), engine=engine, out=out)
    assert same_bits(to_host(out), before)


def test_debug_compares_the_derivative(engine, rng, monkeypatch):
    require(engine, "score_mod")
    if engine == "numpy":
        pytest.skip("there is nothing to compile")
    monkeypatch.setenv("CUPYFLASH_DEBUG", "1")
    q, k, v = (to_engine(engine, draw(rng, SHAPE, "float16")[name]) for name in "qkv")
    arrays = {"table": to_engine(engine, rng.normal(size=COLS).astype(np.float32))}

    def attention(forward: str, backward: str) -> Any:
        mod = ScoreMod(forward, backward, arrays)
        return cupyflash.flash_attention(q, k, v, score_mod=mod, engine=engine)

    attention("score * score * table[j]", "2 * score * table[j]")
    attention("j > i ? -INFINITY : fabsf(score)", "score < 0 ? -1.0f : 1.0f")
    with pytest.raises(ValueError, match=r"score_mod\.backward is not the derivative"):
        attention("score * score * table[j]", "score * table[j]")
