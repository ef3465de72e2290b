"""Attention over a cache against the cache written out token by token."""

from __future__ import annotations

import random
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyflash
from cupyflash._arrays import HOST
from cupyflash._kvcache import entries as entries_module
from cupyflash._kvcache import storage as storage_module
from cupyflash._kvcache.append import append
from tests import kvcache_reference as reference
from tests import memory
from tests.cases import DTYPES, ENGINE_DTYPES, usual_dtype
from tests.harness import require, same_bits
from tests.kvcache_harness import call, check, draw
from tests.memory import to_engine, to_host
from tests.tolerance import assert_agree

# flash-attn's own matrix of its test of the cache, without its largest.
LENGTHS = (
    (1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (128, 128),
)  # fmt: skip
HEAD_DIMS = (32, 59, 64, 80, 128)
HEADS = ((6, 6), (6, 2), (6, 1))
VARIANTS = {
    "plain": {},
    "causal off": {"causal": False},
    "window": {"window": (100, 0)},
    "window without causal": {"causal": False, "window": (70, 30)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": np.linspace(0, 0.3, 6, dtype=np.float32)},
    "sinks": {"sinks": np.linspace(-1, 4, 6, dtype=np.float32)},
    "scale": {"softmax_scale": 0.3},
}
STORAGE = (
    {}, {"shuffled": True}, {"page_size": 16}, {"page_size": 256}, {"page_size": 1},
    {"strides": "part"}, {"strides": "heads first"}, {"strides": "tokens first"},
    {"strides": "gaps"},
)  # fmt: skip


def matrix() -> list[Any]:
    """Every length with every head_dim; what else there is is dealt like cards."""
    dealer = random.Random(2307)

    def cards(choices: Any) -> Any:
        while True:
            deck = list(choices)
            dealer.shuffle(deck)
            yield from deck

    decks = {
        "variant": cards(VARIANTS), "storage": cards(STORAGE), "heads": cards(HEADS),
        "rotary": cards((0, 0.5, 1)), "new": cards((0, 1, "sq")), "leftpad": cards((False, True)),
        "num_splits": cards((0, 1, 3)), "interleaved": cards((False, True)),
    }  # fmt: skip
    cases = []
    for (sq, sk), head_dim in product(LENGTHS, HEAD_DIMS):
        case = {name: next(deck) for name, deck in decks.items()} | {"head_dim": head_dim}
        new = {"sq": sq}.get(case["new"], case["new"])
        case |= {"seqlen_q": sq, "seqlen_k": sk, "new": new}
        case["rotary"] = case["rotary"] if new else 0
        cases.append(pytest.param(case, id=f"{sq}x{sk}-d{head_dim}-{case['variant']}"))
    return cases


@pytest.mark.parametrize("case", matrix())
def test_matrix(engine, rng, case):
    case = dict(case)
    options = VARIANTS[case.pop("variant")] | case.pop("storage")
    splits, interleaved = case.pop("num_splits"), case.pop("interleaved")
    dtype = str(rng.choice(ENGINE_DTYPES[engine][:3]))
    batch = 1 if case["seqlen_q"] * case["seqlen_k"] > 30_000 else 3
    arguments = draw(rng, dtype=dtype, batch=batch, **case, **options)
    if case["rotary"]:
        arguments["rotary_interleaved"] = interleaved
    check(engine, arguments, num_splits=splits)


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 128), (24, 32), (64, 32)])
def test_a_long_context(engine, rng, page_size, head_dim):
    options = {"dtype": usual_dtype(engine), "heads": (2, 1), "batch": 2, "head_dim": head_dim}
    arguments = draw(rng, seqlen_k=12_000, new=1, page_size=page_size, **options)
    check(engine, arguments)
    check(engine, arguments, num_splits=1)  # so many steps that the page table is asked again


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_another_head_dim_v(engine, rng, dtype):
    for options in ({}, {"page_size": 4}):
        check(engine, draw(rng, new=2, seqlen_q=2, dtype=dtype, head_dim_v=20, **options))


