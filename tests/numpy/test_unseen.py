"""Whatever lies where nobody looks never reaches a result."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import BlockMask, ScoreMod, Tiling
from tests.cases import Shape
from tests.harness import call, draw, same_bits

SHAPE = Shape(seqlen_q=20, seqlen_k=30, head_dim=8, head_dim_v=6)
TILINGS = [None, Tiling(7, 5), Tiling(64, 16)]
POISONS = [np.nan, np.inf, -np.inf]


def assert_poison_is_unseen(arguments, places, poison, tiling, **options):
    """Results with `poison` in the places ``{name: index}`` are those with 0 there, bit by bit."""
    results = []
    for value in (0, poison):
        drawn = dict(arguments)
        for name, index in places.items():
            drawn[name] = drawn[name].copy()
            drawn[name][index] = value
        results.append(call("numpy", tiling=tiling, **drawn, **options))
    for name, clean, poisoned in zip(results[0]._fields, *results, strict=True):
        if name == "dscore_params" and clean:
            clean, poisoned = clean["gain"], poisoned["gain"]
        elif name == "dscore_params":
            continue
        assert clean is None or same_bits(clean, poisoned), name
        assert clean is None or not np.isnan(clean).any(), name


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(
    "kind", ["key_mask", "mask", "bias", "window", "top_left", "block_mask", "softcap", "score_mod"]
)
def test_keys(rng, kind, poison, tiling):
    keys = rng.permutation(SHAPE.seqlen_k)[:9]
    mask = np.ones((SHAPE.seqlen_q, SHAPE.seqlen_k), bool)
    mask[:, keys] = False
    options = {"mask": mask[:1]}
    if kind == "mask":  # not the same keys for each query, but these for none
        options = {"mask": mask & (rng.random(mask.shape) < 0.7)}
    if kind == "bias":
        options = {"bias": np.where(mask, rng.normal(size=mask.shape), -np.inf).astype("f")}
    if kind == "window":
        keys, options = slice(0, 4), {"window": (6, 0)}
    if kind == "top_left":
        keys, options = slice(20, 30), {"causal": "top-left"}
    if kind == "block_mask":
        blocks = np.ones((1, 1, 4, 5), bool)
        blocks[:, :, :, 3] = False
        keys, options = slice(18, 24), {"block_mask": BlockMask(blocks, (5, 6))}
    if kind == "softcap":
        options["softcap"] = 2.0
    if kind == "score_mod":
        options["score_mod"] = ScoreMod(
            "gain[h] * score * score",
            "2 * gain[h] * score",
            {"gain": np.ones(SHAPE.heads, np.float32)},
            numpy_forward=lambda score, b, h, i, j, gain: gain[h] * score * score,
            numpy_backward=lambda score, b, h, i, j, gain: (
                2 * gain[h] * score,
                {"gain": ((h,), score * score)},
            ),
        )
    arguments = draw(rng, SHAPE, features=["gqa", "dlse", "sinks"])
    places = {"k": (slice(None), keys), "v": (slice(None), keys)}
    assert_poison_is_unseen(arguments, places, poison, tiling, **options)


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("poison", POISONS)
def test_queries_that_see_nothing(rng, poison, tiling):
    rows = rng.permutation(SHAPE.seqlen_q)[:6]
    mask = rng.random((SHAPE.seqlen_q, SHAPE.seqlen_k)) < 0.7
    mask[rows] = False
    for features in (["gqa"], ["gqa", "dropout"]):
        arguments = draw(rng, SHAPE, features=features)
        places = {"q": (slice(None), rows), "dout": (slice(None), rows)}
        assert_poison_is_unseen(arguments, places, poison, tiling, mask=mask)
        arguments |= draw(rng, SHAPE, features=["dlse"]) | {"layout": "bshd"}
        arguments["k"], arguments["v"] = arguments["k"][:, :, :2], arguments["v"][:, :, :2]
        places["dlse"] = (slice(None), slice(None), rows)
        assert_poison_is_unseen(arguments, places, poison, tiling, mask=mask)


@pytest.mark.parametrize("tiling", TILINGS)
def test_sinks_do_not_look_at_queries_that_see_nothing(rng, tiling):
    arguments = draw(rng, SHAPE, features=["sinks", "dlse"])
    mask = np.ones((SHAPE.seqlen_q, 1), bool)
    mask[4:9] = False
    places = {"q": (slice(None), slice(4, 9)), "dout": (slice(None), slice(4, 9))}
    assert_poison_is_unseen(arguments, places, np.nan, tiling, mask=mask)


@pytest.mark.parametrize("tiling", TILINGS)
def test_bias_under_a_mask(rng, tiling):
    arguments = draw(rng, SHAPE)
    arguments["bias"] = rng.normal(size=(SHAPE.seqlen_q, SHAPE.seqlen_k)).astype("f")
    mask = rng.random(arguments["bias"].shape) < 0.6
    assert_poison_is_unseen(arguments, {"bias": ~mask}, np.nan, tiling, mask=mask)


def test_rows_past_the_last_sequence(rng):
    cu = np.array([0, 9, 9, 14], np.int32), np.array([0, 4, 11, 20], np.int32)
    q, k, v, dout = (rng.normal(size=(n, 2, 8)).astype("f") for n in (20, 30, 30, 20))
    arguments = {"q": q, "k": k, "v": v, "dout": dout, "cu_seqlens": cu}
    places = {"q": slice(14, None), "k": slice(20, None), "v": slice(20, None)}
    for tiling in TILINGS:
        for poison in POISONS:
            assert_poison_is_unseen(arguments, places, poison, tiling)
    got = call("numpy", **arguments)
    assert not got.out[14:].any()
    assert not got.dq[14:].any()
    assert not got.dk[20:].any()
    assert not got.dv[20:].any()
    assert not got.row_sum[:, 14:].any()
    assert (got.row_max[:, 14:] == -np.inf).all()
