"""The kernels of a key-value cache: what the shared tests of the cache leave out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash._cuda import decode
from cupyflash._kvcache import kernels
from tests import kvcache_harness
from tests.harness import same_bits
from tests.kvcache_harness import call, check, draw
from tests.memory import to_engine, to_host

FAULTS_AT = 0  # GPU whose counters are read

# seqlen_q, heads, head_dim, head_dim_v, page_size, seqlen_k, num_splits: blocks of one tile of 16
# rows, of 32, of 64, and several; splits that are whole, ragged and empty.
SHAPES = (
    (1, (8, 2), 64, 64, None, 300, 1),
    (1, (8, 1), 128, 128, 16, 150, 2),
    (1, (2, 2), 256, 256, 64, 90, 1),
    (1, (4, 1), 32, 160, None, 200, 0),
    (5, (8, 2), 128, 128, 7, 130, 3),
    (3, (3, 3), 59, 20, 1, 100, 2),
    (9, (8, 1), 64, 64, 256, 280, 1),
    (40, (4, 2), 96, 96, None, 70, 1),
    (20, (4, 1), 160, 160, 16, 70, 2),
    (2, (4, 4), 128, 64, 3, 77, 20),
    (70, (12, 2), 64, 64, 16, 90, 0),
)
CHANGES: dict[str, dict[str, Any]] = {
    "window": {"window": (37, 0)},
    "window on both sides": {"causal": False, "window": (20, 9)},
    "softcap": {"softcap": 1.5, "causal": False},
    "large softcap": {"softcap": 100.0, "softmax_scale": 40.0},
    "alibi by entry": {"alibi_slopes": np.linspace(0, 0.4, 6, dtype=np.float32).reshape(2, 3)},
    "sinks": {"sinks": np.array([-1, 4, -np.inf], np.float32)},
    "sinks and softcap": {"sinks": np.linspace(-1, 4, 3, dtype=np.float32), "softcap": 2.0},
    "negative scale": {"softmax_scale": -0.1},
    "no scale": {"softmax_scale": 0.0},
}


@pytest.fixture(autouse=True)
def served(engine, monkeypatch):
    """Calls of a test go to the kernels, all of them."""
    if engine != "mma":
        pytest.skip("the kernels of a cache belong to mma")
    run, count = kernels.run, []
    original = cupyflash.flash_attention_with_kvcache

    def counted(*args: Any) -> Any:
        count.append(1)
        return run(*args)

    def checked(*args: Any, **options: Any) -> Any:
        before = len(count)
        result = original(*args, **options)
        assert len(count) == before + 1, "other code served this call"
        return result

    monkeypatch.setattr(kernels, "run", counted)
    monkeypatch.setattr(kvcache_harness.cupyflash, "flash_attention_with_kvcache", checked)
    # A look-up would serve it without `run`.
    monkeypatch.setattr("cupyflash._kvcache.recipe.look_up", lambda *_: (None, None, []))


def sixteen_bits(rng: Any) -> str:
    return str(rng.choice(["float16", "bfloat16"]))


def call_of(shape, rng):
    """What to draw for one of `SHAPES`, and the number of splits."""
    seqlen_q, heads, head_dim, head_dim_v, page_size, seqlen_k, splits = shape
    drawn = {
        "seqlen_q": seqlen_q, "heads": heads, "head_dim": head_dim, "head_dim_v": head_dim_v,
        "page_size": page_size, "seqlen_k": seqlen_k, "batch": 2,
        "new": int(rng.integers(1, seqlen_q + 1)), "rotary": float(rng.choice([0, 0.5, 1])),
        "leftpad": page_size is not None, "causal": bool(rng.integers(2)),
    }  # fmt: skip
    return drawn, splits


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_of_a_block(engine, rng, shape):
    drawn, splits = call_of(shape, rng)
    arguments = draw(rng, dtype=sixteen_bits(rng), **drawn)
    arguments["rotary_interleaved"] = bool(rng.integers(2))
    check(engine, arguments, num_splits=splits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_scores(engine, rng, change, splits):
    # Nine rows, so that a lane has rows of two heads; three steps of 64 keys, the last of which
    # hides keys from some rows alone.
    arguments = draw(
        rng, seqlen_q=3, seqlen_k=160, head_dim=96, batch=2, heads=(3, 1), dtype="float16",
        leftpad=True, **CHANGES[change],
    )  # fmt: skip
    check(engine, arguments, num_splits=splits)


@pytest.mark.parametrize("strides", ["part", "heads first", "tokens first"])
def test_strides(engine, rng, strides):
    for head_dim in (32, 33):
        arguments = draw(
            rng, strides=strides, head_dim=head_dim, new=1, dtype=sixteen_bits(rng), shuffled=True
        )
        check(engine, arguments, num_splits=2)


def test_rows_whose_splits_are_all_empty(engine, rng):
    for options in ({}, {"sinks": np.array([0, 2, -np.inf, 1], np.float32)}):
        arguments = draw(rng, seqlen_q=2, seqlen_k=70, dtype="bfloat16", **options)
        arguments["cache_seqlens"] = np.int32([0, 1, 70])
        for name in ("k_cache", "v_cache"):
            arguments[name][1, 0] = 1
        for splits in (1, 2, 5, 128):
            out, lse = check(engine, arguments, num_splits=splits)
            assert not out[0].any() and not out[1, 0].any()
            if not options:
                assert (lse[0] == -np.inf).all() and (lse[1, :, 0] == -np.inf).all()


# --- an entry's bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_an_entry_alone_in_another_cache_gives_the_same_bits(engine, rng, seqlen_q):
    """Whatever else is in the batch, how much room there is, and in which pages it lies."""
    length = 2500  # two splits of a fixed size
    arguments = draw(
        rng, batch=3, seqlen_q=seqlen_q, seqlen_k=length, heads=(2, 1), head_dim=32,
        dtype=sixteen_bits(rng),
    )  # fmt: skip
    arguments["cache_seqlens"] = used = np.int32([length, 17, 2049])
    for name in ("k_cache", "v_cache"):
        arguments[name][...] = rng.normal(size=arguments[name].shape)
    out, lse = check(engine, arguments, batch_invariant=True)
    for e, page_size in enumerate((None, 7, 64)):
        alone = {"q": arguments["q"][e : e + 1], "cache_seqlens": used[e : e + 1]}
        pages = -(-5000 // (page_size or 5000))
        order = rng.permutation(pages).astype(np.int32)
        for name in ("k_cache", "v_cache"):
            tokens = arguments[name][e, : used[e]]
            room = np.full((pages * (page_size or 5000), *tokens.shape[1:]), np.nan, tokens.dtype)
            room[: used[e]] = tokens
            alone[name] = np.empty((pages, page_size or 5000, *tokens.shape[1:]), tokens.dtype)
            alone[name][order] = room.reshape(alone[name].shape)
        if page_size:
            alone["page_table"] = order[None]
        got = call(engine, alone, batch_invariant=True)
        assert same_bits(got[0][0], out[e]) and same_bits(got[1][0], lse[e])


def test_the_same_bits_in_every_run(engine, rng):
    arguments = draw(rng, seqlen_k=150, new=1, rotary=1, page_size=16, dtype="bfloat16")
    first = call(engine, arguments, num_splits=3)
    for _ in range(2):
        again = call(engine, arguments, num_splits=3)
        assert all(map(same_bits, first, again))


# --- values that the host does not read -----------------------------------------------------------


def faults() -> list[int]:
    counters = decode.faults_of(FAULTS_AT)
    values = to_host(counters).tolist()
    counters[...] = 0
    return values


def on_the_device(monkeypatch: Any) -> None:
    """Emulated: lengths and pages are not looked at, as if they were on a device."""
    for module in ("entries", "storage"):
        monkeypatch.setattr(f"cupyflash._kvcache.{module}.HOST", object())


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("lengths", [[7, 10, 2], [12, 9, 3], [2**31 - 1, -(2**31), 3]])
def test_what_does_not_fit_is_reported(engine, rng, monkeypatch, lengths, page_size):
    on_the_device(monkeypatch)
    new, capacity = 3, 12
    arguments = draw(rng, seqlen_k=capacity, new=new, dtype="float16", page_size=page_size)
    if page_size:
        arguments["page_table"] = rng.permutation(12)[:9].reshape(3, 3).astype(np.int32)
    else:
        for name in ("k_cache", "v_cache"):
            arguments[name] = arguments[name][:, :capacity]
    for name in ("k_cache", "v_cache"):
        arguments[name][...] = rng.normal(size=arguments[name].shape)
    arguments["cache_seqlens"] = np.array(lengths).astype(np.int32)
    faults()
    call(engine, arguments)
    inside = np.clip(lengths, 0, capacity)
    dropped = int(np.maximum(0, inside + new - capacity).sum())
    assert faults() == [dropped, int((inside != lengths).any())]
    call(engine, arguments | {"cache_seqlens": np.int32([1, 9, 0])})
    assert faults() == [0, 0]


def test_pages_that_do_not_exist_are_reported(engine, rng, monkeypatch):
    on_the_device(monkeypatch)
    arguments = draw(rng, seqlen_k=12, dtype="float16", page_size=4)
    for name in ("k_cache", "v_cache"):
        arguments[name][...] = rng.normal(size=arguments[name].shape)
    arguments["cache_seqlens"] = np.int32([4, 8, 12])
    good = np.int32([[0, 99, -1], [1, 2, 99], [3, 4, 5]])
    faults()
    call(engine, arguments | {"page_table": good})
    assert faults() == [0, 0]
    for entry, page, number in ((0, 0, -1), (1, 1, 12), (2, 2, 2**31 - 1)):
        bad = good.copy()
        bad[entry, page] = number
        out, _, _, _ = call(engine, arguments | {"page_table": bad})
        assert np.isfinite(out).all()
        assert faults() == [0, 1]


def test_left_padding_outside_the_cache_is_reported(engine, rng, monkeypatch):
    on_the_device(monkeypatch)
    arguments = draw(rng, seqlen_k=12, dtype="float16", leftpad=True)
    for name in ("k_cache", "v_cache"):
        arguments[name][...] = rng.normal(size=arguments[name].shape)
    for pad in ([-1, 0, 0], [0, 99, 0]):
        faults()
        out, _, _, _ = call(engine, arguments | {"cache_leftpad": np.int32(pad)})
        assert np.isfinite(out).all() and faults() == [0, 1]


@pytest.mark.parametrize("page_size", [None, 4])
def test_nothing_around_the_cache_is_written(engine, rng, monkeypatch, page_size):
    """The caches lie inside larger arrays, whose other bytes stay as they are."""
    on_the_device(monkeypatch)
    arguments = draw(rng, seqlen_k=12, new=3, rotary=1, dtype="float16", page_size=page_size)
    around = {}
    for name in ("k_cache", "v_cache"):
        cache = arguments[name]
        shape = [n + 4 for n in cache.shape]
        around[name] = to_engine(engine, rng.normal(size=shape).astype(np.float16))
    inner = (slice(2, -2),) * 4
    before = {name: to_host(x).copy() for name, x in around.items()}
    lengths = rng.choice([-(2**31), -1, 0, 9, 11, 12, 13, 2**31 - 1], 3).astype(np.int32)
    arguments["cache_seqlens"] = lengths
    if page_size:
        numbers = [-(2**31), -1, 0, 1, 11, 12, 2**31 - 1]
        arguments["page_table"] = rng.choice(numbers, (3, 3)).astype(np.int32)
    placed = {name: to_engine(engine, x) for name, x in arguments.items()}
    placed |= {name: x[inner] for name, x in around.items()}
    cupyflash.flash_attention_with_kvcache(**placed, engine=engine)
    for name, x in around.items():
        changed = to_host(x) != before[name]
        changed[inner] = False
        assert not changed.any(), name
    faults()
