"""Every feature alone, in pairs and in any combination, against the dense reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyflash
from tests import cases, reference
from tests.cases import DTYPES, Shape, usual_dtype
from tests.harness import (
    call,
    check,
    compare,
    draw,
    expected,
    require,
    same_bits,
)
from tests.memory import to_engine, to_host
from tests.tolerance import assert_close, assert_result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", ["plain", *cases.FEATURES])
def test_feature_alone(engine, rng, feature, dtype):
    features = [] if feature == "plain" else [feature]
    check(engine, **draw(rng, Shape(), dtype, features))


def _length(rng):
    """Often 1, for which there are ways of its own, and which shapes seldom have by chance."""
    return 1 if rng.random() < 0.2 else int(rng.integers(2, 80))


@pytest.mark.parametrize("pair", cases.PAIRS, ids="-".join)
def test_two_features(engine, rng, pair):
    shape = Shape(
        seqlen_q=_length(rng),
        seqlen_k=_length(rng),
        head_dim=int(rng.choice([8, 24])),
        head_dim_v=int(rng.choice([8, 24])),
    )
    dtype = rng.choice([name for name in cases.ENGINE_DTYPES[engine] if name != "float64"])
    layout = rng.choice(["bshd", "bhsd"])
    check(engine, **draw(rng, shape, dtype, pair, layout))


@given(data=st.data())
def test_any_combination(engine, data):
    supported = sorted(cases.SUPPORTED[engine])
    features = data.draw(st.sets(st.sampled_from(supported), max_size=5))
    for one, other in cases.EXCLUSIVE:
        if one in features:
            features.discard(other)
    sizes = st.integers(0, 70)
    shape = Shape(
        batch=data.draw(st.integers(1 if "varlen" in features else 0, 3)),
        seqlen_q=data.draw(sizes),
        seqlen_k=data.draw(sizes),
        heads=data.draw(st.sampled_from([2, 4])),
        head_dim=data.draw(st.sampled_from([7, 33])),
        head_dim_v=data.draw(st.sampled_from([7, 33])),
    )
    dtype = data.draw(st.sampled_from(cases.ENGINE_DTYPES[engine]))
    layout = data.draw(st.sampled_from(["bshd", "bhsd"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    check(engine, **draw(rng, shape, dtype, sorted(features), layout))


@pytest.mark.parametrize("case", cases.matrix(full=False), ids=str)
def test_flash_attention_2_matrix(engine, rng, case):
    (seqlen_q, seqlen_k), (heads, heads_kv) = case.seqlens, cases.HEADS[case.heads]
    fewer = 3 if seqlen_q * seqlen_k < 10**6 else 6  # all heads on a GPU only
    heads, heads_kv = heads // fewer, max(heads_kv // fewer, 1)
    shape = Shape(1, seqlen_q, seqlen_k, heads, heads, case.head_dim, case.head_dim)
    arguments = draw(rng, shape, case.dtype)
    for name in ("k", "v"):
        arguments[name] = arguments[name][:, :, :heads_kv]
    check(engine, causal=case.causal, **arguments)


@pytest.mark.parametrize("head_dim", [1, 2, 3, 17, 31, 33, 65, 129, 255, 256])
def test_head_dim(engine, rng, head_dim):
    head_dim_v = int(rng.choice([head_dim, 1, 48, 256]))
    shape = Shape(1, 20, 70, 2, 2, head_dim, head_dim_v)
    check(engine, **draw(rng, shape, rng.choice(cases.ENGINE_DTYPES[engine])))


@pytest.mark.parametrize(
    "features", [[], ["causal"], ["gqa", "varlen"], ["bias", "sinks"]], ids="-".join
)
@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k"])
def test_empty(engine, rng, empty, features):
    arguments = draw(rng, Shape(**{empty: 0}), "float16", features)
    result, _ = check(engine, **arguments)
    if empty == "seqlen_k" and "sinks" not in features:
        assert not result.out.any() and not result.dq.any()
        assert (result.lse == -np.inf).all() and not result.row_sum.any()


# --- rows and keys that take no part ------------------------------------------------------------


def _unseen_keys(kind: str, rng: np.random.Generator, dtype: str) -> tuple[dict, np.ndarray]:
    """Arguments in which some keys are seen by no query, and these keys, bool (b, sk, hk)."""
    shape = Shape(2, 40, 77, 4, 4, 16, 16)
    arguments = draw(rng, shape, dtype)
    unseen = np.zeros((2, 77, 4), bool)
    if kind == "mask":
        mask = rng.random((2, 4, 1, 77)) < 0.6
        arguments["mask"], unseen[...] = mask, ~mask[:, :, 0].swapaxes(1, 2)
    elif kind == "top_left":
        arguments["causal"], unseen[:, 40:] = "top-left", True
    elif kind == "window":
        arguments["window"] = (3, -1 + 3)
        unseen[:, : 77 - 40 - 3] = True
    elif kind in ("bias", "bias and softcap"):
        if kind == "bias and softcap":
            arguments["softcap"] = 20.0
        hidden = rng.random(77) < 0.4
        bias = np.where(hidden, -np.inf, rng.normal(size=(4, 40, 77)))
        arguments["bias"], unseen[:, hidden] = bias.astype(np.float32), True
    elif kind == "block_mask":
        blocks = np.ones((1, 1, 3, 6), bool)
        blocks[..., [1, 5]] = False
        arguments["block_mask"] = cupyflash.BlockMask(blocks, block_size=(16, 13))
        unseen[:, 13:26] = unseen[:, 65:] = True
    return arguments, unseen


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "kind", ["mask", "top_left", "window", "block_mask", "bias", "bias and softcap"]
)
def test_keys_that_nobody_sees_may_hold_anything(engine, rng, kind, value):
    arguments, unseen = _unseen_keys(kind, rng, usual_dtype(engine))
    arguments["k"][unseen] = arguments["v"][unseen] = value
    result, _ = check(engine, **arguments)
    assert not result.dk[unseen].any() and not result.dv[unseen].any()


BANDS = [
    {"causal": True}, {"causal": "top-left"}, {"window": (90, 70)}, {"window": (0, None)},
    {"window": (None, 5)}, {"window": (0, 0)},
]  # fmt: skip


@pytest.mark.parametrize("options", BANDS, ids=str)
def test_what_some_queries_see_does_not_reach_tiles_that_do_not(engine, rng, options):
    seqlen_q, seqlen_k = rng.integers(400, 620, size=2)
    arguments = draw(rng, Shape(1, seqlen_q, seqlen_k, 2, 2, 16, 16), usual_dtype(engine))
    # NumPy's own tiles would be larger than the arrays.
    options = options | {"tiling": cupyflash.Tiling(64, 64, 1, 1) if engine == "numpy" else None}
    arguments |= options | {"dout": None}
    placed = [to_engine(engine, arguments[name]) for name in "qkv"]
    tile = cupyflash.choose_tiling(*placed, engine=engine, **options).block_m
    diagonal = 0 if options.get("causal") == "top-left" else seqlen_k - seqlen_q
    left, right = options.get("window", (None, 0))
    distance = np.arange(seqlen_k) - np.arange(seqlen_q)[:, None] - diagonal
    seen = np.ones(distance.shape, bool)
    seen &= True if left is None else distance >= -left
    seen &= True if right is None else distance <= right

    # A key next to those that one of the tiles sees, and that another one sees.
    by_tile = np.logical_or.reduceat(seen, np.arange(0, seqlen_q, tile), axis=0)
    beside = np.zeros_like(by_tile)
    beside[:, 1:] |= by_tile[:, :-1] & ~by_tile[:, 1:]
    beside[:, :-1] |= by_tile[:, 1:] & ~by_tile[:, :-1]
    key = rng.choice((beside.any(axis=0) & by_tile.any(axis=0)).nonzero()[0])
    clean = call(engine, **arguments)
    for name in ("k", "v"):
        arguments[name][:, key] = np.nan
    result = call(engine, **arguments)
    blind = ~np.repeat(by_tile[:, key], tile)[:seqlen_q]
    assert blind.any()
    assert same_bits(result.out[:, blind], clean.out[:, blind])
    assert same_bits(result.row_max[..., blind], clean.row_max[..., blind])
    assert same_bits(result.row_sum[..., blind], clean.row_sum[..., blind])


@pytest.mark.parametrize("features", [[], ["causal"], ["bias", "mask"], ["sinks", "dlse"]])
def test_tokens_past_the_last_entry_may_hold_anything(engine, rng, features):
    arguments = draw(
        rng, Shape(seqlen_q=30, seqlen_k=50), usual_dtype(engine), ["varlen", *features]
    )
    ends = [int(cu[-1]) for cu in arguments["cu_seqlens"]]
    for name in ("q", "k", "v", "dout"):
        tail = np.full((9, *arguments[name].shape[1:]), np.nan, arguments[name].dtype)
        arguments[name] = np.concatenate([arguments[name], tail])
    if "dlse" in features:  # a row's sink still has a gradient
        arguments["dlse"] = rng.normal(size=(4, ends[0] + 9)).astype(np.float32)
    result, _ = check(engine, **arguments)
    for name, end in (("out", ends[0]), ("dq", ends[0]), ("dk", ends[1]), ("dv", ends[1])):
        assert len(getattr(result, name)) == end + 9 and not getattr(result, name)[end:].any()
    row_max, row_sum = (-np.inf, 0) if "sinks" not in features else (arguments["sinks"][:, None], 1)
    assert (result.row_max[:, ends[0] :] == row_max).all()
    assert (result.row_sum[:, ends[0] :] == row_sum).all()


@pytest.mark.parametrize("rows", [150, 1])
@pytest.mark.parametrize("aligned", [True, False])
def test_masks_of_hidden_and_visible_tiles(engine, rng, rows, aligned):
    """Tiles may be hidden, mixed or visible as a whole; rows may be read in wide pieces or not."""
    arguments = draw(rng, Shape(1, 150, 336, 2, 2, 16, 16), "float32", ["gqa"])
    mask = np.ones((1, 2, rows, 336 + (not aligned)), bool)[..., :336]
    mask[..., 64:200] = False
    mask[..., 288:336] = rng.random((1, 2, rows, 48)) < 0.5
    mask[:, 1, rows // 2 :, 60:300] = True
    if rows > 1:
        mask[:, :, 64:128, :32] = False
    unseen = ~mask.any(axis=(1, 2))
    arguments["k"][unseen] = arguments["v"][unseen] = np.nan
    check(engine, mask=mask, **arguments)


def test_rows_that_see_no_key(engine, rng):
    arguments = draw(rng, Shape(), "float16", ["mask"])
    arguments["mask"] = rng.random((2, 4, 37, 53)) < 0.5
    blind = rng.random((2, 4, 37)) < 0.3
    arguments["mask"][blind] = False
    result, _ = check(engine, dlse=rng.normal(size=(2, 4, 37)).astype(np.float32), **arguments)
    rows = blind.swapaxes(1, 2)
    assert not result.out[rows].any() and not result.dq[rows].any()
    assert (result.row_max[blind] == -np.inf).all() and (result.lse[blind] == -np.inf).all()
    assert not result.row_sum[blind].any()


@pytest.mark.parametrize(("seqlens", "causal"), [((200, 20), True), ((20, 200), "top-left")])
def test_tiles_that_nothing_meets(engine, rng, seqlens, causal):
    """Thread blocks of queries that see no key, and of keys that no query sees, have no work."""
    arguments = draw(rng, Shape(1, *seqlens, 2, 2, 32, 32), usual_dtype(engine))
    result, _ = check(engine, causal=causal, **arguments)
    assert not result.out[:, :-20].any() and not result.dq[:, :-20].any()
    assert not result.dk[:, 20:].any() and not result.dv[:, 20:].any()


def test_rows_that_see_only_the_sink(engine, rng):
    arguments = draw(rng, Shape(seqlen_q=60, seqlen_k=20), usual_dtype(engine), ["causal", "sinks"])
    result, _ = check(engine, dlse=rng.normal(size=(2, 4, 60)).astype(np.float32), **arguments)
    sinks = np.broadcast_to(arguments["sinks"][:, None], (2, 4, 40))
    np.testing.assert_array_equal(result.row_max[..., :40], sinks)
    assert (result.row_sum[..., :40] == 1).all() and not result.out[:, :40].any()


def test_bias_of_minus_infinity_hides(engine, rng):
    arguments = draw(rng, Shape(), usual_dtype(engine), ["bias"])
    hidden = rng.random((4, 37, 53)) < 0.5
    hidden[:, 5] = True
    bias = rng.normal(size=hidden.shape).astype(np.float32)
    arguments["bias"] = np.where(hidden, np.float32(-np.inf), bias)
    result, _ = check(engine, **arguments)
    assert not result.dbias[hidden].any() and not result.out[:, 5].any()
    masked = call(engine, **(arguments | {"bias": bias, "mask": ~hidden}))
    assert same_bits(result.out, masked.out) and same_bits(result.lse, masked.lse)


@pytest.mark.parametrize("seqlen_k", [20, 84])  # multiples of 4, and of no more
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_of_a_whole_bias_stay_in_their_rows(engine, rng, seqlen_k, dtype):
    arguments = draw(rng, Shape(2, 9, seqlen_k, 2, 2, 16, 16), usual_dtype(engine))
    bias = rng.normal(size=(2, 2, 9, seqlen_k)).astype(dtype)
    check(engine, bias=bias, **arguments)


# --- large and small numbers --------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.5, 100.0])  # engines have two formulas
def test_a_scale_of_nothing_under_a_softcap(engine, rng, softcap):
    """0 times the score of a key that is hidden, -inf, must not reach a gradient."""
    arguments = draw(rng, Shape(seqlen_q=5, seqlen_k=7), usual_dtype(engine), ["causal", "gqa"])
    check(engine, softmax_scale=0.0, softcap=softcap, **arguments)


@pytest.mark.parametrize("bias", [-1e30, -3.38e38, -1e9, 1e30, 3.38e38])
@pytest.mark.parametrize("everywhere", [True, False])
def test_huge_biases_are_ordinary_numbers(engine, rng, bias, everywhere):
    arguments = draw(rng, Shape(), usual_dtype(engine))
    huge = np.full((37, 53), bias, np.float32)
    if not everywhere:
        huge[rng.random(huge.shape) < 0.5] = 0
    check(engine, bias=huge, **arguments)


@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_far_from_zero(engine, rng, sign):
    arguments = draw(rng, Shape(), "float32")  # 53 keys: no multiple of any tile
    arguments["q"] += np.float32(30)
    arguments["k"] += np.float32(sign * 30)
    result, _ = check(engine, **arguments)
    assert (sign * result.row_max > 3000).all()


def test_scores_beyond_float16(engine, rng):
    arguments = draw(rng, Shape(head_dim=64), "float16")
    arguments["q"] += np.float16(200)
    arguments["k"] += np.float16(200)
    arguments["softmax_scale"] = 1e-3
    result = call(engine, **arguments)
    exact, wide = expected(**arguments), expected(dtype=np.float32, **arguments)
    for name in ("out", "lse", "dv"):
        assert_result(name, getattr(result, name), exact, wide)
    assert np.isfinite(result.dq).all() and np.isfinite(result.dk).all()


@pytest.mark.parametrize("scale", [0, 0.0, -1, 2.5, 1e-30, np.float32(0.3)])
def test_any_softmax_scale(engine, rng, scale):
    check(engine, softmax_scale=scale, **draw(rng, Shape()))


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [{"softcap": None}, {"softcap": 0}, {"softcap": 0.0},
                                 {"window": (None, None)}, {"window": (1000, 10**30)},
                                 {"window": None, "causal": False}, {"dropout_p": 0},
                                 {"mask": None, "bias": None}], ids=str)  # fmt: skip
def test_options_that_change_nothing(engine, rng, off):
    if off.get("window"):
        require(engine, "window")
    arguments = draw(rng, Shape())
    plain, same = call(engine, **arguments), call(engine, **arguments, **off)
    assert same_bits(plain.out, same.out) and same_bits(plain.dq, same.dq)


@pytest.mark.parametrize("window", [(0, 0), (5, 0), (0, 5), (None, 3), (3, None), (2, 200)])
@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("seqlens", [(20, 70), (70, 20), (64, 64)])
def test_window(engine, rng, window, causal, seqlens):
    arguments = draw(rng, Shape(1, *seqlens, 2, 2, 8, 8))
    check(engine, window=window, causal=causal, **arguments)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("bias_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (53,), (37, 1), (1, 1, 1), (4, 37, 53), (2, 1, 1, 53),
                                   (2, 4, 37, 53), (1, 4, 1, 1)], ids=str)  # fmt: skip
def test_bias_has_a_gradient_of_its_own_shape(engine, rng, shape, bias_dtype, dtype):
    bias = np.asarray(rng.normal(size=shape)).astype(DTYPES[bias_dtype])
    arguments = draw(rng, Shape(), dtype)
    coarse = bias.dtype if bias.itemsize < arguments["q"].itemsize else arguments["q"].dtype
    check(engine, bias=bias, yardstick=coarse, **arguments)


@pytest.mark.parametrize("bias_dtype", ["float32", "float16"])
@pytest.mark.parametrize("lead", [(1, 1), (1, 4), (2, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("seqlens", [(1, 53), (37, 1), (1, 1)], ids=str)
def test_an_axis_of_length_1_is_also_whole(engine, rng, seqlens, lead, bias_dtype):
    """One query, or one key: the bias's axis has every element that there is, and one."""
    bias = rng.normal(size=(*lead, *seqlens)).astype(bias_dtype)
    # Without sinks the only key's probability is 1 whatever the bias, whose gradient is 0 then.
    arguments = draw(rng, Shape(2, *seqlens), usual_dtype(engine), ["sinks"])
    check(engine, bias=bias, **arguments)


