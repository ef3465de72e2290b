"""The ready ScoreMods against the dense formula, and T5's buckets against whole numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cupyflash import ScoreMod, flash_attention_forward, score_mods
from tests.cases import Shape
from tests.harness import call, compare, draw, expected, require
from tests.memory import to_engine, to_host
from tests.tolerance import assert_close

SHAPE = Shape(seqlen_q=45, seqlen_k=45)


def judge_of(forward, factor=lambda score, b, h, i, j: 1.0):
    return ScoreMod("", numpy_forward=forward, numpy_backward=factor)


def check(engine, mod, judge, rng, dtype):
    arguments = draw(rng, SHAPE, dtype, ["gqa"])
    result = call(engine, score_mod=mod, **arguments)
    exact = expected(score_mod=judge, **arguments)
    compare(result, exact, score_mod=judge, **arguments)
    return result, exact


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_soft_cap(engine, rng, dtype):
    require(engine, "softcap")
    arguments = draw(rng, SHAPE, dtype)
    capped = call(engine, score_mod=score_mods.soft_cap(0.7), **arguments)
    option = call(engine, softcap=0.7, **arguments)
    places = 12 if dtype == "float64" else 5 if dtype == "float32" else 2
    for name in ("out", "row_max", "row_sum", "dq", "dk", "dv"):
        np.testing.assert_allclose(
            getattr(capped, name), getattr(option, name), atol=10.0**-places, rtol=10.0**-places
        )


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_distance_decay(engine, rng, dtype):
    rates = rng.uniform(0, 0.5, SHAPE.heads).astype("f8" if dtype == "float64" else "f4")
    judge = judge_of(lambda score, b, h, i, j: score - rates[h] * abs(i + 3 - j))
    mod = score_mods.distance_decay(rates, offset=3)
    result, exact = check(engine, mod, judge, rng, dtype)
    i, j = np.ogrid[: SHAPE.seqlen_q, : SHAPE.seqlen_k]
    gradient = -(exact.dscores * abs(i + 3 - j)).sum(axis=(0, 2, 3))
    noise = np.sqrt(((exact.noise["dscores"] * (i + 3 - j)) ** 2).sum(axis=(0, 2, 3)).max())
    assert_close(result.dscore_params["rates"], gradient, gradient, name="rates", noise=noise)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_documents(engine, rng, dtype):
    ids = np.sort(rng.integers(0, 3, (SHAPE.batch, SHAPE.seqlen_q)).astype(np.int32), axis=1)
    judge = judge_of(
        lambda score, b, h, i, j: np.where(ids[b, i] == ids[b, j], score, -np.inf),
    )
    check(engine, score_mods.documents(ids), judge, rng, dtype)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_relative_position_bias(engine, rng, dtype, bidirectional):
    require(engine, "score_mod")
    table = rng.normal(size=(16, SHAPE.heads)).astype("f8" if dtype == "float64" else "f4")
    options = {"bidirectional": bidirectional, "max_distance": 20, "offset": 2}
    mod = score_mods.relative_position_bias(to_engine(engine, table), **options)
    buckets = to_host(mod.params["buckets"])

    def bucket(i, j):
        return buckets[np.clip(j - i - 2, -20, 20) + 20]

    judge = judge_of(lambda score, b, h, i, j: score + table[bucket(i, j), h])
    mod = score_mods.relative_position_bias(table, **options)
    result, exact = check(engine, mod, judge, rng, dtype)
    i, j = np.ogrid[: SHAPE.seqlen_q, : SHAPE.seqlen_k]
    gradient, squares = np.zeros((2, 16, SHAPE.heads))
    for h in range(SHAPE.heads):
        for sums, terms in ((gradient, exact.dscores), (squares, exact.noise["dscores"] ** 2)):
            np.add.at(sums[:, h], bucket(i, j), terms[:, h].sum(axis=0).astype(np.float64))
    noise = np.sqrt(squares.max())
    assert_close(result.dscore_params["table"], gradient, gradient, name="table", noise=noise)


@pytest.mark.parametrize(
    ("buckets", "bidirectional", "longest"), [(32, True, 128), (32, False, 128), (16, True, 64)]
)
def test_buckets(buckets, bidirectional, longest):
    """A long distance n is in bucket k if (n / exact)**(half - exact) >= (longest / exact)**k."""
    mod = score_mods.relative_position_bias(
        np.zeros((buckets, 1), "f4"), bidirectional=bidirectional, max_distance=longest
    )
    half = buckets // 2 if bidirectional else buckets
    exact = half // 2
    for ahead in range(-longest, longest + 1):
        distance = abs(ahead) if bidirectional else max(-ahead, 0)
        bucket = distance
        if distance >= exact:
            bucket = exact
            while bucket < half - 1 and distance ** (half - exact) * exact ** (
                bucket + 1 - exact
            ) >= exact ** (half - exact) * longest ** (bucket + 1 - exact):
                bucket += 1
        bucket += half if bidirectional and ahead > 0 else 0
        assert mod.params["buckets"][ahead + longest] == bucket, ahead


def test_arguments_that_do_not_fit_are_named() -> None:
    rates, table = np.ones(4, np.float32), np.ones((8, 4), np.float32)
    ids = np.zeros((2, 9), np.int32)
    decay, bias = score_mods.distance_decay, score_mods.relative_position_bias
    wrong: list[tuple[type[Exception], str, Callable[[], ScoreMod]]] = [
        *[
            (ValueError, "cap", lambda cap=cap: score_mods.soft_cap(cap))
            for cap in (0.0, -1.0, np.nan, np.inf, 1e-40, 1e36, 10**400)
        ],
        *[
            (TypeError, "cap", lambda cap=cap: score_mods.soft_cap(cap))
            for cap in ("1", None, True, 1j, np.ones(1))
        ],
        (TypeError, "rates must be an array", lambda: decay([0.5])),
        (TypeError, "rates must hold floats", lambda: decay(rates.astype(int))),
        (TypeError, "rates must hold floats", lambda: decay(rates.astype(complex))),
        (ValueError, r"rates must have the axes \(h\)", lambda: decay(rates[None])),
        (ValueError, "rates", lambda: decay(rates[:0])),
        (TypeError, "offset", lambda: decay(rates, offset=0.5)),
        (TypeError, "offset", lambda: decay(rates, offset="1) + (0")),
        (TypeError, "offset", lambda: decay(rates, offset=True)),
        (ValueError, "offset", lambda: decay(rates, offset=2**31)),
        (TypeError, "query_ids must be an array", lambda: score_mods.documents([[1]])),
        (TypeError, "query_ids must hold integers", lambda: score_mods.documents(table)),
        (TypeError, "query_ids must hold integers", lambda: score_mods.documents(ids == 0)),
        (ValueError, "query_ids must have the axes", lambda: score_mods.documents(ids[0])),
        (ValueError, "key_ids must have the axes", lambda: score_mods.documents(ids, ids[0])),
        (ValueError, "key_ids.* batch, 2", lambda: score_mods.documents(ids, ids[:1])),
        (TypeError, "both be signed", lambda: score_mods.documents(ids, ids.astype("u4"))),
        (TypeError, "table must be an array", lambda: bias(None)),
        (TypeError, "table must hold floats", lambda: bias(ids)),
        (ValueError, "table must have the axes", lambda: bias(rates)),
        (ValueError, "table must have the axes", lambda: bias(table[:, :0])),
        (ValueError, "table must have 4 buckets", lambda: bias(table[:3])),
        (TypeError, "bidirectional", lambda: bias(table, bidirectional="no")),
        (TypeError, "max_distance", lambda: bias(table, max_distance=8.0)),
        (ValueError, "max_distance must be above 2", lambda: bias(table, max_distance=2)),
        (ValueError, "max_distance", lambda: bias(table, max_distance=2**31)),
        (ValueError, "offset", lambda: bias(table, offset=-(2**31))),
    ]
    for error, message, make in wrong:
        with pytest.raises(error, match=message):
            make()


def test_the_outermost_arguments_are_taken(rng: np.random.Generator) -> None:
    q = rng.normal(size=(1, 5, 2, 8)).astype(np.float32)
    for dtype in (np.float32, np.float64):
        x = q.astype(dtype)
        for cap, limit in ((2.0**-126, 2.0**-126), (2.0**104, np.inf)):
            out, saved = flash_attention_forward(x, x, x, score_mod=score_mods.soft_cap(cap))
            assert np.isfinite(out).all() and (abs(saved.row_max) <= limit).all()
    empty = np.zeros((0, 3), np.int64)
    score_mods.documents(empty, np.zeros((0, 0), np.int32))
    score_mods.relative_position_bias(np.ones((8, 1)), max_distance=np.int64(3), offset=2**30)
