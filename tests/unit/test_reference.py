"""The judge is judged: known answers, finite differences, rounding, and the yardstick itself."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests import cases, reference
from tests.cases import Shape
from tests.harness import draw, expected
from tests.memory import Guarded, poisoned
from tests.tolerance import EPSILON, assert_close, tiny

ONES = 2**32 - 1
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ((ONES,) * 4, (ONES,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (PI[:4], PI[4:], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ],
)
def test_philox_gives_the_published_answers(counter, key, words):
    assert reference.philox(counter, key) == words


def test_dropout_keeps_the_right_share_and_shares_no_word(rng):
    seed = int(rng.integers(2**63))
    keep = reference.dropout_keep(seed, 0.3, (2, 2, 48, 80))
    assert abs(keep.mean() - 0.7) < 5 * np.sqrt(0.3 * 0.7 / keep.size)
    more = reference.dropout_keep(seed, 0.2, (2, 2, 48, 80))
    assert (more | ~keep).all() and more.sum() > keep.sum()
    rows = keep.reshape(-1, 80)
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert len(np.unique(rows.T, axis=0)) == 80


def test_gradients_are_those_of_finite_differences(rng):
    arrays = {
        "q": rng.normal(size=(2, 5, 4, 3)),
        "k": rng.normal(size=(2, 6, 2, 3)),
        "v": rng.normal(size=(2, 6, 2, 4)),
        "bias": rng.normal(size=(4, 1, 6)),
        "sinks": rng.normal(size=4),
    }
    fixed = {
        "keep": reference.dropout_keep(7, 0.3, (2, 4, 5, 6)),
        "dropout_p": 0.3,
        "causal": True,
        "window": (4, None),
        "softcap": 1.5,
        "alibi_slopes": rng.uniform(0, 1, 4),
        "score_mod": (cases.new_score, cases.score_factor),
    }
    dout, dlse = rng.normal(size=(2, 5, 4, 4)), rng.normal(size=(2, 4, 5))
    grads = reference.attention(**arrays, **fixed, dout=dout, dlse=dlse)

    def loss(name, index, step):
        moved = arrays[name].copy()
        moved[index] += step
        dense = reference.attention(**(arrays | {name: moved}), **fixed)
        return (dense.out * dout).sum() + (dense.lse * dlse).sum()

    for name, array in arrays.items():
        for _ in range(8):
            index = tuple(int(rng.integers(n)) for n in array.shape)
            difference = (loss(name, index, 1e-5) - loss(name, index, -1e-5)) / 2e-5
            assert getattr(grads, f"d{name}")[index] == pytest.approx(
                difference, rel=1e-5, abs=1e-7
            )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_rounding_to_16_bits_is_the_dtypes_own(dtype, rng):
    x = rng.normal(size=5000).astype(np.float32) * np.float32(2.0) ** rng.integers(-10, 10, 5000)
    x[:4] = np.inf, -np.inf, 0, np.nan
    np.testing.assert_array_equal(
        reference.Arithmetic(np, dtype).rounded(x), x.astype(dtype).astype(np.float32)
    )


def test_varlen_is_the_entries_one_by_one(rng):
    q, k, v = (rng.normal(size=(9, 2, 4)) for _ in range(3))
    cu_q, cu_k = np.array([0, 3, 3, 7]), np.array([0, 4, 5, 5])
    dense = reference.attention_varlen(q, k, v, cu_q, cu_k, dout=q)
    first = reference.attention(q[None, :3], k[None, :4], v[None, :4], dout=q[None, :3])
    np.testing.assert_array_equal(dense.out[:3], first.out[0])
    np.testing.assert_array_equal(dense.dk[:4], first.dk[0])
    assert (
        not dense.out[3:].any() and not dense.dk[5:].any() and (dense.lse[:, 3:] == -np.inf).all()
    )


@pytest.mark.parametrize(
    ("got", "ok"),
    [
        ([1.0, 2.0, -np.inf, np.nan], True),
        ([1.0, 2.00019, -np.inf, np.nan], True),
        ([1.0, 2.00021, -np.inf, np.nan], False),
        ([np.nan, 2.0, -np.inf, np.nan], False),
        ([1.0, 2.0, -np.inf, 1.0], False),
        ([1.0, 2.0, np.inf, np.nan], False),
        ([1.0, -np.inf, -np.inf, np.nan], False),
    ],
)
def test_tolerance_is_twice_the_naive_error_and_special_values_must_match(got, ok):
    right = np.array([1.0, 2.0, -np.inf, np.nan])
    naive = np.array([1.0, 2.0001, -np.inf, np.nan])
    if ok:
        assert_close(np.float32(got), right, naive)
    else:
        with pytest.raises(AssertionError, match=r"out: .*(off by|wrong places)"):
            assert_close(np.float32(got), right, naive)


NOISY = ["alibi", "bias", "causal", "dlse", "dropout", "gqa", "sinks", "softcap"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("features", [[], NOISY, ["score_mod", "scale"]], ids="-".join)
def test_noise_is_what_rounding_does_and_no_more(rng, features, dtype):
    """The formula in the inputs' own type stays within it; one hidden key in 53 does not."""
    arguments = draw(rng, Shape(), dtype, features)
    exact, dense = expected(**arguments), expected(dtype=cases.DTYPES[dtype], **arguments)
    hidden = np.ones(53, bool)
    hidden[int(rng.integers(20))] = False  # which some query sees, also if causal
    faulty = expected(mask=hidden, **arguments)
    for name, noise in exact.noise.items():
        if name == "dscores":
            continue
        right, naive, wrong = (getattr(x, name) for x in (exact, dense, faulty))
        assert abs(naive - right).max() <= noise + tiny(dtype, abs(right).max()), name
        if name not in ("row_max", "dbias"):  # of one number, a change may be small by luck
            assert abs(wrong - right).max() > 10 * noise, name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_noise_of_16_bits_leaves_room_for_rounded_probabilities(rng, dtype):
    """Of P, dS and the output that D is made of, if never of the scores as in the dense formula."""
    arguments = draw(rng, Shape(), dtype, ["causal"])
    exact, single = expected(**arguments), expected(dtype=np.float32, **arguments)
    unit = EPSILON[dtype]
    for name in ("out", "dq", "dk", "dv"):
        right, noise = getattr(exact, name), exact.noise[name]
        assert abs(getattr(single, name) - right).max() < noise / 10, name
        assert unit / 16 < noise / abs(right).max() < 32 * unit, name  # measured 0.7 to 4.4