def test_score_mod_parameters_have_gradients(engine, rng):
    require(engine, "score_mod", "gqa", "causal")
    table = rng.normal(size=(4, 37 + 53)).astype(np.float32)
    mod = cupyflash.ScoreMod(
        forward="score + table[h * 90 + j - i + 37]",
        backward="1.0f",
        params={"table": table},
        numpy_forward=lambda score, b, h, i, j, table: score + table[h, j - i + 37],
        numpy_backward=lambda score, b, h, i, j, table: (
            np.ones_like(score),
            {"table": ((np.full_like(j - i, h), j - i + 37), np.ones_like(score))},
        ),
    )
    judge = cupyflash.ScoreMod(
        "", numpy_forward=lambda score, b, h, i, j: score + table[h, j - i + 37],
        numpy_backward=lambda score, b, h, i, j: 1.0,
    )  # fmt: skip
    arguments = draw(rng, Shape(), "float32", ["gqa", "causal"])
    result = call(engine, score_mod=mod, **arguments)
    exact = expected(score_mod=judge, **arguments)
    dense = expected(score_mod=judge, dtype=np.float32, **arguments)
    compare(result, exact, score_mod=judge, **arguments)

    def table_gradient(dscores):
        gradient = np.zeros((4, 90), dscores.dtype)
        _, h, i, j = np.ix_(*map(np.arange, dscores.shape))
        np.add.at(gradient, np.broadcast_arrays(h, j - i + 37, dscores)[:2], dscores)
        return gradient

    assert set(result.dscore_params) == {"table"}
    gradients = table_gradient(exact.dscores), table_gradient(dense.dscores)
    noise = np.sqrt(table_gradient(exact.noise["dscores"] ** 2).max())
    assert_close(result.dscore_params["table"], *gradients, 3, "dscore_params", noise)


