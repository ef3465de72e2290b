"""A cache on a device: the host reads no value there, and mixes no NumPy array in."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash._cuda import decode
from tests import kvcache_harness, strict_device
from tests.kvcache_harness import call, check, draw
from tests.unit.test_kvcache_float8 import draw_float8

STORAGE = {
    "contiguous": {}, "part": {"strides": "part"}, "tokens first": {"strides": "tokens first"},
    "by index": {"shuffled": True}, "paged": {"page_size": 8},
}  # fmt: skip
CALLS = {
    "step": {"new": 1, "rotary": 1},
    "prompt": {"new": 3, "seqlen_q": 3, "rotary": 0.5, "leftpad": True},
    "nothing new": {"seqlen_q": 2, "window": (9, 3), "causal": False},
    "window": {"window": (9, 0), "sinks": np.linspace(-1, 1, 4, dtype=np.float32)},
    "alibi": {"new": 1, "alibi_slopes": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)},
}
INDICES = ("cache_seqlens", "cache_leftpad", "cache_batch_idx", "page_table")


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(kvcache_harness, "to_engine", lambda _, x: strict_device.to_device(x))
    monkeypatch.setattr(kvcache_harness, "to_host", strict_device.on_host)
    with strict_device.strict_device():
        yield


@pytest.mark.parametrize("lengths", ["on device", "on host"])
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("kind", CALLS)
def test_the_host_reads_nothing(rng, kind, storage, lengths):
    on_host = INDICES if lengths == "on host" else ()
    for dtype, more in (
        ("float32", {}),
        ("bfloat16", {"num_splits": 3}),
        ("float16", {"batch_invariant": True}),
    ):
        arguments = draw(rng, dtype=dtype, **CALLS[kind], **STORAGE[storage])
        check("numpy", arguments, on_host=on_host, **more)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("fresh", ["16-bit", "FP8"])
def test_the_host_reads_nothing_of_a_float8_cache(rng, storage, fresh):
    for splits in (1, 3):
        rotary = {"rotary": 1} if fresh == "16-bit" else {}
        arguments = draw_float8(rng, fresh=fresh, new=2, **rotary, **STORAGE[storage])
        check("numpy", arguments, num_splits=splits)


def test_lengths_here_and_pages_there(rng):
    arguments = draw(rng, new=1, rotary=1, page_size=8, leftpad=True)
    for on_host in (["cache_seqlens"], ["page_table"], ["cache_leftpad"], ["cache_seqlens"] * 2):
        check("numpy", arguments, on_host=on_host)
    call("numpy", arguments | {"cache_seqlens": 3, "page_table": abs(arguments["page_table"]) % 15})


def test_device_lengths_want_device_queries(rng):
    arguments = draw(rng)
    everything_else = [name for name in arguments if name != "cache_seqlens"]
    with pytest.raises(TypeError, match="cache_seqlens lives on the CUDA device 0"):
        call("numpy", arguments, on_host=everything_else)


@pytest.mark.parametrize("page_size", [None, 4])
def test_dropped_tokens_are_counted(rng, page_size):
    arguments = draw(rng, seqlen_k=12, new=3, page_size=page_size)
    capacity = 12 if page_size else arguments["k_cache"].shape[1]
    if page_size:
        arguments["page_table"] = np.int32([[0, 1, 99], [2, 3, 4], [5, 6, 7]])
    for name in ("k_cache", "v_cache"):
        arguments[name][...] = 1
    arguments["cache_seqlens"] = np.int32([7, capacity - 1, capacity - 3])
    call("numpy", arguments)
    # The first entry's third page does not exist, the second has room for one of three.
    assert strict_device.on_host(decode.faults_of(0)).tolist() == [2 + 2 * bool(page_size), 0]


def test_angles_for_the_whole_capacity_where_lengths_are_unknown(rng):
    arguments = draw(rng, new=1, rotary=1, seqlen_k=9)
    for name in ("rotary_cos", "rotary_sin"):
        arguments[name] = arguments[name][:8]
    with pytest.raises(ValueError, match="capacity of an entry, as cache_seqlens are on device"):
        call("numpy", arguments)