def test_the_matrix_covers_every_length_width_and_kind():
    for full in (False, True):
        matrix = cases.matrix(full)
        assert len(set(matrix)) == len(matrix)
        assert {case.seqlens for case in matrix} == set(cases.LENGTHS)
        assert {case.head_dim for case in matrix} == set(cases.HEAD_DIMS)
        assert {case.causal for case in matrix} == set(cases.CAUSAL)
        assert {case.heads for case in matrix} == set(cases.HEADS)
        assert {case.dtype for case in matrix} == set(list(cases.DTYPES)[:3])
    pairs = {(case.causal, case.dtype, case.heads) for case in cases.matrix(full=True)}
    assert len(pairs) == 27


@pytest.mark.parametrize("kind", Guarded.KINDS)
def test_guards_see_a_stray_byte_and_allow_the_view(rng, kind):
    guarded = Guarded("numpy", (2, 3, 4), np.dtype(np.float16), kind, rng)
    guarded.assert_unchanged()
    guarded.view[...] = 0
    guarded.assert_rest_unchanged()
    with pytest.raises(AssertionError, match="bytes of a rejected call"):
        guarded.assert_unchanged()
    outside = guarded._buffer[guarded._outside]
    outside[rng.integers(outside.size)] = 0
    guarded._buffer[guarded._outside] = outside
    with pytest.raises(AssertionError, match="around"):
        guarded.assert_rest_unchanged()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_poisoned_memory_is_nan(dtype):
    with poisoned("numpy"):
        x, y = np.empty((3, 4), cases.DTYPES[dtype]), np.empty_like(np.zeros(2, bool))
    assert np.isnan(x.astype(np.float64)).all() and y.dtype == bool
    assert np.empty.__name__ == "empty"  # and only there
