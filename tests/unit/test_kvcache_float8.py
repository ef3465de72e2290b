"""16-bit queries over an FP8 cache against the cache's numbers times their factors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyflash
from cupyflash import kvcache
from cupyflash._kvcache import kernels
from tests import cases
from tests import kvcache_reference as reference
from tests.cases import FLOAT8
from tests.harness import require_float8, same_bits
from tests.kvcache_harness import call, check, draw
from tests.memory import to_engine, to_host
from tests.tolerance import assert_agree

SIXTEEN_BITS = ("float16", "bfloat16")
FACTORS = ("none", "number", "shared", "own", "strided")
CALLS: dict[str, dict[str, Any]] = {
    "step": {"head_dim": 64, "seqlen_k": 150},
    "step, paged": {"head_dim": 128, "page_size": 16, "new": 1, "seqlen_k": 100},
    "prompt": {"seqlen_q": 20, "new": 20, "page_size": 7, "rotary": 1},
    "by index": {"shuffled": True, "new": 2, "rotary": 0.5, "leftpad": True},
    "heads first": {"strides": "heads first", "new": 1, "head_dim": 33, "head_dim_v": 20},
    "gaps": {"strides": "gaps", "new": 1, "head_dim": 24},
    "window": {"seqlen_q": 3, "window": (9, 0), "seqlen_k": 70},
    "softcap, sinks": {"softcap": 1.5, "sinks": np.linspace(-1, 4, 4, dtype=np.float32)},
    "alibi": {"alibi_slopes": np.linspace(0, 0.3, 12, dtype=np.float32).reshape(3, 4)},
}


@pytest.fixture(autouse=True)
def _served(engine):
    require_float8(engine)


def factors(rng: Any, kind: str, batch: int, heads_kv: int) -> Any:
    """Descales of one operand."""
    if kind == "none":
        return None
    if kind == "number":
        return float(rng.uniform(0.5, 2))
    array = rng.uniform(0.5, 2, (1 if kind == "shared" else batch, 2 * heads_kv)).astype(np.float32)
    return array[:, ::2] if kind == "strided" else array[:, :heads_kv].copy()


def draw_float8(rng: Any, *, fresh: str = "16-bit", **shape: Any) -> dict[str, Any]:
    """`draw` with an FP8 cache and descales; new tokens are "16-bit" or "FP8"."""
    arguments = draw(
        rng, dtype=str(rng.choice(SIXTEEN_BITS)), cache_dtype=FLOAT8,
        new_dtype=FLOAT8 if fresh == "FP8" else None, **shape,
    )  # fmt: skip
    batch, heads_kv = arguments["q"].shape[0], arguments["k_cache"].shape[2]
    for name in ("k_descale", "v_descale"):
        arguments[name] = factors(rng, str(rng.choice(FACTORS)), batch, heads_kv)
    return arguments


@pytest.mark.parametrize("fresh", ["16-bit", "FP8"])
@pytest.mark.parametrize("kind", CALLS)
def test_calls(engine, rng, kind, fresh):
    shape = dict(CALLS[kind])
    if fresh == "FP8":
        shape.pop("rotary", None)
    for splits in (1, 3):
        check(engine, draw_float8(rng, fresh=fresh, **shape), num_splits=splits)


@settings(max_examples=30)
@given(data=st.data())
def test_any_call(engine, data):
    def pick(*choices: Any) -> Any:
        return data.draw(st.sampled_from(choices))

    seqlen_k = data.draw(st.integers(0, 40))
    new = data.draw(st.integers(0, min(seqlen_k, 8)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    fresh = pick("16-bit", "FP8")
    arguments = draw_float8(
        rng, fresh=fresh, seqlen_q=data.draw(st.integers(1, 9)), seqlen_k=seqlen_k, new=new,
        batch=data.draw(st.integers(1, 4)), head_dim=pick(7, 16), heads=pick((2, 2), (4, 2)),
        leftpad=pick(True, False), rotary=pick(0, 0.5, 1) if new and fresh == "16-bit" else 0,
        causal=pick(True, False), page_size=pick(None, 3, 7), strides=pick("dense", "part"),
    )  # fmt: skip
    arguments["rotary_interleaved"] = pick(True, False)
    check(engine, arguments, num_splits=pick(0, 1, 2, 5), batch_invariant=pick(True, False))


def empty_cache(dtype: Any, batch: int, length: int, width: int, **more: Any) -> dict[str, Any]:
    """A call on a cache that is all to be filled, of one head."""
    cache = np.zeros((batch, length, 1, width), FLOAT8)
    q = np.ones((batch, 1, 1, width), dtype)
    return {"q": q, "k_cache": cache, "v_cache": cache.copy(), "cache_seqlens": 0} | more


def quantized(x: Any, factor: Any) -> Any:
    """By ml_dtypes, to which numbers beyond the largest are NaN."""
    with np.errstate(all="ignore"):
        quotient = x.astype(np.float32) / np.float32(factor)
    return np.clip(quotient, -448, 448).astype(FLOAT8)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("factor", [1.0, 0.37, 7.0, 1e-4, 3e5, 1e-37])
def test_every_number_is_rounded_to_the_nearest(engine, dtype, factor):
    """Ties to even, to 448 beyond it; NaN stays NaN. By a number, and by each head's own."""
    new = np.arange(2**16, dtype=np.uint16).view(cases.DTYPES[dtype]).reshape(1, 1024, 1, 64)
    right = quantized(new, factor)
    nan = np.isnan(right)
    # In simt CuPy quantises, to which subnormal numbers are 0.
    tiny = (np.abs(new.astype(np.float32)) < 2.0**-126) & (engine == "simt")
    for descale in (factor, np.full((1, 1), factor, np.float32)):
        arguments = empty_cache(new.dtype, 1, 1024, 64, k=new, v=new)
        arguments |= {"k_descale": descale, "v_descale": descale}
        _, _, key, value = call(engine, arguments)
        for got in (key, value):
            assert (np.isnan(got) == nan).all()
            got = np.where(tiny & (got.astype(np.float32) == 0), right, got)
            assert same_bits(got[~nan], right[~nan])


