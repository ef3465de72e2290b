"""Repeated calls on a cache: what they look at again, and what makes them another kind of call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyflash._kvcache import recipe
from cupyflash._kvcache.arguments import CacheArrays
from cupyflash._kvcache.recipe import GivenArrays, Recipe, look_up

B, CAPACITY, NEW, H, HK, D = 2, 64, 1, 4, 2, 16
OPTIONS = (True, (None, 0), None, None, True, 0, False, False, None)
APART = 1 << 20  # between arrays


class FakeArray:
    """What a recipe asks of CuPy's arrays."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any = np.float16) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        steps = np.cumprod([self.dtype.itemsize, *shape[:0:-1]])[::-1]
        self.strides = tuple(int(step) for step in steps)
        self.data = SimpleNamespace(ptr=address, device_id=0)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setattr(recipe, "is_cupy", lambda x: isinstance(x, FakeArray))
    monkeypatch.setattr(recipe, "require_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(recipe, "_recipes", {})


def given(**changes: Any) -> GivenArrays:
    arrays = {
        "q": FakeArray(0, (B, 1, H, D)),
        "k_cache": FakeArray(APART, (B, CAPACITY, HK, D)),
        "v_cache": FakeArray(2 * APART, (B, CAPACITY, HK, D)),
        "k": FakeArray(3 * APART, (B, NEW, HK, D)),
        "v": FakeArray(4 * APART, (B, NEW, HK, D)),
        "cache_seqlens": FakeArray(5 * APART, (B,), np.int32),
    }
    return GivenArrays(**dict.fromkeys(GivenArrays._fields) | arrays | changes)


class Kind:
    """In place of a `KernelCall`: notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, int, int, bool]] = []

    def __call__(self, arrays: Any, length: int, longest: int, wants_lse: bool) -> Any:
        self.calls.append((CacheArrays(*arrays), length, longest, wants_lse))
        return "out", "lse"


def key_of(arrays: GivenArrays, options: tuple[Any, ...]) -> Any:
    return look_up(arrays, options)[0]


def recipe_of(arrays: GivenArrays, angles: int | None = None) -> tuple[Recipe, Kind]:
    kind = Kind()
    call = SimpleNamespace(
        place=SimpleNamespace(device_id=0),
        query=arrays.q,
        new=None if arrays.k is None else (arrays.k, arrays.v),
        storage=SimpleNamespace(key=arrays.k_cache, value=arrays.v_cache, capacity=CAPACITY),
        rotary=None if angles is None else SimpleNamespace(cos=range(angles)),
        rotates_each_query=True,
    )
    between = arrays.v_cache.data.ptr - arrays.k_cache.data.ptr
    return Recipe(kind, call, between), kind  # type: ignore[arg-type]


def ask(known: Recipe, arrays: GivenArrays, wants_lse: bool = False) -> Any:
    """Call a recipe as `flash_attention_with_kvcache` does."""
    return known(look_up(arrays, OPTIONS)[2], arrays.cache_seqlens, wants_lse)


def test_lengths_on_the_device_count_as_full() -> None:
    arrays = given()
    known, kind = recipe_of(arrays)
    assert ask(known, arrays, True) == ("out", "lse")
    ((used, _, longest, wants_lse),) = kind.calls
    assert (longest, wants_lse) == (CAPACITY, True)
    assert used.lengths == arrays.cache_seqlens.data.ptr and used.new_key == arrays.k.data.ptr
    assert used.blocks == 0


def test_an_int_is_looked_at_every_time() -> None:
    known, kind = recipe_of(given(), angles=60)
    for length in (0, 7, 59):
        assert ask(known, given(cache_seqlens=length)) is not None
    assert [call[1:3] for call in kind.calls] == [(0, 1), (7, 8), (59, 60)]
    assert kind.calls[0][0].lengths == 0
    for length in (-1, 60, CAPACITY, 2**40):  # 60: no angles; 64: no room
        assert ask(known, given(cache_seqlens=length)) is None
    assert ask(recipe_of(given())[0], given(cache_seqlens=CAPACITY - 1)) is not None
    assert ask(recipe_of(given())[0], given(cache_seqlens=CAPACITY)) is None


def test_without_lengths_entries_are_full() -> None:
    arrays = given(cache_seqlens=None, k=None, v=None)
    known, kind = recipe_of(arrays)
    ask(known, arrays)
    assert kind.calls[0][1:3] == (CAPACITY, CAPACITY)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_tokens_that_may_overlap_a_cache_are_checked_again(name: str, cache: str) -> None:
    known, _ = recipe_of(given())
    start = getattr(given(), cache).data.ptr
    size, token = B * CAPACITY * HK * D * 2, getattr(given(), name)
    mine = int(np.prod(token.shape)) * 2
    for address, apart in (
        (start - mine, True), (start - mine + 2, False), (start, False),
        (start + size - 2, False), (start + size, True),
    ):  # fmt: skip
        moved = FakeArray(address, token.shape)
        assert (ask(known, given(**{name: moved})) is not None) == apart
    # Without an append nothing is written.
    reading, _ = recipe_of(given(k=None, v=None))
    assert ask(reading, given(k=None, v=None, q=FakeArray(start, (B, 1, H, D)))) is not None


def test_caches_in_one_array_are_taken_as_they_were_checked() -> None:
    """Ranges that meet were once found to share no element; at another distance nobody knows."""
    both = {"v_cache": FakeArray(APART + HK * D * 2, (B, CAPACITY, HK, D))}
    known, _ = recipe_of(given(**both))
    assert ask(known, given(**both)) is not None
    moved = {"v_cache": FakeArray(APART + HK * D * 4, (B, CAPACITY, HK, D))}
    assert ask(known, given(**moved)) is None
    assert ask(known, given()) is not None  # apart: whatever the distance
    assert ask(recipe_of(given())[0], given(**both)) is None


def test_pages_or_indices_are_the_blocks() -> None:
    table, chosen = FakeArray(9 * APART, (B, 4), np.int32), FakeArray(9 * APART, (B,), np.int32)
    for arrays in (given(page_table=table), given(cache_batch_idx=chosen)):
        known, kind = recipe_of(arrays)
        ask(known, arrays)
        assert kind.calls[0][0].blocks == 9 * APART


def test_factors_are_passed_on_unless_they_are_numbers() -> None:
    factors = FakeArray(9 * APART, (B, HK), np.float32)
    for k_descale, used in ((factors, 9 * APART), (2.0, 0), (None, 0)):
        arrays = given(k_descale=k_descale, v_descale=np.float32(3))
        known, kind = recipe_of(arrays)
        ask(known, arrays)
        assert (kind.calls[0][0].key_descale, kind.calls[0][0].value_descale) == (used, 0)


# --- keys -----------------------------------------------------------------------------------------


def test_what_makes_another_kind_of_call() -> None:
    base = key_of(given(), OPTIONS)
    assert base == key_of(given(q=FakeArray(1 << 30, (B, 1, H, D))), OPTIONS)
    assert key_of(given(cache_seqlens=3), OPTIONS) == key_of(given(cache_seqlens=5), OPTIONS)
    others = [
        given(cache_seqlens=3),
        given(cache_seqlens=None),
        given(k=None, v=None),
        given(q=FakeArray(2, (B, 1, H, D))),  # alignment
        given(q=FakeArray(0, (B, 2, H, D))),
        given(q=FakeArray(0, (B, 1, H, D), np.dtype("u2"))),
        given(cache_leftpad=FakeArray(0, (B,), np.int32)),
        given(cache_batch_idx=FakeArray(0, (B,), np.int32)),
    ]
    keys = {key_of(each, OPTIONS) for each in others} | {base}
    assert len(keys) == 1 + len(others)


def test_factors_make_another_kind_of_call_by_value_or_by_form() -> None:
    def factors(address: int, *shape: int) -> FakeArray:
        return FakeArray(address, shape, np.float32)

    different = (None, 1, 1.0, True, 2.0, np.float32(2), factors(0, B, HK), factors(0, 1, HK))
    keys = {key_of(given(k_descale=x), OPTIONS) for x in different}
    keys |= {key_of(given(v_descale=x), OPTIONS) for x in different}
    assert len(keys) == 2 * len(different) - 1 and None not in keys
    same = (given(k_descale=factors(address, B, HK)) for address in (0, APART))
    assert len({key_of(each, OPTIONS) for each in same}) == 1
    for other in (np.ones((B, HK), np.float32), [1.0], object()):
        assert key_of(given(k_descale=other), OPTIONS) is None


def test_options_of_other_types_are_other_calls() -> None:
    keys = {key_of(given(), (causal, *OPTIONS[1:])) for causal in (True, False, 1, 0)} | {
        key_of(given(), (True, window, *OPTIONS[2:])) for window in ((0, 0), (False, 0), (0.0, 0))
    }
    assert len(keys) == 7


def test_calls_whose_values_must_be_looked_at_have_no_key() -> None:
    lengths = np.zeros(B, np.int32)
    for each in (
        given(cache_seqlens=lengths),
        given(cache_seqlens=True),
        given(k=[1]),
        given(v_cache=None),
        given(q=3),
    ):
        assert key_of(each, OPTIONS) is None
    assert key_of(given(), (True, [None, 0], *OPTIONS[2:])) is None


def test_only_calls_without_copies_are_kept() -> None:
    arrays = given()
    key = key_of(arrays, OPTIONS)
    _, kind = recipe_of(arrays)
    call: Any = SimpleNamespace(
        place=SimpleNamespace(device_id=0), query=arrays.q, new=(arrays.k, arrays.v), rotary=None,
        storage=SimpleNamespace(key=arrays.k_cache, value=arrays.v_cache, capacity=CAPACITY),
    )  # fmt: skip
    copied: Any = [*arrays[:5], FakeArray(1 << 40, (B,), np.int32)]
    recipe.remember(key, kind, call, arrays, copied)  # type: ignore[arg-type]
    assert look_up(arrays, OPTIONS)[1] is None
    used: Any = [*arrays[:6], None]
    recipe.remember(key, kind, call, arrays, used)  # type: ignore[arg-type]
    assert look_up(arrays, OPTIONS)[1] is not None
