"""Relations that must hold between calls, whatever the right values are."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import cupyflash
from tests.cases import DTYPES, Shape, usual_dtype
from tests.harness import DEPUTIES, call, check, compare, draw, expected, require, same_bits
from tests.memory import to_engine, to_host
from tests.tolerance import EPSILON, assert_agree, assert_close, assert_result

PARTS = ("out", "row_max", "row_sum", "lse", "dq", "dk", "dv")


def assert_same(a, b, names=PARTS):
    for name in names:
        assert same_bits(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads_are_repeated_heads(engine, rng, dtype):
    arguments = draw(rng, Shape(heads=6), dtype)
    grouped = arguments | {name: arguments[name][:, :, [0, 3]] for name in ("k", "v")}
    repeated = grouped | {name: np.repeat(grouped[name], 3, axis=2) for name in ("k", "v")}
    few, many = call(engine, **grouped), call(engine, **repeated)
    assert_same(few, many, PARTS[:4])
    exact = expected(**grouped)
    compare(few, exact, **grouped)
    for name in ("dk", "dv"):  # the sum of the repeated heads' gradients, each rounded once
        wide = getattr(many, name).astype(np.float64).reshape(2, 53, 2, 3, -1)
        noise = 2 * exact.noise[name] + 3 / 2 * EPSILON[dtype] * abs(wide).max()
        assert_close(getattr(few, name), wide.sum(3), wide.sum(3), name=name, noise=noise)


def test_the_order_of_keys_does_not_matter(engine, rng):
    arguments = draw(rng, Shape(), "float32")
    order = rng.permutation(53)
    permuted = arguments | {name: arguments[name][:, order] for name in ("k", "v")}
    plain, mixed = call(engine, **arguments), call(engine, **permuted)
    unmixed = mixed._replace(dk=np.empty_like(mixed.dk), dv=np.empty_like(mixed.dv))
    unmixed.dk[:, order], unmixed.dv[:, order] = mixed.dk, mixed.dv
    exact = expected(**arguments)
    compare(unmixed, exact, **arguments)
    for name in PARTS:
        assert_agree(name, getattr(plain, name), getattr(unmixed, name), exact)


@pytest.mark.parametrize("signs", [(1, 1), (-1, -1), (1, -1), (-1, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scores_of_one_sign(engine, rng, head_dim, signs):
    """Maxima may be found among bits: of all scores, and of those in each half of the keys.

    Tensor cores cut sums off towards 0, which adds up if all terms have one sign: few have not 0.
    """
    arguments = draw(rng, Shape(1, 150, 300, head_dim=head_dim, head_dim_v=head_dim), "float16")
    query, key = abs(arguments["q"]), abs(arguments["k"])
    key[..., 32:] = 0
    key[:, :150] *= np.float16(signs[0])
    key[:, 150:] *= np.float16(signs[1])
    check(engine, **(arguments | {"q": query, "k": key}))


def test_batch_entries_and_heads_are_independent(engine, rng):
    arguments = draw(rng, Shape(batch=3), "float16", ["causal"])
    whole = call(engine, **arguments)
    for entry in range(3):
        one = slice(entry, entry + 1)
        alone = {n: x[one] for n, x in arguments.items() if isinstance(x, np.ndarray)}
        part = call(engine, **(arguments | alone))
        for name in PARTS:
            assert same_bits(getattr(whole, name)[one], getattr(part, name)), name
    for head in range(4):
        one = slice(head, head + 1)
        alone = {n: x[:, :, one] for n, x in arguments.items() if isinstance(x, np.ndarray)}
        part = call(engine, **(arguments | alone))
        assert same_bits(whole.out[:, :, one], part.out)
        assert same_bits(whole.lse[:, one], part.lse)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("entry", [0, 1])
def test_what_an_entry_holds_does_not_reach_others(engine, rng, entry, name, value):
    """Nor the tokens past the last entry."""
    require(engine, "varlen")
    arguments = draw(rng, Shape(1, 33, 53), usual_dtype(engine))
    for each in ("q", "k", "v", "dout"):
        arguments[each] = arguments[each][0]
    cu_seqlens = np.int32([0, 5, 30]), np.int32([0, 7, 50])
    # The sums of dq have one term each: their order cannot matter.
    arguments |= {"cu_seqlens": cu_seqlens, "deterministic": False}
    clean = call(engine, **arguments)
    held = cu_seqlens[name in ("k", "v")]
    arguments[name][held[entry] : held[entry + 1]] = value
    result = call(engine, **arguments)
    for part in PARTS:
        bounds = cu_seqlens[part in ("dk", "dv")]
        tokens = -1 if part in ("lse", "row_max", "row_sum") else 0
        others = np.r_[: bounds[entry], bounds[entry + 1] : getattr(clean, part).shape[tokens]]
        kept, expected = (np.take(getattr(x, part), others, tokens) for x in (result, clean))
        if engine in DEPUTIES:  # which may do such a call again
            np.testing.assert_allclose(
                *(np.float64(x) for x in (kept, expected)), rtol=0.02, atol=0.02, err_msg=part
            )
        else:
            assert same_bits(kept, expected), part


@pytest.mark.parametrize("seqlens", [(40, 40), (40, 70), (70, 40)])
def test_window_open_to_the_left_is_causal(engine, rng, seqlens):
    require(engine, "window")
    arguments = draw(rng, Shape(1, *seqlens, 2, 2, 16, 16))
    causal = call(engine, causal=True, **arguments)
    assert_same(causal, call(engine, window=(None, 0), **arguments))
    assert_same(causal, call(engine, causal="bottom-right", **arguments))
    assert_same(causal, call(engine, causal=True, window=(None, 9), **arguments))


def test_both_alignments_agree_on_squares(engine, rng):
    arguments = draw(rng, Shape(seqlen_q=61, seqlen_k=61), "float16")
    assert_same(
        call(engine, causal="bottom-right", **arguments),
        call(engine, causal="top-left", **arguments),
    )


def test_causal_is_a_mask(engine, rng):
    require(engine, "mask")
    arguments = draw(rng, Shape(), "float32")
    seen = np.arange(53) <= np.arange(37)[:, None] + 53 - 37
    as_mask = call(engine, mask=seen, **arguments)
    exact = expected(causal=True, **arguments)
    compare(as_mask, exact, causal=True, **arguments)
    compare(call(engine, causal=True, **arguments), exact, causal=True, **arguments)


def test_varlen_of_equal_lengths_is_dense(engine, rng):
    arguments = draw(rng, Shape(), "float32", ["gqa", "causal", "dlse"])
    dense = call(engine, **arguments)
    packed = {name: arguments[name].reshape(-1, *arguments[name].shape[2:])
              for name in ("q", "k", "v", "dout")}  # fmt: skip
    packed["dlse"] = np.concatenate(list(arguments["dlse"]), axis=1)
    cu_seqlens = tuple(np.arange(3, dtype=np.int32) * n for n in (37, 53))
    varlen = call(engine, cu_seqlens=cu_seqlens, **(arguments | packed))
    exact = expected(**arguments)
    for name in ("out", "dq", "dk", "dv"):
        mine, right = getattr(varlen, name), getattr(dense, name)
        assert_agree(name, mine.reshape(right.shape), right, exact)
    assert_agree("lse", np.stack(np.split(varlen.lse, 2, axis=1)), dense.lse, exact)


@pytest.mark.parametrize("features", [[], ["causal", "gqa", "dlse"], ["bias", "dropout"]], ids=str)
def test_layouts_agree(engine, rng, features):
    arguments = draw(rng, Shape(), "float16", features)
    heads_first = arguments | {"layout": "bhsd"}
    for name in ("q", "k", "v", "dout"):
        heads_first[name] = np.ascontiguousarray(arguments[name].swapaxes(1, 2))
    one, other = call(engine, **arguments), call(engine, **heads_first)
    assert_same(one, other, PARTS[1:4])
    for name in ("out", "dq", "dk", "dv"):
        assert same_bits(getattr(one, name), getattr(other, name).swapaxes(1, 2).copy()), name


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_three_axes_mean_one_entry(engine, rng, layout):
    arguments = draw(rng, Shape(batch=1), "float16", ["causal", "gqa", "dlse"], layout)
    flat = {n: x[0] if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    batched, single = call(engine, **arguments), call(engine, **flat)
    for name in PARTS:
        assert same_bits(getattr(batched, name)[0], getattr(single, name)), name


@pytest.mark.parametrize("scale", [0.25, 2.0, -0.5])
def test_powers_of_two_fold_into_the_scale(engine, rng, scale):
    arguments = draw(rng, Shape(), "float32")
    folded = arguments | {"q": arguments["q"] * np.float32(2), "softmax_scale": scale / 2}
    one, other = call(engine, softmax_scale=scale, **arguments), call(engine, **folded)
    assert_same(one, other, ["out", "lse", "dv"])
    assert_agree("dq", one.dq, 2 * other.dq, expected(softmax_scale=scale, **arguments))


def test_a_constant_bias_moves_lse_only(engine, rng):
    require(engine, "bias")
    arguments = draw(rng, Shape(), "float64")
    shift = rng.normal(size=(1, 4, 37, 1)) * 10
    plain, moved = call(engine, **arguments), call(engine, bias=shift, **arguments)
    np.testing.assert_allclose(moved.out, plain.out, atol=1e-13)
    np.testing.assert_allclose(moved.lse, plain.lse + shift[..., 0], atol=1e-13)
    np.testing.assert_allclose(moved.dq, plain.dq, atol=1e-12)
    np.testing.assert_allclose(moved.dbias, np.zeros_like(shift), atol=1e-12)


def test_backward_is_linear_in_dout_and_dlse(engine, rng):
    arguments = draw(rng, Shape(), "float64", ["causal", "dlse"])
    other = draw(rng, Shape(), "float64", ["causal", "dlse"])
    a, b = 0.7, -1.9
    mixed = arguments | {n: a * arguments[n] + b * other[n] for n in ("dout", "dlse")}
    second = arguments | {n: other[n] for n in ("dout", "dlse")}
    first, second, both = (call(engine, **x) for x in (arguments, second, mixed))
    for name in ("dq", "dk", "dv"):
        combined = a * getattr(first, name) + b * getattr(second, name)
        np.testing.assert_allclose(getattr(both, name), combined, atol=1e-12)


def test_a_loss_on_lse_alone_leaves_values_alone(engine, rng):
    arguments = draw(rng, Shape(), "float32", ["dlse", "causal"])
    arguments["dout"] = np.zeros_like(arguments["dout"])
    result = call(engine, **arguments)
    assert not result.dv.any() and result.dq.any()
    compare(result, expected(**arguments), **arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_deterministic_backward_repeat_their_bits(engine, rng, dtype):
    arguments = draw(rng, Shape(2, 130, 150, 4, 4, 32, 32), dtype, ["causal", "gqa"])
    first = call(engine, deterministic=True, **arguments)
    for _ in range(3):
        assert_same(first, call(engine, deterministic=True, **arguments))


@pytest.mark.parametrize(
    "features", [["causal"], ["bias", "sinks"], ["dropout", "varlen"]], ids=str
)
def test_backward_of_one_saved_state_twice(engine, rng, features):
    require(engine, *features)
    arguments = draw(rng, Shape(), "float16", features)
    dout, cu_seqlens = arguments.pop("dout"), arguments.pop("cu_seqlens", None)
    arrays = [to_engine(engine, arguments.pop(name)) for name in "qkv"]
    options = {name: to_engine(engine, value) for name, value in arguments.items()}
    if cu_seqlens is None:
        _, saved = cupyflash.flash_attention_forward(*arrays, engine=engine, **options)
    else:
        cu_seqlens = [to_engine(engine, cu) for cu in cu_seqlens]
        _, saved = cupyflash.flash_attention_varlen_forward(
            *arrays, *cu_seqlens, engine=engine, **options
        )
    kept = [to_host(x).copy() for x in (saved.out, saved.row_max, saved.row_sum, *arrays)]
    dout = to_engine(engine, dout)
    first, second = (
        cupyflash.flash_attention_backward(dout, saved, deterministic=True) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert (one is None) == (other is None)
        assert one is None or same_bits(to_host(one), to_host(other))
    for before, after in zip(kept, (saved.out, saved.row_max, saved.row_sum, *arrays), strict=True):
        assert same_bits(before, to_host(after))


# --- merging ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_split_of_the_keys_merges_to_the_whole(engine, rng, dtype, stacked):
    arguments = draw(rng, Shape(), dtype)
    del arguments["dout"]
    whole = call(engine, **arguments)
    cuts = [0, 5, 5, 37, 53]
    parts = [
        call(engine, **(arguments | {name: arguments[name][:, low:high] for name in ("k", "v")}))
        for low, high in pairwise(cuts)
    ]
    outs = [to_engine(engine, part.out) for part in parts]
    lses = [to_engine(engine, part.lse) for part in parts]
    if stacked:
        outs = to_engine(engine, np.stack([part.out for part in parts]))
        lses = to_engine(engine, np.stack([part.lse for part in parts]))
    out, lse = map(to_host, cupyflash.merge_states(outs, lses))
    exact, dense = expected(**arguments), expected(dtype=DTYPES[dtype], **arguments)
    assert_result("out", out, exact, dense)
    assert_result("lse", lse, exact, dense)
    assert out.dtype == whole.out.dtype and lse.dtype == whole.lse.dtype


def test_merging_with_nothing_changes_nothing(engine, rng):
    arguments = draw(rng, Shape(), "float32")
    del arguments["dout"]
    whole = call(engine, **arguments)
    outs = [to_engine(engine, x) for x in (whole.out, np.zeros_like(whole.out))]
    lses = [to_engine(engine, x) for x in (whole.lse, np.full_like(whole.lse, -np.inf))]
    out, lse = map(to_host, cupyflash.merge_states(outs, lses))
    assert same_bits(out, whole.out) and same_bits(lse, whole.lse)


def test_merged_output_dtype(engine, rng):
    outs = [to_engine(engine, rng.normal(size=(1, 5, 2, 8)).astype(np.float32)) for _ in range(2)]
    lses = [to_engine(engine, rng.normal(size=(1, 2, 5)).astype(np.float32)) for _ in range(2)]
    out, lse = cupyflash.merge_states(outs, lses, out_dtype=np.float16)
    assert (out.dtype, lse.dtype) == (np.float16, np.float32)