# --- dropout ------------------------------------------------------------------------------------


def _kept(engine, shape, **options):
    """Read the keep decisions off the output: q = 0 makes P uniform, v = 1 shows each key."""
    b, h, sq, sk = shape
    dtype = DTYPES[usual_dtype(engine)]
    q, k = np.zeros((b, sq, h, 8), dtype), np.zeros((b, sk, h, 8), dtype)
    v = np.broadcast_to(np.eye(sk, dtype=dtype)[None, :, None], (b, sk, h, sk))
    out = call(engine, q, k, v, **options).out.transpose(0, 2, 1, 3)
    weight = 1 / sk / (1 - options["dropout_p"])
    np.testing.assert_allclose(
        out, np.where(out > 0, weight, 0), rtol=1e-5 if q.itemsize > 2 else 1e-2
    )
    return out > 0


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 5, 2**64 - 1])
def test_dropout_drops_what_philox_says(engine, seed):
    shape = (2, 3, 50, 70)
    kept = {p: _kept(engine, shape, dropout_p=p, seed=seed) for p in (0.1, 0.5, 0.9)}
    for p, keep in kept.items():
        np.testing.assert_array_equal(keep, reference.dropout_keep(seed, p, shape))
    assert (kept[0.1] | ~kept[0.5]).all() and (kept[0.5] | ~kept[0.9]).all()