@settings(max_examples=60)
@given(data=st.data())
def test_any_call(engine, data):
    def pick(*choices: Any) -> Any:
        return data.draw(st.sampled_from(choices))

    seqlen_k = data.draw(st.integers(0, 40))
    new = data.draw(st.integers(0, min(seqlen_k, 8)))
    batch, heads = data.draw(st.integers(1, 4)), pick((2, 2), (4, 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    options: dict[str, Any] = {"causal": pick(True, False)}
    if pick(True, False):
        sides = st.none() | st.integers(0, 45)
        options["window"] = data.draw(sides), data.draw(sides)
    if pick(True, False):
        shape = pick((heads[0],), (batch, heads[0]))
        options["alibi_slopes"] = rng.uniform(0, 0.5, shape).astype(np.float32)
    if pick(True, False):
        options["sinks"] = rng.normal(size=heads[0]).astype(np.float32)
    if pick(True, False):
        options["softcap"] = rng.uniform(0.5, 3)
    storage = pick(*STORAGE, {"page_size": 3}, {"page_size": 7}, {"page_size": 32})
    arguments = draw(
        rng, seqlen_q=data.draw(st.integers(1, 9)), seqlen_k=seqlen_k, new=new, batch=batch,
        head_dim=pick(7, 16), heads=heads, leftpad=pick(True, False),
        rotary=pick(0, 0.5, 1) if new else 0,
        dtype=usual_dtype(engine) if new else pick(*ENGINE_DTYPES[engine]), **storage, **options,
    )  # fmt: skip
    arguments["rotary_interleaved"] = pick(True, False)
    check(engine, arguments, num_splits=pick(0, 1, 2, 5, 20), batch_invariant=pick(True, False))


# --- what the arguments mean ----------------------------------------------------------------------


@pytest.mark.parametrize("storage", [{}, {"page_size": 8}, {"shuffled": True}])
def test_a_plain_int_and_none_are_lengths_of_all(engine, rng, storage):
    dtype = usual_dtype(engine)
    arguments = draw(rng, batch=2, seqlen_k=24, new=1, dtype=dtype, **storage)
    arguments["cache_seqlens"] = np.full(2, 5, np.int32)
    table = arguments.get("page_table")
    if table is not None:
        table[...] = rng.permutation(arguments["k_cache"].shape[0])[: table.size].reshape(2, -1)
    for name in ("k_cache", "v_cache"):
        arguments[name][...] = rng.normal(size=arguments[name].shape)
    for length in (5, np.int64(5)):
        check(engine, arguments | {"cache_seqlens": length})
    check(engine, arguments | {"cache_seqlens": None, "k": None, "v": None})


def test_a_step_is_the_last_row_of_the_prompt(engine, rng):
    """Prompt at once, in chunks, and token by token give the same caches and outputs."""
    require(engine, "varlen")
    dtype, length = usual_dtype(engine), 21
    whole = draw(rng, batch=2, seqlen_q=length, seqlen_k=length, new=length, rotary=1, dtype=dtype)
    whole["cache_seqlens"] = 0
    out, lse, key, value = call(engine, whole)
    caches = (x.astype(np.float64) for x in (key, value))
    exact = reference.attention(whole, *caches, np.float64)
    for size in (1, 4):
        part = dict(whole)
        for first in range(0, length, size):
            rows = slice(first, min(first + size, length))
            part |= {name: whole[name][:, rows] for name in ("q", "k", "v")}
            part["cache_seqlens"] = first
            got, got_lse, part["k_cache"], part["v_cache"] = call(engine, part)
            check(engine, part | {"k_cache": part["k_cache"], "v_cache": part["v_cache"]})
            assert_agree("out", got, out[:, rows], exact)
            assert_agree("lse", got_lse, lse[..., rows], exact)
        assert same_bits(part["k_cache"][:, :length], key[:, :length])
        assert same_bits(part["v_cache"][:, :length], value[:, :length])


def test_rotary_turns_queries_together_unless_causal_or_windowed(engine, rng):
    arguments = draw(rng, seqlen_q=3, new=3, rotary=0.5, dtype=usual_dtype(engine))
    for options in ({"causal": False}, {"causal": True}, {"causal": False, "window": (9, None)}):
        for interleaved in (True, False):
            check(engine, arguments | options | {"rotary_interleaved": interleaved})


def test_rotary_by_hand(engine, rng):
    """A quarter turn takes (1, 0) to (0, 1); elements beyond the rotary ones stay."""
    require(engine, "varlen")
    kind = DTYPES[usual_dtype(engine)]
    cache = np.zeros((1, 4, 1, 6), kind)
    new = np.arange(1, 7).astype(kind).reshape(1, 1, 1, 6)
    cos, sin = np.array([[1, 1], [1, 1], [0, 1], [1, 1]], kind), np.zeros((4, 2), kind)
    sin[2, 0] = 1
    arguments = {"q": new, "k_cache": cache, "v_cache": cache.copy(), "k": new, "v": new}
    arguments |= {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": 2}
    _, _, key, value = call(engine, arguments)
    assert key[0, 2, 0].tolist() == [-2, 1, 3, 4, 5, 6] and value[0, 2, 0].tolist() == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    key = call(engine, arguments, rotary_interleaved=False)[2]
    assert key[0, 2, 0].tolist() == [-3, 2, 1, 4, 5, 6]
    assert not key[0, [0, 1, 3]].any()


def test_nothing_in_the_cache(engine, rng):
    dtype = usual_dtype(engine)
    arguments = draw(rng, seqlen_q=2, seqlen_k=6, dtype=dtype)
    arguments["cache_seqlens"] = np.zeros(3, np.int32)
    for splits in (0, 1, 4):
        out, lse = check(engine, arguments, num_splits=splits)
        assert not out.any() and (lse == -np.inf).all()


def test_more_splits_than_keys(engine, rng):
    check(engine, draw(rng, seqlen_k=6, dtype=usual_dtype(engine)), num_splits=10**12)


def test_one_entry_of_the_cache_for_all(engine, rng):
    """A shared prompt: indices may repeat, and the cache may have fewer entries than q."""
    arguments = draw(rng, batch=3, seqlen_k=30, dtype=usual_dtype(engine))
    arguments["cache_seqlens"] = np.int32([30, 30, 7])
    for name in ("k_cache", "v_cache"):
        arguments[name] = rng.normal(size=arguments[name].shape).astype(arguments["q"].dtype)[:1]
    check(engine, arguments | {"cache_batch_idx": np.zeros(3, np.int32)})


def test_keys_and_values_in_one_array(engine, rng):
    arguments = draw(rng, batch=2, new=1, dtype=usual_dtype(engine))
    both = np.stack([arguments["k_cache"], arguments["v_cache"]], axis=2)
    del arguments["k_cache"], arguments["v_cache"]
    require(engine, "varlen")
    placed = {name: to_engine(engine, x) for name, x in arguments.items()}
    packed = to_engine(engine, both)
    cupyflash.flash_attention_with_kvcache(
        k_cache=packed[:, :, 0], v_cache=packed[:, :, 1], **placed
    )
    after = to_host(packed)
    for e, first in enumerate(arguments["cache_seqlens"]):
        for part, name in enumerate("kv"):
            both[e, first, part] = arguments[name][e, 0]
    assert same_bits(after, both)


@pytest.mark.parametrize("storage", [{}, {"page_size": 8}])
def test_an_entry_alone_gives_the_same_bits(engine, rng, storage):
    arguments = draw(rng, batch=4, seqlen_q=2, seqlen_k=50, dtype=usual_dtype(engine), **storage)
    for splits in (0, 3):
        out, lse, _, _ = call(engine, arguments, batch_invariant=True, num_splits=splits)
        for e in range(4):
            one = slice(e, e + 1)
            alone = arguments | {name: arguments[name][one] for name in ("q", "cache_seqlens")}
            if storage:
                alone["page_table"] = arguments["page_table"][one]
            else:
                alone |= {name: arguments[name][one] for name in ("k_cache", "v_cache")}
            got = call(engine, alone, batch_invariant=True, num_splits=splits)
            assert same_bits(got[0], out[one]) and same_bits(got[1], lse[one])


@pytest.mark.parametrize("storage", STORAGE[:3])
def test_lengths_on_the_host(engine, rng, storage):
    """For arrays on any engine."""
    arguments = draw(rng, new=1, leftpad=True, dtype=usual_dtype(engine), **storage)
    indices = [name for name, x in arguments.items() if x.dtype == np.int32]
    assert indices
    check(engine, arguments, on_host=indices)


def test_output_alone(engine, rng):
    require(engine, "varlen")
    arguments = draw(rng, dtype=usual_dtype(engine))
    placed = {name: to_engine(engine, x) for name, x in arguments.items()}
    out = cupyflash.flash_attention_with_kvcache(**placed, engine=engine)
    assert same_bits(to_host(out), call(engine, arguments)[0])


@pytest.mark.parametrize("axis", ["batch", "seqlen_q"])
def test_empty(engine, rng, axis):
    require(engine, "varlen")
    arguments = draw(rng, seqlen_q=2, new=1, dtype=usual_dtype(engine))
    if axis == "batch":
        names = ("q", "k", "v", "cache_seqlens")
        arguments |= {name: arguments[name][:0] for name in names}
    else:
        arguments["q"] = arguments["q"][:, :0]
    for more in ({}, {"batch_invariant": True}, {"num_splits": 3}):
        out, lse, key, _ = call(engine, arguments, **more)
        batch, seqlen_q, heads = arguments["q"].shape[:3]
        assert out.shape == arguments["q"].shape and lse.shape == (batch, heads, seqlen_q)
        assert same_bits(key, arguments["k_cache"]) == (axis == "batch")


# --- lengths that the host does not know ----------------------------------------------------------


@pytest.fixture
def unread(engine):
    """Lengths and page tables as if on a device: clamped by array operations, never checked."""
    if engine not in memory.ON_HOST:
        yield
        return
    nowhere = object()
    with (
        mock.patch.object(entries_module, "HOST", nowhere),
        mock.patch.object(storage_module, "HOST", nowhere),
    ):
        yield


@pytest.mark.parametrize("storage", [{}, {"page_size": 8}, {"shuffled": True}, {"strides": "part"}])
@pytest.mark.parametrize("splits", [0, 3])
def test_device_lengths(engine, rng, unread, storage, splits):
    for more in ({}, {"batch_invariant": True}):
        arguments = draw(
            rng, new=2, seqlen_q=2, rotary=1, leftpad=True, dtype=usual_dtype(engine), **storage
        )
        check(engine, arguments, num_splits=splits, **more)


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize(
    "lengths", [[7, 10, 2], [8, 12, 9], [2**31 - 1, -(2**31), 3], [99, 99, 99]]
)
def test_tokens_that_do_not_fit_are_dropped(engine, rng, unread, lengths, page_size):
    """Room for 10 or 12 tokens, and 3 new ones: what fits is written, and nothing else changes."""
    dtype, new = usual_dtype(engine), 3
    arguments = draw(rng, seqlen_k=12, new=new, seqlen_q=2, dtype=dtype, page_size=page_size)
    capacity = 12 if page_size else arguments["k_cache"].shape[1]
    if page_size:
        pages = len(arguments["k_cache"])
        arguments["page_table"] = rng.permutation(pages)[:9].reshape(3, 3).astype(np.int32)
    for name in ("k_cache", "v_cache"):
        cache = arguments[name]
        cache[...] = rng.normal(size=cache.shape)
    arguments["cache_seqlens"] = np.array(lengths).astype(np.int32)
    out, _, key, value = call(engine, arguments)
    assert np.isfinite(out.astype(np.float32)).all()
    expected = {"k": arguments["k_cache"].copy(), "v": arguments["v_cache"].copy()}
    for e, length in enumerate(np.clip(lengths, 0, capacity)):
        for t in range(min(new, capacity - length)):
            for name, cache in expected.items():
                cache[reference.place(e, length + t, arguments)] = arguments[name][e, t]
    assert same_bits(key, expected["k"]) and same_bits(value, expected["v"])


def test_pages_that_do_not_exist_take_no_token(engine, rng, unread):
    arguments = draw(rng, seqlen_k=12, new=3, dtype=usual_dtype(engine), page_size=4)
    arguments["cache_seqlens"] = np.int32([3, 3, 0])
    arguments["page_table"] = np.int32([[0, 1, -1], [2, -5, 2**31 - 1], [99, 3, 4]])
    for name in ("k_cache", "v_cache"):
        arguments[name][...] = rng.normal(size=arguments[name].shape)
    out, _, key, value = call(engine, arguments)
    assert np.isfinite(out.astype(np.float32)).all()
    expected_key, expected_value = arguments["k_cache"].copy(), arguments["v_cache"].copy()
    for e, t, page, row in ((0, 0, 0, 3), (0, 1, 1, 0), (0, 2, 1, 1), (1, 0, 2, 3)):
        expected_key[page, row], expected_value[page, row] = (
            arguments["k"][e, t],
            arguments["v"][e, t],
        )
    assert same_bits(key, expected_key) and same_bits(value, expected_value)


def test_entries_of_the_cache_that_do_not_exist_take_no_token(engine, rng, unread):
    arguments = draw(rng, seqlen_k=12, new=3, batch=2, dtype=usual_dtype(engine))
    for name in ("k_cache", "v_cache"):
        arguments[name][...] = rng.normal(size=arguments[name].shape)
    arguments |= {"cache_batch_idx": np.int32([-1, 77]), "cache_seqlens": np.int32([0, 0])}
    _, _, key, value = call(engine, arguments)
    assert same_bits(key, arguments["k_cache"]) and same_bits(value, arguments["v_cache"])


def test_append_keeps_the_bits_of_nans(rng):
    storage = storage_module.Storage(
        np.zeros((1, 4, 1, 2), np.float32), np.zeros((1, 4, 1, 2), np.float32), 4, None
    )
    odd = np.full((1, 1, 1, 2), 0x7FA12345, np.uint32).view(np.float32)
    append(storage, odd, odd, np.array([[1]]), HOST)
    assert same_bits(storage.value[:, 1], odd[:, 0])
