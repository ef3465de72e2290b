"""FP8 inputs (e4m3 with descales) against the dense reference of what their numbers stand for."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyflash
from tests import cases
from tests.cases import FLOAT8, Shape
from tests.harness import call, compare, draw, expected, require_float8, same_bits
from tests.memory import to_engine, to_host

DESCALES = {"q": "q_descale", "k": "k_descale", "v": "v_descale"}
FEATURES = [feature for feature in cases.FEATURES if feature != "dlse"]  # no backward


def draw_float8(rng, shape, features=(), layout="bshd"):
    """Arguments of `call` with FP8 inputs, and the same in float32, exactly what they stand for."""
    real = draw(rng, shape, "float32", features, layout)
    real.pop("dout")
    heads_kv = real["k"].shape[-3 if layout == "bhsd" else -2]
    float8 = dict(real, out_dtype=np.float32)
    for name, factor_name in DESCALES.items():
        kind = rng.choice(["none", "number", "shared", "own", "strided"])
        rows = 1 if kind == "shared" else shape.batch
        # Of few bits, so that their products with e4m3 numbers are float32 numbers.
        factors = rng.uniform(0.5, 2, (rows, 2 * heads_kv)).astype(np.float16).astype(np.float32)
        factors = factors[:, ::2] if kind == "strided" else factors[:, :heads_kv].copy()
        if kind == "number":
            factors[...] = factors.flat[0] if factors.size else 1
        numbers = real[name].astype(FLOAT8)
        float8[name] = numbers
        values = np.ones_like(factors) if kind == "none" else factors
        real[name] = scaled(numbers, values, real.get("cu_seqlens"), layout, of_keys=name != "q")
        if kind != "none":
            number = float(factors.flat[0]) if factors.size else 1.0
            float8[factor_name] = number if kind == "number" else factors
    return float8, real


def scaled(numbers, factors, cu_seqlens, layout, *, of_keys):
    """e4m3 `numbers` times the factors of their heads, float32."""
    x = numbers.astype(np.float32)
    x = x.swapaxes(-3, -2) if layout == "bhsd" else x
    group = x.shape[-2] // factors.shape[1]
    factors = np.repeat(factors, group, axis=1)
    if cu_seqlens is not None:
        ends = cu_seqlens[1 if of_keys else 0]
        spread = np.broadcast_to(factors, (len(ends) - 1, factors.shape[1]))
        x = x * np.repeat(spread, np.diff(ends), axis=0)[..., None]
    else:
        x = x * factors[:, None, :, None]
    return np.ascontiguousarray(x.swapaxes(-3, -2)) if layout == "bhsd" else x


def check(engine, rng, shape, features=(), layout="bshd"):
    require_float8(engine)
    float8, real = draw_float8(rng, shape, features, layout)
    result = call(engine, **float8)
    compare(result, expected(**real), **real)


@pytest.mark.parametrize("feature", ["plain", *FEATURES])
def test_float8_feature_alone(engine, rng, feature):
    check(engine, rng, Shape(), [] if feature == "plain" else [feature])


@given(data=st.data())
def test_float8_any_combination(engine, data):
    require_float8(engine)
    features = data.draw(st.sets(st.sampled_from(FEATURES), max_size=4))
    for one, other in cases.EXCLUSIVE:
        if one in features:
            features.discard(other)
    sizes = st.integers(0, 70)
    shape = Shape(
        batch=data.draw(st.integers(1 if "varlen" in features else 0, 3)),
        seqlen_q=data.draw(sizes),
        seqlen_k=data.draw(sizes),
        head_dim=data.draw(st.sampled_from([1, 16, 33, 100])),
        head_dim_v=data.draw(st.sampled_from([1, 16, 33, 100])),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    check(engine, rng, shape, sorted(features), data.draw(st.sampled_from(["bshd", "bhsd"])))


def every_number():
    """q and k of zeros, and v of all numbers of e4m3; 0 in place of NaN."""
    codes = np.arange(256, dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    codes = codes.view(FLOAT8).reshape(1, 256, 1, 1)
    q = np.zeros((1, 256, 1, 8), FLOAT8)
    return q, q, np.repeat(codes, 3, axis=3)


def test_every_number_is_read_exactly(engine):
    require_float8(engine)
    q, k, v = every_number()
    result = call(engine, q, k, v, window=(0, 0), v_descale=0.5, out_dtype="float32")
    right = v.astype(np.float32) * np.float32(0.5)
    np.testing.assert_array_equal(result.out, right)
    for code in (0x7F, 0xFF):
        nan = np.full((1, 1, 1, 1), code, np.uint8).view(FLOAT8)
        assert np.isnan(call(engine, nan, nan, nan, out_dtype="float32").out)


@pytest.mark.parametrize("operand", ["q", "k"])
def test_every_number_makes_its_score(engine, operand):
    require_float8(engine)
    _, one, numbers = every_number()
    one = np.ones_like(one[..., :3])
    numbers[..., 1:] = 0
    q, k = (numbers, one) if operand == "q" else (one, numbers)
    result = call(engine, q, k, numbers, window=(0, 0), softmax_scale=0.25, q_descale=2.0)
    np.testing.assert_array_equal(result.row_max[0, 0], numbers[0, :, 0, 0].astype(np.float32) / 2)
    np.testing.assert_array_equal(result.row_sum, 1)


@pytest.mark.parametrize("dtype", [None, ml_dtypes.bfloat16, "float16"])
def test_out_dtype(engine, rng, dtype):
    require_float8(engine)
    float8, _ = draw_float8(rng, Shape(), ["causal"])
    result, wide = (call(engine, **dict(float8, out_dtype=x)) for x in (dtype, "float32"))
    assert same_bits(result.out, wide.out.astype(dtype or ml_dtypes.bfloat16))


def test_strides_of_single_bytes(engine, rng):
    """Rows that start anywhere, reversed rows, and gaps that hold NaN."""
    require_float8(engine)
    float8, real = draw_float8(rng, Shape(), ["gqa"])
    for name in DESCALES:
        x = float8[name]
        wide = np.full((*x.shape[:2], x.shape[2] + 1, x.shape[3] + 5), np.nan, FLOAT8)
        view = wide[:, ::-1, :-1, 2:-3]
        view[...] = x
        float8[name] = view
    compare(call(engine, **float8), expected(**real), **real)


def test_factors_that_leave_float32_give_no_nan(engine):
    require_float8(engine)
    q = np.zeros((1, 5, 1, 8), FLOAT8)
    v = np.ones((1, 5, 1, 4), FLOAT8)
    factors = np.full((1, 1), 3e38, np.float32)
    for factor in (factors, 3e38):
        result = call(engine, q, q, v, q_descale=factor, k_descale=factor, causal=True)
        np.testing.assert_array_equal(result.out.astype(np.float32), 1)


def test_tokens_in_place_of_padding_may_hold_anything(engine, rng):
    """NaN in keys and values that no query sees; rows past the last entry are 0."""
    require_float8(engine)
    float8, real = draw_float8(rng, Shape(), ["varlen"])
    ends_q, ends_k = float8["cu_seqlens"]
    for name, end in (("q", ends_q[-1]), ("k", ends_k[-1]), ("v", ends_k[-1])):
        x = float8[name]
        longer = np.full((len(x) + 7, *x.shape[1:]), np.nan, FLOAT8)
        longer[:end] = x
        float8[name] = longer
    result = call(engine, **float8)
    end = int(ends_q[-1])
    assert not result.out[end:].astype(np.float32).any()
    right = call(engine, **{**float8, "q": float8["q"][:end]})
    assert same_bits(result.out[:end], right.out)
    exact = expected(**real)
    np.testing.assert_allclose(right.out, exact.out, atol=1e-5 * np.abs(exact.out).max())


def test_no_backward(engine, rng):
    require_float8(engine)
    float8, _ = draw_float8(rng, Shape())
    float8 = {name: to_engine(engine, x) for name, x in float8.items()}
    arrays = [float8.pop(name) for name in "qkv"]
    out, saved = cupyflash.flash_attention_forward(*arrays, engine=engine, **float8)
    assert to_host(saved.lse).shape == (2, 4, 37)
    with pytest.raises(cupyflash.UnsupportedError, match="FP8 calls have no backward"):
        cupyflash.flash_attention_backward(out, saved)


def test_out_argument_and_output_only_calls(engine, rng):
    require_float8(engine)
    float8, _ = draw_float8(rng, Shape())
    right = call(engine, **float8).out
    placed = {name: to_engine(engine, x) for name, x in float8.items()}
    arrays = [placed.pop(name) for name in "qkv"]
    out = to_engine(engine, np.full(right.shape, np.nan, np.float32))
    for _ in range(2):  # the second call might find a recipe
        assert cupyflash.flash_attention(*arrays, engine=engine, out=out, **placed) is out
        assert same_bits(to_host(out), right)
        fresh = cupyflash.flash_attention(*arrays, engine=engine, **placed)
        assert same_bits(to_host(fresh), right)
    for name in ("q_descale", "v_descale"):  # factors are looked at in every call
        changed = dict(placed, **{name: 3.0})
        real_changed = dict(float8, **{name: 3.0})
        got = cupyflash.flash_attention(*arrays, engine=engine, **changed)
        assert same_bits(to_host(got), call(engine, **real_changed).out)
    factors = [to_engine(engine, np.full((2, 4), 2.0**n, np.float32)) for n in range(3)]
    for factor in (*factors, *factors):
        got = cupyflash.flash_attention(*arrays, engine=engine, **placed | {"v_descale": factor})
        real_changed = float8 | {"v_descale": to_host(factor)}
        assert same_bits(to_host(got), call(engine, **real_changed).out)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q_descale": np.ones((3, 4), np.float32)}, ValueError, r"q_descale .*\(2, 4\)"),
        ({"k_descale": np.ones(4, np.float32)}, ValueError, r"k_descale .*\(2, 4\)"),
        ({"v_descale": np.ones((2, 4))}, TypeError, "v_descale must have dtype float32"),
        ({"v_descale": "1"}, TypeError, "v_descale must be an array"),
        ({"v_descale": True}, TypeError, "v_descale must be a number"),
        ({"q_descale": 0.0}, ValueError, "q_descale must be finite and > 0"),
        ({"k_descale": -1}, ValueError, "k_descale must be finite and > 0"),
        ({"v_descale": np.inf}, ValueError, "v_descale must be finite"),
        (
            {"v_descale": np.full((2, 4), -1, np.float32)},
            ValueError,
            "v_descale must be finite",
        ),
        ({"out_dtype": "float64"}, cupyflash.UnsupportedError, "out_dtype .* bfloat16"),
        ({"out_dtype": "no dtype"}, TypeError, "out_dtype must be a dtype"),
        ({"out": np.zeros((2, 37, 4, 24), np.float32)}, TypeError, "out must have dtype bfloat16"),
    ],
)
def test_float8_errors(rng, change, error, message):
    q, k, v = (draw_float8(rng, Shape())[0][name] for name in "qkv")
    with pytest.raises(error, match=message):
        cupyflash.flash_attention(q, k, v, **change)


def test_errors_of_dtypes(rng):
    x = rng.normal(size=(1, 3, 2, 8)).astype(np.float32)
    e4m3 = x.astype(FLOAT8)
    attend = cupyflash.flash_attention
    with pytest.raises(ValueError, match=r"q_descale goes with .* float8_e4m3fn"):
        attend(x, x, x, q_descale=1.0)
    with pytest.raises(cupyflash.UnsupportedError, match=r"out_dtype .* float32"):
        attend(x, x, x, out_dtype="float16")
    assert attend(x, x, x, out_dtype=np.float32).dtype == np.float32
    with pytest.raises(TypeError, match="one dtype"):
        attend(x, e4m3, e4m3)
    with pytest.raises(TypeError, match=r"view\(ml_dtypes.float8_e4m3fn\)"):
        attend(e4m3.view(np.uint8), e4m3.view(np.uint8), e4m3.view(np.uint8))
    with pytest.raises(cupyflash.UnsupportedError, match=r"e5m2.*supported: .*float8_e4m3fn"):
        attend(*[x.astype(ml_dtypes.float8_e5m2)] * 3)


# --- cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_float8_cache(engine, rng, num_splits, batch_invariant):
    """Paged, appended to, with scales of each entry and head: as attention over each entry."""
    require_float8(engine)
    batch, seqlen_q, new, heads, heads_kv, page, pages = 3, int(rng.choice([1, 3])), 2, 4, 2, 5, 6
    lengths = rng.integers(0, page * pages - new, batch).astype(np.int32)
    capacity = page * pages

    def numbers(*shape):
        return rng.normal(size=shape).astype(FLOAT8)

    key, value = numbers(batch, capacity, heads_kv, 16), numbers(batch, capacity, heads_kv, 24)
    q = numbers(batch, seqlen_q, heads, 16)
    k, v = numbers(batch, new, heads_kv, 16), numbers(batch, new, heads_kv, 24)
    factors = {
        name: rng.uniform(0.5, 2, (batch, heads_kv)).astype(np.float32)
        for name in DESCALES.values()
    }
    table = rng.permutation(batch * pages).astype(np.int32).reshape(batch, pages)
    caches = []
    for x in (key, value):
        cache = np.zeros((batch * pages, page, *x.shape[2:]), FLOAT8)
        cache[table] = x.reshape(batch, pages, page, *x.shape[2:])
        caches.append(to_engine(engine, cache))
    placed = {name: to_engine(engine, x) for name, x in factors.items()}
    out, lse = cupyflash.flash_attention_with_kvcache(
        to_engine(engine, q), *caches, k=to_engine(engine, k), v=to_engine(engine, v),
        cache_seqlens=lengths, page_table=table, num_splits=num_splits, out_dtype="float32",
        batch_invariant=batch_invariant, return_lse=True, engine=engine, **placed,
    )  # fmt: skip
    out, lse = to_host(out), to_host(lse)
    for entry, length in enumerate(lengths):
        keys, values = (
            np.concatenate([old[entry, :length], fresh[entry]])[None]
            for old, fresh in ((key, k), (value, v))
        )
        own = {name: x[entry : entry + 1] for name, x in factors.items()}
        right = call(engine, q[entry, None], keys, values, causal=True, out_dtype="float32", **own)
        np.testing.assert_allclose(out[entry], right.out[0], atol=2e-5)
        np.testing.assert_allclose(lse[entry], right.lse[0], atol=2e-5)
    for cache, fresh in zip(caches, (k, v), strict=True):
        rows = to_host(cache).view(np.uint8)[table].reshape(batch, capacity, heads_kv, -1)
        for entry, length in enumerate(lengths):
            assert same_bits(rows[entry, length : length + new], fresh[entry].view(np.uint8))


def test_rotary_positions_refuse_float8(rng):
    cache = np.zeros((1, 8, 2, 16), FLOAT8)
    new = cache[:, :1]
    angles = np.ones((8, 8), np.float32)
    with pytest.raises(cupyflash.UnsupportedError, match="turn them before quantize_fp8"):
        cupyflash.flash_attention_with_kvcache(
            new, cache, cache.copy(), k=new, v=new, cache_seqlens=0, rotary_cos=angles,
            rotary_sin=angles,
        )  # fmt: skip