def test_dropout_that_rounds_to_nothing_keeps_all(engine):
    assert _kept(engine, (1, 1, 30, 40), dropout_p=2.0**-34, seed=3).all()


def test_seed_is_drawn_once_and_saved(engine, rng):
    require(engine, "dropout")
    arguments = draw(rng, Shape())
    q, k, v, dout = (to_engine(engine, arguments[name]) for name in ("q", "k", "v", "dout"))
    options = {"engine": engine, "dropout_p": 0.5}
    out, saved = cupyflash.flash_attention_forward(q, k, v, **options)
    assert isinstance(saved.seed, int) and 0 <= saved.seed < 2**64
    other = cupyflash.flash_attention_forward(q, k, v, **options)[1]
    assert other.seed != saved.seed
    again = cupyflash.flash_attention(q, k, v, seed=saved.seed, **options)
    assert same_bits(to_host(out), to_host(again))
    arguments |= {"dropout_p": 0.5, "seed": saved.seed}
    grads = cupyflash.flash_attention_backward(dout, saved)
    exact, dense = expected(**arguments), expected(dtype=np.float32, **arguments)
    for name in ("dq", "dk", "dv"):
        assert_result(name, to_host(getattr(grads, name)), exact, dense)


# --- tiles, state -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "features",
    [[], ["causal", "gqa"], ["window", "dropout"], ["block_mask", "sinks"], ["varlen", "mask"]],
    ids="-".join,
)
@pytest.mark.parametrize("tile", [(1, 1), (16, 64), (7, 5), (1000, 1000)], ids=str)
def test_results_do_not_depend_on_the_tiling(rng, tile, features):
    tiling = cupyflash.Tiling(block_m=tile[0], block_n=tile[1])
    check("numpy", tiling=tiling, **draw(rng, Shape(2, 19, 29, 2, 2, 8, 8), "float32", features))


