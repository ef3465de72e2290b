"""Repeated calls on a cache on a GPU, by its kernels: look-ups, bits, graphs, streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash._kvcache import kernels, recipe
from cupyflash.kvcache import take_faults
from tests.harness import same_bits
from tests.kvcache_harness import call, draw
from tests.memory import to_engine, to_host
from tests.unit.test_kvcache_float8 import draw_float8

cupy = pytest.importorskip("cupy")
CACHES = ("k_cache", "v_cache")


@pytest.fixture(autouse=True)
def served(engine, monkeypatch):
    if engine != "mma":
        pytest.skip("the kernels of a cache belong to mma")
    monkeypatch.setattr(recipe, "_recipes", {})


def placed(engine: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: to_engine(engine, x) for name, x in arguments.items()}


def attend(arguments: dict[str, Any], **more: Any) -> Any:
    return cupyflash.flash_attention_with_kvcache(**arguments, return_lse=True, **more)


def bits(*arrays: Any) -> list[bytes]:
    return [to_host(x).tobytes() for x in arrays]


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_call_that_is_looked_up_does_the_same(engine, rng, monkeypatch, page_size):
    arguments = draw(
        rng, seqlen_k=150, new=1, rotary=1, leftpad=True, page_size=page_size, dtype="bfloat16"
    )
    first, second = placed(engine, arguments), placed(engine, arguments)
    results = attend(first)
    monkeypatch.setattr(kernels, "run", None)  # what is not looked up fails
    again = attend(second)
    assert bits(*results) == bits(*again)
    for name in CACHES:
        assert bits(first[name]) == bits(second[name])


def test_factors_of_a_float8_cache_are_those_of_each_call(engine, rng):
    """Numbers make a call of their own, arrays may change in place."""
    arguments = draw_float8(rng, seqlen_k=150, new=1, page_size=16)
    own = np.float32([[1, 2], [3, 4], [5, 6]])
    device = to_engine(engine, own)
    for factor in (0.5, 2.0, own, own / 3):
        arguments |= {"k_descale": factor, "v_descale": factor}
        right = call(engine, arguments)
        each = placed(engine, arguments)
        if factor is not own and isinstance(factor, np.ndarray):
            device[...] = each["k_descale"]
        if isinstance(factor, np.ndarray):
            each |= {"k_descale": device, "v_descale": device}
        assert bits(*attend(each)) == [x.tobytes() for x in right[:2]]


def test_steps_of_generation_with_an_int(engine, rng):
    """One int after another, as many splits as that asks for, checked against the prompt."""
    length, dtype = 40, "float16"
    whole = draw(
        rng, batch=2, seqlen_q=length, seqlen_k=length, new=length, rotary=1, head_dim=64,
        dtype=dtype,
    )  # fmt: skip
    whole["cache_seqlens"] = 0
    right, _, key, _ = call(engine, whole)
    step = placed(engine, whole)
    for t in range(length):
        part = step | {name: step[name][:, t : t + 1] for name in ("q", "k", "v")}
        out, _ = attend(part | {"cache_seqlens": t})
        assert np.allclose(to_host(out)[:, 0], right[:, t], atol=4e-3, rtol=4e-3)
    assert same_bits(to_host(step["k_cache"])[:, :length], key[:, :length])
    with pytest.raises(ValueError, match="cache_seqlens"):
        attend(part | {"cache_seqlens": whole["k_cache"].shape[1]})


def test_a_thousand_times_the_same_bits(engine, rng):
    arguments = placed(
        engine, draw(rng, seqlen_k=3000, heads=(8, 2), head_dim=128, dtype="float16")
    )
    first = bits(*attend(arguments, num_splits=5))
    for _ in range(1000):
        results = attend(arguments, num_splits=5)
    assert bits(*results) == first


def test_tokens_that_overlap_the_cache_are_refused_every_time(engine, rng):
    arguments = placed(engine, draw(rng, new=1, dtype="float16"))
    attend(arguments)
    with pytest.raises(ValueError, match="k_cache overlaps k in memory"):
        attend(arguments | {"k": arguments["k_cache"][:, :1]})


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_graph_takes_lengths_and_pages_from_the_device(engine, rng, page_size):
    """Captured once; between replays lengths, pages, tokens and queries change in place."""
    draws = [
        draw(rng, seqlen_k=120, new=1, rotary=1, page_size=page_size, dtype="bfloat16")
        for _ in range(3)
    ]
    if page_size is None:  # caches of one capacity
        for each in draws:
            for name in CACHES:
                each[name] = each[name][:, :120]
            for name in ("rotary_cos", "rotary_sin"):
                each[name] = each[name][:120]
    expected = [call(engine, each, num_splits=3) for each in draws]
    arguments = placed(engine, draws[0])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attend(placed(engine, draws[0]), num_splits=3)  # the warm-up
        stream.synchronize()
        stream.begin_capture()
        captured = attend(arguments, num_splits=3)
        graph = stream.end_capture()
        for each, right in zip(draws, expected, strict=True):
            for name, x in each.items():
                if isinstance(x, np.ndarray):
                    arguments[name][...] = to_engine(engine, np.ascontiguousarray(x))
            graph.launch(stream)
            stream.synchronize()
            caches = [arguments[name] for name in CACHES]
            assert bits(*captured, *caches) == [x.tobytes() for x in right]


def test_faults_are_taken_once(engine, rng):
    arguments = draw(rng, seqlen_k=12, new=3, dtype="float16")
    capacity = arguments["k_cache"].shape[1]
    arguments["cache_seqlens"] = np.int32([capacity - 1, 0, capacity + 5])
    take_faults()
    attend(placed(engine, arguments))
    assert take_faults() == (2 + 3, True)
    assert take_faults() == (0, False)


def test_a_call_does_not_wait_for_the_device(engine, rng):
    arguments = placed(engine, draw(rng, seqlen_k=100, new=1, page_size=16, dtype="float16"))
    attend(arguments)
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long s = clock64();'
        " while (clock64() - s < n); }",
        "spin",
    )
    spin((1,), (1,), (np.int64(1),))
    cupy.cuda.Device().synchronize()
    done = cupy.cuda.Event()
    spin((1,), (1,), (np.int64(10**9),))
    done.record()
    attend(arguments)
    assert not done.done
