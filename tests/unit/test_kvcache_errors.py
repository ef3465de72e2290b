"""What a call on a cache refuses: the kind, what the message names, and no byte written."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import UnsupportedError
from cupyflash._kvcache import rows
from tests.harness import require, same_bits
from tests.memory import to_engine, to_host

B, CAPACITY, NEW, H, HK, D, DV = 2, 12, 2, 4, 2, 8, 6
PAGES, PAGE_SIZE = 7, 4


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def index(*numbers: Any) -> np.ndarray:
    return np.array(numbers, np.int32)


def arguments(paged: bool = False) -> dict[str, Any]:
    blocks = (PAGES, PAGE_SIZE) if paged else (B, CAPACITY)
    table = {"page_table": np.arange(B * 3, dtype=np.int32).reshape(B, 3)} if paged else {}
    return table | {
        "q": array(B, 1, H, D), "k_cache": array(*blocks, HK, D), "v_cache": array(*blocks, HK, DV),
        "k": array(B, NEW, HK, D), "v": array(B, NEW, HK, DV), "cache_seqlens": index(3, 5),
        "rotary_cos": array(CAPACITY, D // 2), "rotary_sin": array(CAPACITY, D // 2),
    }  # fmt: skip


NO_ROTARY = {"rotary_cos": None, "rotary_sin": None}
NO_NEW = NO_ROTARY | {"k": None, "v": None}
BAD: list[tuple[Any, str, dict[str, Any]]] = [
    # kinds, dtypes
    (TypeError, "k_cache", {"k_cache": [1.0]}),
    (TypeError, "v_cache", {"v_cache": array(B, CAPACITY, HK, DV, dtype=np.float16)}),
    (TypeError, "k_cache", {"k_cache": array(B, CAPACITY, HK, D, dtype=ml_dtypes.bfloat16)}),
    (TypeError, "k", {"k": array(B, NEW, HK, D, dtype=np.float64)}),
    (TypeError, "cache_seqlens", {"cache_seqlens": np.array([3, 5])}),
    (TypeError, "cache_seqlens", {"cache_seqlens": True}),
    (TypeError, "cache_seqlens", {"cache_seqlens": [3, 5]}),
    (TypeError, "cache_seqlens", {"cache_seqlens": 3.0}),
    (TypeError, "cache_leftpad", {"cache_leftpad": 1}),
    (TypeError, "cache_leftpad", {"cache_leftpad": np.array([1, 2])}),
    (TypeError, "cache_batch_idx", {"cache_batch_idx": np.array([0, 1])}),
    (TypeError, "page_table", {"page_table": np.zeros((B, 3))}),
    (TypeError, "rotary_cos", {"rotary_cos": array(CAPACITY, D // 2, dtype=np.float16)}),
    (TypeError, "rotary_sin", {"rotary_sin": np.ones((CAPACITY, D // 2), int)}),
    (TypeError, "rotary_interleaved", {"rotary_interleaved": 1}),
    (TypeError, "num_splits", {"num_splits": 1.5}),
    (TypeError, "num_splits", {"num_splits": True}),
    (TypeError, "batch_invariant", {"batch_invariant": 1}),
    (TypeError, "return_lse", {"return_lse": None}),
    (TypeError, "causal", {"causal": 1}),
    (TypeError, "window", {"window": 3}),
    (TypeError, "alibi_slopes", {"alibi_slopes": np.ones(H)}),
    (TypeError, "sinks", {"sinks": np.ones(H)}),
    (TypeError, "softmax_scale", {"softmax_scale": "1"}),
    # shapes
    (ValueError, "q", {"q": array(1, H, D)}),
    (ValueError, "q", {"q": array(B + 1, 1, H, D)} | NO_NEW | {"cache_seqlens": 3}),
    (ValueError, "3 heads.* k_cache's 2 heads", {"q": array(B, 1, 3, D)}),
    (ValueError, "k_cache's 12 heads, which are its third axis",
     {"k_cache": array(B, HK, CAPACITY, D), "v_cache": array(B, HK, CAPACITY, DV)}),
    (ValueError, "k_cache", {"k_cache": array(B * CAPACITY, HK, D)}),
    (ValueError, "k_cache", {"k_cache": array(B, CAPACITY, HK, D + 1)}),
    (ValueError, "v_cache", {"v_cache": array(B, CAPACITY + 1, HK, DV)}),
    (ValueError, "k", {"k": array(B, NEW, H, D)}),
    (ValueError, "k", {"k": array(NEW, HK, D)}),
    (ValueError, "v", {"v": array(B, NEW, HK, D)}),
    (ValueError, "v", {"v": array(B, NEW + 1, HK, DV)}),
    (ValueError, "cache_seqlens", {"cache_seqlens": index(3)}),
    (ValueError, "cache_leftpad", {"cache_leftpad": index(1, 2, 3)}),
    (ValueError, "cache_batch_idx", {"cache_batch_idx": index([0], [1])}),
    (ValueError, "rotary_cos", {"rotary_cos": array(CAPACITY)}),
    (ValueError, "rotary_sin", {"rotary_sin": array(CAPACITY, D // 2 - 1)}),
    (ValueError, "rotary_cos", {name: array(CAPACITY, D) for name in NO_ROTARY}),
    (ValueError, "alibi_slopes", {"alibi_slopes": array(H + 1)}),
    (ValueError, "sinks", {"sinks": array(B, H)}),
    # what goes together
    (ValueError, "k is missing", {"k": None}),
    (ValueError, "v is missing", {"v": None}),
    (ValueError, "rotary_sin is missing", {"rotary_sin": None}),
    (ValueError, "rotary_cos", {"k": None, "v": None}),
    (ValueError, "cache_seqlens", {"cache_seqlens": None}),
    # ranges
    (ValueError, "causal", {"causal": "top-left"}),
    (ValueError, "window", {"window": (-1, 0)}),
    (ValueError, "softcap", {"softcap": -1.0}),
    (ValueError, "num_splits", {"num_splits": -1}),
    (ValueError, "cache_seqlens", {"cache_seqlens": -1}),
    (ValueError, "cache_seqlens", {"cache_seqlens": CAPACITY - NEW + 1}),
    (ValueError, "cache_seqlens", {"cache_seqlens": CAPACITY + 1} | NO_NEW),
    (ValueError, "cache_seqlens", {"cache_seqlens": 2**40}),
    (ValueError, "rotary_cos must cover", {n: array(6, D // 2) for n in NO_ROTARY}),
    (ValueError, "rotary_cos must cover", {n: array(8, D // 2) for n in NO_ROTARY}
     | {"q": array(B, 4, H, D)}),
    (ValueError, "k has 13 new tokens",
     {"k": array(B, 13, HK, D), "v": array(B, 13, HK, DV), "cache_seqlens": 0}),
    # beyond what there is
    (UnsupportedError, "head_dim",
     {name: array(B, 3, HK, 257) for name in ("q", "k_cache", "v_cache", "k", "v")} | NO_ROTARY),
]  # fmt: skip
# Values that only the host reads.
BAD_ON_HOST: list[tuple[str, dict[str, Any]]] = [
    ("cache_seqlens", {"cache_seqlens": index(3, -1)}),
    ("cache_seqlens", {"cache_seqlens": index(CAPACITY - NEW + 1, 0)}),
    ("cache_leftpad", {"cache_leftpad": index(-1, 0)}),
    ("cache_leftpad", {"cache_leftpad": index(0, CAPACITY + 1)}),
    ("cache_batch_idx", {"cache_batch_idx": index(0, B)}),
    ("cache_batch_idx", {"cache_batch_idx": index(0, -1)}),
]
BAD_PAGES: list[tuple[str, dict[str, Any]]] = [
    ("page_table", {"page_table": index([0, 1, 2])}),
    ("page_table", {"page_table": index(0, 1)}),
    ("cache_batch_idx", {"cache_batch_idx": index(0, 1)}),
    ("cache_seqlens", {"cache_seqlens": 11}),
    ("pages of no tokens", {"k_cache": array(PAGES, 0, HK, D), "v_cache": array(PAGES, 0, HK, DV)}),
    (r"page_table\[1, 1\] is 7", {"page_table": index([0, 1, -9], [2, PAGES, -9])}),
    (r"page_table\[0, 0\] is -1", {"page_table": index([-1, 1, -9], [2, 3, -9])}),
    (r"page_table\[1, 2\] is -9", {"page_table": index([0, 1, 4], [2, 3, -9]), "cache_seqlens": 7}),
]  # fmt: skip


def refuse(engine: str, error: Any, names: str, given: dict[str, Any], on_host: Any = ()) -> None:
    require(engine, "varlen", "alibi", "sinks")
    placed = {name: to_engine(engine, x) if name not in on_host else x for name, x in given.items()}
    with pytest.raises(error, match=names):
        cupyflash.flash_attention_with_kvcache(**placed)
    for name in ("k_cache", "v_cache"):
        if isinstance(given[name], np.ndarray):
            assert same_bits(to_host(placed[name]), np.ones_like(given[name]))


@pytest.mark.parametrize(("error", "names", "change"), BAD)
def test_refused(engine, error, names, change):
    refuse(engine, error, names, arguments() | change)


@pytest.mark.parametrize(("names", "change"), BAD_ON_HOST)
def test_numbers_that_the_host_knows(engine, names, change):
    refuse(engine, ValueError, names, arguments() | change, on_host=change)


@pytest.mark.parametrize(("names", "change"), BAD_PAGES)
def test_pages(engine, names, change):
    given = arguments(paged=True) | change
    refuse(engine, ValueError, names, given, on_host=("cache_seqlens", "page_table"))


def test_good_arguments_are_taken(engine):
    require(engine, "varlen")
    for given in (arguments(), arguments(paged=True)):
        kind = {name: x for name, x in given.items() if x.dtype == np.float32}
        if engine not in ("numpy", "simt"):
            given |= {name: x.astype(np.float16) for name, x in kind.items()}
        placed = {name: to_engine(engine, x) for name, x in given.items()}
        out = cupyflash.flash_attention_with_kvcache(**placed, engine=engine)
        ones = np.ones((B, 1, H, DV), out.dtype)
        np.testing.assert_allclose(to_host(out), ones, rtol=4 * np.finfo(out.dtype).eps)


def test_caches_that_cannot_be_written():
    for name in ("k_cache", "v_cache"):
        given = arguments()
        given[name].flags.writeable = False
        with pytest.raises(ValueError, match=f"{name} is read-only"):
            cupyflash.flash_attention_with_kvcache(**given)
        without = given | NO_NEW
        assert cupyflash.flash_attention_with_kvcache(**without).shape == (B, 1, H, DV)
        row = np.ones_like(given[name][0, 0])
        strides = (0, 0, *row.strides)
        given[name] = np.lib.stride_tricks.as_strided(row, given[name].shape, strides)
        with pytest.raises(ValueError, match="share memory"):
            cupyflash.flash_attention_with_kvcache(**given)


@pytest.mark.parametrize("form", ["part of longer caches", "pages"])
def test_more_rows_than_can_be_counted_are_refused_before_the_append(monkeypatch, form):
    given = arguments(paged=form == "pages")
    if form != "pages":
        for name in ("k_cache", "v_cache"):
            given[name] = array(B, 10 * CAPACITY, *given[name].shape[2:])[:, :CAPACITY]
    # Two entries, 120 rows apart, of 12 tokens; or as many times the 7 of the longest.
    for most, refused in ((131, True), (132, False)) if form != "pages" else (
        (13, True), (14, False),
    ):  # fmt: skip
        monkeypatch.setattr(rows, "_MOST_ROWS", most)
        if not refused:
            cupyflash.flash_attention_with_kvcache(**given | NO_NEW)
            continue
        given |= {"k": 2 * given["k"], "v": 2 * given["v"]}
        with pytest.raises(UnsupportedError, match=f"are more than {most}"):
            cupyflash.flash_attention_with_kvcache(**given)
        assert (given["k_cache"] == 1).all() and (given["v_cache"] == 1).all()


def test_caches_that_overlap():
    given = arguments()
    given["v_cache"], given["v"] = given["k_cache"], given["k"]
    with pytest.raises(ValueError, match="k_cache overlaps v_cache"):
        cupyflash.flash_attention_with_kvcache(**given)
    assert cupyflash.flash_attention_with_kvcache(**given | NO_NEW).shape == (B, 1, H, D)
    given = arguments()
    given["k"] = given["k_cache"][:, :NEW]
    with pytest.raises(ValueError, match="k_cache overlaps k in memory"):
        cupyflash.flash_attention_with_kvcache(**given)
    assert (given["k_cache"] == 1).all()


def test_a_cache_that_would_be_copied():
    class Copies:
        """A host producer whose memory NumPy cannot take, only copy."""

        def __dlpack__(self, **kwargs: Any) -> Any:
            raise BufferError

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return array(B, CAPACITY, HK, D)

    with pytest.raises(TypeError, match=r"k_cache .* does not share its memory"):
        cupyflash.flash_attention_with_kvcache(**arguments() | {"k_cache": Copies()})


def test_eight_bit_floats():
    names = ("q", "k_cache", "v_cache", "k", "v")
    given = {name: array(B, 3, HK, D, dtype=ml_dtypes.float8_e5m2) for name in names}
    with pytest.raises(UnsupportedError, match="q has dtype float8_e5m2"):
        cupyflash.flash_attention_with_kvcache(**given, cache_seqlens=0)


def test_gpu_engines_want_gpu_arrays():
    with pytest.raises(UnsupportedError, match="simt"):
        cupyflash.flash_attention_with_kvcache(**arguments(), engine="simt")
    with pytest.raises(ValueError, match="engine"):
        cupyflash.flash_attention_with_kvcache(**arguments(), engine="cpu")