def test_choose_tiling_returns_what_the_call_uses(engine, rng):
    arguments = draw(rng, Shape(), "float16")
    q, k, v = (to_engine(engine, arguments[name]) for name in "qkv")
    tiling = cupyflash.choose_tiling(q, k, v, engine=engine, causal=True)
    assert isinstance(tiling, cupyflash.Tiling) and "block_m" in repr(tiling)
    implicit = call(engine, causal=True, **arguments)
    explicit = call(engine, causal=True, tiling=tiling, **arguments)
    assert same_bits(implicit.out, explicit.out)


def test_saved_state_holds_inputs_options_and_statistics(engine, rng):
    arguments = draw(rng, Shape(), "float32", ["causal"])
    q, k, v = (to_engine(engine, arguments[name]) for name in "qkv")
    out, saved = cupyflash.flash_attention_forward(q, k, v, causal=True, engine=engine)
    assert saved.out is out
    for mine, kept in ((q, saved.q), (k, saved.k), (v, saved.v)):
        assert to_host(kept) is not None and kept.shape == mine.shape
        assert np.shares_memory(kept, mine) if engine == "numpy" else kept.data.ptr == mine.data.ptr
    assert saved.options.causal is True
    row_max, row_sum, lse = map(to_host, (saved.row_max, saved.row_sum, saved.lse))
    np.testing.assert_allclose(lse, row_max + np.log(row_sum), rtol=1e-6)
    with pytest.raises(AttributeError):
        saved.out = None
    plain = cupyflash.flash_attention(q, k, v, causal=True, engine=engine)
    assert same_bits(to_host(plain), to_host(out))