def test_new_tokens_in_float8_are_kept_bit_by_bit(engine, rng):
    new = rng.permutation(256).astype(np.uint8).reshape(1, 4, 1, 64).view(FLOAT8)
    arguments = empty_cache(np.float16, 1, 4, 64, k=new, v=new, k_descale=3.0, v_descale=0.1)
    _, _, key, value = call(engine, arguments)
    assert same_bits(key, new) and same_bits(value, new)


def every_number(dtype: Any, width: int = 64) -> dict[str, Any]:
    """An entry of one key for each number of e4m3, in another column each; NaN is 0."""
    codes = np.arange(256, dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    arguments = empty_cache(dtype, 256, 1, width, cache_seqlens=None)
    column = np.arange(256) % width
    for name in ("k_cache", "v_cache"):
        arguments[name][np.arange(256), 0, 0, column] = codes.view(FLOAT8)
    return arguments


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_every_number_is_read_exactly(engine, dtype):
    arguments = every_number(cases.DTYPES[dtype])
    numbers = arguments["k_cache"][:, 0, 0].astype(np.float64)
    out, lse, _, _ = call(engine, arguments | {"softmax_scale": 0.25, "k_descale": 2.0})
    np.testing.assert_array_equal(out[:, 0, 0].astype(np.float64), numbers)
    np.testing.assert_allclose(lse[:, 0, 0], numbers.sum(axis=1) / 2, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_stays_nan(engine, dtype, code):
    nan = np.uint8(code).view(FLOAT8)
    for name in ("k_cache", "v_cache"):
        for column in range(5, 64, 16):
            arguments = empty_cache(cases.DTYPES[dtype], 2, 3, 64, cache_seqlens=None)
            arguments[name][0, 1, 0, column] = nan
            out = call(engine, arguments)[0].astype(np.float32)
            assert np.isnan(out[0, 0, 0, column]) and not np.isnan(out[1]).any()


def test_a_step_is_the_last_row_of_the_prompt(engine, rng):
    """Token by token gives the same cache, bit by bit, as the prompt at once."""
    length = 9
    whole = draw_float8(rng, batch=2, seqlen_q=length, seqlen_k=length, new=length, rotary=1)
    whole["cache_seqlens"] = 0
    out, lse, key, value = call(engine, whole)
    exact = reference.attention(whole, *(x.astype(np.float64) for x in (key, value)), np.float64)
    part = dict(whole)
    for t in range(length):
        part |= {name: whole[name][:, t : t + 1] for name in ("q", "k", "v")}
        part["cache_seqlens"] = t
        got, got_lse, part["k_cache"], part["v_cache"] = call(engine, part)
        assert_agree("out", got, out[:, t : t + 1], exact)
        assert_agree("lse", got_lse, lse[..., t : t + 1], exact)
    assert same_bits(part["k_cache"][:, :length], key[:, :length])
    assert same_bits(part["v_cache"][:, :length], value[:, :length])


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
def test_out_dtype(engine, rng, out_dtype):
    arguments = draw_float8(rng)
    placed = {name: to_engine(engine, x) for name, x in arguments.items()}

    def out(dtype: Any) -> Any:
        return to_host(
            cupyflash.flash_attention_with_kvcache(**placed, engine=engine, out_dtype=dtype)
        )

    assert out(None).dtype == arguments["q"].dtype
    kind = cases.DTYPES[out_dtype]
    assert same_bits(out(out_dtype), out("float32").astype(kind))


# --- what is refused ------------------------------------------------------------------------------

NEW = {"k": np.ones((2, 1, 2, 16), np.float16), "v": np.ones((2, 1, 2, 16), np.float16)}
ANGLES = {f"rotary_{name}": np.ones((8, 8), np.float32) for name in ("cos", "sin")}
FLOAT8_NEW = {name: x.astype(FLOAT8) for name, x in NEW.items()}


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "q_descale goes with q of dtype float8_e4m3fn", {"q_descale": 2.0}),
        (ValueError, "k_descale must be finite and > 0 in float32", {"k_descale": 0.0}),
        (ValueError, "v_descale must be finite and > 0 in float32", {"v_descale": 1e39}),
        (ValueError, "v_descale must be finite and > 0 in float32", {"v_descale": 1e-50}),
        (ValueError, "k_descale must be a number or", {"k_descale": np.ones((2, 4), np.float32)}),
        (TypeError, "v_descale must have dtype float32", {"v_descale": np.ones((2, 2))}),
        (TypeError, "k_cache must have q's dtype float32", {"q": np.ones((2, 1, 4, 16), "f4")}),
        (TypeError, "v_cache must have k_cache's dtype",
         {"v_cache": np.ones((2, 8, 2, 16), np.float16)}),
        (TypeError, "v must have k's dtype", {"v": FLOAT8_NEW["v"]}),
        (TypeError, "k must have q's dtype float16 or float8_e4m3fn",
         {name: x.astype(ml_dtypes.bfloat16) for name, x in NEW.items()}),
        (cupyflash.UnsupportedError, "turn them before quantize_fp8", ANGLES | FLOAT8_NEW),
        (cupyflash.UnsupportedError, "out_dtype", {"out_dtype": "float64"}),
    ],
)  # fmt: skip
def test_refused(engine, error, message, change):
    cache = np.ones((2, 8, 2, 16), FLOAT8)
    arguments = {"q": np.ones((2, 1, 4, 16), np.float16), "k_cache": cache, "v_cache": cache.copy()}
    arguments |= {"cache_seqlens": 3} | NEW | change
    placed = {name: to_engine(engine, x) for name, x in arguments.items()}
    with pytest.raises(error, match=message):
        cupyflash.flash_attention_with_kvcache(**placed, engine=engine)
    assert same_bits(to_host(placed["k_cache"]).view(np.uint8), cache.view(np.uint8))


@pytest.mark.parametrize("cache_dtype", [None, FLOAT8])
def test_kernels_serve_caches_of_either_kind(rng, monkeypatch, cache_dtype):
    monkeypatch.setattr(kvcache, "kernel_device", lambda *_: "a GPU")
    answers, serve = [], kernels.serve
    monkeypatch.setattr(kernels, "serve", lambda call: answers.append(serve(call)))
    call("numpy", draw(rng, dtype="float16", cache_dtype=cache_dtype))
    assert answers == [True]


def test_only_a_cache_may_be_float8_alone(engine):
    q, k = np.ones((1, 3, 2, 8), np.float16), np.ones((1, 3, 2, 8), FLOAT8)
    with pytest.raises(TypeError, match="q, k and v must have one dtype"):
        cupyflash.flash_attention(*(to_engine(engine, x) for x in (q, k, k)), engine=engine)
