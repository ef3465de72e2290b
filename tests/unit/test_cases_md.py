"""Inputs that broke other libraries (P1 to P12), with their right answers."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import cupyflash
from tests.cases import DTYPES, Shape
from tests.harness import call, check, compare, draw, expected, same_bits
from tests.memory import Guarded, fill_nan, to_engine, to_host


def test_p1_causal_with_fewer_keys_than_queries(engine, rng):
    arguments = draw(rng, Shape(1, 2048, 1024, 1, 1, 64, 64), "bfloat16")
    result, _ = check(engine, causal=True, **arguments)
    assert not result.out[:, :1024].any() and not result.dq[:, :1024].any()
    assert (result.lse[..., :1024] == -np.inf).all() and not result.row_sum[..., :1024].any()
    assert same_bits(result.out[0, 1024], arguments["v"][0, 0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("empty", ["seqlen_k", "seqlen_q", "batch"])
def test_p2_nothing_to_attend(engine, rng, empty, dtype, causal):
    sizes = {"batch": 2, "seqlen_q": 3, "seqlen_k": 0 if empty == "seqlen_k" else 5} | {empty: 0}
    arguments = draw(rng, Shape(**sizes, head_dim=16, head_dim_v=16), dtype, ["gqa"])
    result = call(engine, causal=causal, **arguments)  # checks shapes, poisons memory
    for name in ("out", "dq", "dk", "dv"):
        assert (np.asarray(getattr(result, name), np.float64) == 0).all(), name
    assert (result.lse == -np.inf).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_p3_blind_rows(engine, rng, dtype):
    arguments = draw(rng, Shape(1, 8, 8, 1, 1, 8, 8), dtype, layout="bhsd")
    mask = rng.random((1, 1, 8, 8)) < 0.7
    mask[0, 0, [1, 2, 3, 5, 6], [1, 2, 3, 5, 6]] = True
    blind = [0, 4, 7]
    mask[:, :, blind] = False
    result, _ = check(engine, mask=mask, **arguments)
    assert not result.out[0, 0, blind].any() and not result.dq[0, 0, blind].any()
    assert (result.lse[0, 0, blind] == -np.inf).all()
    assert np.isfinite(result.dk.astype(np.float64)).all() and result.dv.any()


def test_p4_an_entry_without_keys(engine, rng):
    arguments = draw(rng, Shape(3, 10, 20, 4, 4, 32, 32), "float32", ["gqa"])
    mask = rng.random((3, 1, 1, 20)) < 0.6
    mask[0, ..., 0] = mask[2, ..., 0] = True
    mask[1] = False
    result, _ = check(engine, mask=mask, deterministic=True, **arguments)
    for entry in (0, 2):
        one = slice(entry, entry + 1)
        alone = {n: x[one] for n, x in arguments.items() if isinstance(x, np.ndarray)}
        part = call(engine, mask=mask[one], **(arguments | alone))
        for name in ("out", "dq", "dk", "dv", "lse"):
            assert same_bits(getattr(result, name)[one], getattr(part, name)), name
    for name in ("out", "dq", "dk", "dv"):
        assert not getattr(result, name)[1].any()


def test_p4_as_varlen(engine, rng):
    cu_seqlens = np.array([0, 10, 20, 30], np.int32), np.array([0, 5, 5, 12], np.int32)
    q, dout = (rng.normal(size=(30, 4, 32)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(12, 2, 32)).astype(np.float32) for _ in range(2))
    result, _ = check(engine, q=q, k=k, v=v, dout=dout, cu_seqlens=cu_seqlens)
    assert not result.out[10:20].any() and not result.dq[10:20].any()
    assert (result.lse[:, 10:20] == -np.inf).all() and np.isfinite(result.lse[:, :10]).all()


def test_p5_merge_of_17_parts(engine, rng):
    out = rng.normal(size=(17, 2, 40, 3, 16)).astype(np.float32)
    lse = rng.normal(size=(17, 2, 3, 40)).astype(np.float32)
    lse[rng.random(lse.shape) < 0.5] = -np.inf
    nowhere = rng.random((2, 3, 40)) < 0.2
    lse[:, nowhere] = -np.inf
    out[(lse == -np.inf).swapaxes(2, 3)] = 0
    merged, merged_lse = map(
        to_host, cupyflash.merge_states(*(to_engine(engine, x) for x in (out, lse)))
    )
    weight = np.exp(lse.astype(np.float64))
    total = weight.sum(axis=0)
    nowhere = total == 0
    share = (weight / np.where(nowhere, 1, total)).swapaxes(2, 3)[..., None]
    np.testing.assert_allclose(merged, (share * out).sum(axis=0), rtol=0, atol=2e-6)
    assert (merged_lse[nowhere] == -np.inf).all() and not merged[nowhere.swapaxes(1, 2)].any()
    np.testing.assert_allclose(merged_lse[~nowhere], np.log(total[~nowhere]), rtol=0, atol=2e-6)
    assert merged.dtype == merged_lse.dtype == np.float32


@pytest.mark.parametrize("causal", [True, "bottom-right", "top-left"])
@pytest.mark.parametrize("seqlens", [(3, 799), (799, 3), (127, 512), (203, 113)], ids=str)
def test_p6_how_many_keys_each_query_sees(engine, rng, seqlens, causal):
    sq, sk = seqlens
    q, k = np.zeros((1, sq, 2, 32), np.float32), np.zeros((1, sk, 1, 32), np.float32)
    rows = np.arange(sq) + 1 + (0 if causal == "top-left" else sk - sq)
    seen = np.clip(rows, 0, sk)
    counted = call(engine, q, k, k, causal=causal)  # every score 0: l counts
    np.testing.assert_array_equal(counted.row_sum, np.broadcast_to(seen, (1, 2, sq)))
    if seqlens == (799, 3):
        assert (seen == 0).sum() == (0 if causal == "top-left" else 796)
    arguments = draw(rng, Shape(1, sq, sk, 2, 2, 32, 32), "float32", ["gqa"])
    check(engine, causal=causal, **arguments)


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 128])
def test_p7_window_counts_exactly(engine, rng, width):
    k, v = (rng.normal(size=(1, 150, 2, 16)).astype(np.float32) for _ in range(2))
    result = call(engine, np.zeros_like(k), k, v, window=(width - 1, 0))
    seen = np.minimum(np.arange(150) + 1, width)
    np.testing.assert_array_equal(result.row_sum, np.broadcast_to(seen, (1, 2, 150)))
    assert not result.row_max.any()
    for i in range(150):
        mean = v[0, i + 1 - seen[i] : i + 1].mean(axis=0, dtype=np.float64)
        np.testing.assert_allclose(result.out[0, i], mean, rtol=0, atol=1e-6)


def test_p8_alibi_leaves_nothing_out_of_lse(engine, rng):
    k, v = (rng.normal(size=(1, 90, 2, 16)).astype(np.float32) for _ in range(2))
    slopes = np.array([1 / 2, 1 / 8], np.float32)
    q = np.zeros((1, 40, 2, 16), np.float32)
    result = call(engine, q, k, v, causal=True, alibi_slopes=slopes)
    assert not result.row_max.any()
    np.testing.assert_allclose(result.lse[0, :, -1], [0.9327521, 2.1412776], rtol=0, atol=1e-5)
    for i in range(40):
        terms = np.exp(-slopes[:, None].astype(np.float64) * np.arange(i + 51))
        np.testing.assert_allclose(result.lse[0, :, i], np.log(terms.sum(1)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "shape", [(3, 1, 1, 65), (65,), (70, 1), (1, 4, 1, 1), (4, 70, 65)], ids=str
)
def test_p9_masks_of_every_shape(engine, rng, shape, dtype):
    arguments = draw(rng, Shape(3, 70, 65, 4, 4, 32, 32), dtype, ["gqa"])
    mask = rng.random(shape) < 0.6
    result, exact = check(engine, mask=mask, **arguments)
    spread = np.ascontiguousarray(np.broadcast_to(mask, (3, 4, 70, 65)))
    in_full = call(engine, mask=spread, **arguments)
    compare(in_full, exact, mask=spread, **arguments)
    for name in ("out", "lse", "row_max"):
        assert same_bits(getattr(result, name), getattr(in_full, name)), name


def test_p9_nothing_of_the_full_size_is_allocated(rng):
    arguments = draw(rng, Shape(2, 2048, 2048, 4, 4, 8, 8), "float32")
    mask = np.ones((2, 1, 1, 2048), bool)
    tracemalloc.start()
    try:
        call("numpy", mask=mask, **arguments)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * 4 * 2048 * 2048 / 2, "more than half the spread mask at a byte an element"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(5, 0), (0, 0), (None, 0), (0, 5)], ids=str)
def test_p10_zero_is_a_bound(engine, rng, window, causal):
    arguments = draw(rng, Shape(1, 20, 20, 2, 2, 8, 8))
    result, _ = check(engine, window=window, causal=causal, **arguments)
    if window == (0, 0):
        assert same_bits(result.out, arguments["v"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, 0), (None, -1), (-3, -3), (-(10**20), None)], ids=str)
def test_p10_negative_bounds_are_errors(engine, rng, window, causal):
    q = to_engine(engine, rng.normal(size=(1, 20, 2, 8)).astype(np.float32))
    out = Guarded(engine, (1, 20, 2, 8), np.float32, "dense", rng)
    with pytest.raises(ValueError, match="window"):
        cupyflash.flash_attention(q, q, q, window=window, causal=causal, out=out.view)
    out.assert_unchanged()


def test_p11_varlen_with_empty_entries(engine, rng):
    cu_seqlens = np.array([0, 0, 0, 0, 1], np.int32), np.array([0, 3, 3, 8, 20], np.int32)
    q, dout = (rng.normal(size=(1, 21, 120)).astype(np.float16) for _ in range(2))
    k, v = (rng.normal(size=(20, 7, 120)).astype(np.float16) for _ in range(2))
    arguments = {"q": q, "k": k, "v": v, "dout": dout, "causal": True}
    result, _ = check(engine, cu_seqlens=cu_seqlens, **arguments)
    assert not result.dk[:8].any() and not result.dv[:8].any()
    last = {"q": q[None], "k": k[None, 8:], "v": v[None, 8:], "dout": dout[None]}
    alone = expected(**last)  # all 12 keys
    np.testing.assert_allclose(result.lse, alone.lse[0], rtol=1e-5)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("widths", [(640, 128, 64), (130, 16, 256), (200, 1, 5)], ids=str)
def test_p12_values_of_another_width(engine, rng, widths, layout):
    seqlen, head_dim, head_dim_v = widths
    shape = Shape(2, seqlen, seqlen, 2, 2, head_dim, head_dim_v)
    arguments = draw(rng, shape, "float16", layout=layout)
    result, _ = check(engine, deterministic=True, **arguments)
    scaled = call(engine, softmax_scale=head_dim**-0.5, **(arguments | {"dout": None}))
    assert same_bits(result.out, scaled.out)

    def with_gaps(x):
        wide = fill_nan(np.empty((*x.shape[:-1], 2 * x.shape[-1]), x.dtype))
        wide[..., ::2] = x
        return wide[..., ::2]

    gaps = {n: with_gaps(x) for n, x in arguments.items() if isinstance(x, np.ndarray)}
    strided = call(engine, **(arguments | gaps))
    for name in ("out", "row_max", "row_sum", "dq", "dk", "dv"):
        assert same_bits(getattr(result, name), getattr(strided, name)), name