def test_saved_state_shows_shapes_rather_than_numbers(engine, rng):
    q = to_engine(engine, draw(rng, Shape(), "float32")["q"])
    sinks = to_engine(engine, np.zeros(4, np.float32))
    options = {"causal": True, "sinks": sinks, "engine": engine}
    shown = repr(cupyflash.flash_attention_forward(q, q, q, **options)[1])
    assert "q: shape (2, 37, 4, 24), dtype float32" in shown and "causal=True" in shown
    assert "sinks=array of shape (4,), dtype float32" in shown and "dropout_p" not in shown


def test_score_mod_shows_shapes_rather_than_numbers():
    def forward(score, b, h, i, j, rates):
        return score

    shown = repr(cupyflash.ScoreMod("score", "1", {"rates": np.ones(4)}, numpy_forward=forward))
    start, _, end = shown.partition(forward.__qualname__)
    assert start == (
        "ScoreMod('score', '1', params={rates: shape (4,), dtype float64}, numpy_forward="
    )
    assert end == ")"
    assert repr(cupyflash.ScoreMod("score")) == "ScoreMod('score')"


# --- varlen -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hints",
    [{"max_seqlen_q": 1, "max_seqlen_k": 1}, {"max_seqlen_q": 0}, {"max_seqlen_k": 10**9}],
    ids=str,
)
def test_varlen_hints_are_not_trusted(engine, rng, hints):
    arguments = draw(rng, Shape(), "float32", ["varlen", "causal"])
    right, hinted = call(engine, **arguments), call(engine, **arguments, **hints)
    assert same_bits(right.out, hinted.out) and same_bits(right.dk, hinted.dk)


def test_varlen_without_entries(engine, rng):
    require(engine, "varlen")
    q = rng.normal(size=(5, 2, 8)).astype(np.float32)
    nothing = np.zeros(1, np.int32)
    result = call(engine, q, q, q, dout=q, cu_seqlens=(nothing, nothing))
    assert (result.lse == -np.inf).all()
    assert not any(x.any() for x in (result.out, result.dq, result.dk, result.dv))


def test_varlen_many_short_entries(engine, rng):
    lengths = rng.integers(0, 4, 200)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    q, k, v, dout = (rng.normal(size=(cu_seqlens[-1], 2, 8)).astype(np.float32) for _ in range(4))
    check(engine, q=q, k=k, v=v, dout=dout, cu_seqlens=(cu_seqlens, cu_seqlens), causal=True)


@pytest.mark.parametrize("option", [{"softmax_scale": 1e39}, {"softcap": 1e39}])
def test_options_beyond_float32(engine, rng, option):
    if "softcap" in option:
        require(engine, "softcap")
    q, k, v = (rng.normal(size=(1, 9, 2, 8)).astype(np.float32) for _ in range(3))
    if "softmax_scale" in option:
        q[:] = 0
    result = call(engine, q, k, v, **option)
    expected_out = call(engine, q, k, v).out
    np.testing.assert_allclose(result.out, expected_out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("option", [{"window": [5, 0]}, {"causal": np.True_}])
def test_unhashable_options_twice(engine, rng, option):
    q, k, v = (to_engine(engine, rng.normal(size=(1, 9, 2, 8))) for _ in range(3))
    first, second = (cupyflash.flash_attention(q, k, v, **option) for _ in range(2))
    assert same_bits(to_host(first), to_host(second))


def test_the_backward_takes_any_tiling_of_the_forward(engine, rng):
    q, k, v = (to_engine(engine, rng.normal(size=(1, 70, 1, 128))) for _ in range(3))
    tiling = cupyflash.choose_tiling(q, k, v, engine=engine)
    out, saved = cupyflash.flash_attention_forward(q, k, v, engine=engine, tiling=tiling)
    grads = cupyflash.flash_attention_backward(out, saved)
    assert np.isfinite(to_host(grads.dq)).all()
