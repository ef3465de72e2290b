"""Streams, devices, threads, graphs, and results that repeat."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cupyflash
from tests.cases import FEATURES, SUPPORTED, Shape
from tests.harness import DEPUTIES, call, draw, expected, named, require, same_bits
from tests.memory import to_engine, to_host
from tests.tolerance import assert_agree

cupy = pytest.importorskip("cupy")

SPIN = """
extern "C" __global__ void spin(long long cycles) {
  long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


def _device_arrays(engine, rng, *features, dtype="float16"):
    arguments = draw(rng, Shape(2, 150, 170, 4, 4, 64, 64), dtype, features)
    return {name: to_engine(engine, x) for name, x in arguments.items()}


def _both(engine, arrays, **options):
    """Forward and backward; returns out, saved and gradients."""
    options = {"engine": engine, "causal": True} | options
    out, saved = cupyflash.flash_attention_forward(*(arrays[n] for n in "qkv"), **options)
    return out, saved, cupyflash.flash_attention_backward(arrays["dout"], saved, deterministic=True)


def _bits(out, saved, grads):
    return [to_host(x).tobytes() for x in (out, saved.row_max, saved.row_sum, *grads[:3])]


def test_repeated_calls_take_new_pointers_streams_and_alignments(engine, rng):
    """Output-only calls of one form may share their checks, and nothing else."""
    first, second = (_device_arrays(engine, rng) for _ in range(2))
    right = [
        to_host(_both(engine, arrays, causal=False)[0]).tobytes() for arrays in (first, second)
    ]
    odd = {}
    for name in "qkv":
        memory = cupy.zeros(second[name].size + 1, np.float16)
        odd[name] = memory[1:].reshape(second[name].shape)
        odd[name][...] = second[name]

    def run(arrays):
        q, k, v = (arrays[name] for name in "qkv")
        return cupyflash.flash_attention(q, k, v, engine=named(engine, (q, k, v), {}))

    # Unaligned arrays may be left to another engine.
    deputies = [
        to_host(_both(each, second, causal=False)[0]).tobytes() for each in DEPUTIES.get(engine, ())
    ]
    for arrays, bits in ((first, right[0]), (second, right[1])):
        assert to_host(run(arrays)).tobytes() == bits
    assert to_host(run(odd)).tobytes() in (right[1], *deputies)
    assert to_host(run(first)).tobytes() == right[0]
    late = {name: cupy.full_like(first[name], np.nan) for name in "qkv"}
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupy.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(10**8),))
        for name in "qkv":
            late[name][...] = first[name]
        out = run(late)
        assert to_host(out).tobytes() == right[0]
        stream.begin_capture()
        out = run(late)
        graph = stream.end_capture()
        for name in "qkv":
            late[name][...] = second[name]
        graph.launch(stream)
        assert to_host(out).tobytes() == right[1]


@pytest.mark.parametrize("non_blocking", [True, False])
def test_work_runs_on_the_current_stream(engine, rng, non_blocking):
    arrays = _device_arrays(engine, rng)
    expected = _bits(*_both(engine, arrays))
    late = {name: cupy.full_like(arrays[name], np.nan) for name in ("q", "k", "v", "dout")}
    spin = cupy.RawKernel(SPIN, "spin")
    spin((1,), (1,), (np.int64(1),))
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=non_blocking)
    with stream:  # the inputs arrive only after the spin: another stream would read NaN
        spin((1,), (1,), (np.int64(10**8),))
        for name, array in late.items():
            array[...] = arrays[name]
        results = _both(engine, late)
        stream.synchronize()
        assert _bits(*results) == expected


def test_a_call_does_not_wait_for_the_device(engine, rng):
    arrays = _device_arrays(engine, rng)
    spin = cupy.RawKernel(SPIN, "spin")
    stream, done = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    with stream:
        _both(engine, arrays)  # compiles, and fills this stream's memory pool
        spin((1,), (1,), (np.int64(1),))
        stream.synchronize()
        spin((1,), (1,), (np.int64(10**9),))  # about half a second
        results = _both(engine, arrays)
        done.record(stream)
        assert not done.done
        stream.synchronize()
    assert len(results) == 3


def test_arrays_on_another_than_the_current_device(engine, rng):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    expected = _bits(*_both(engine, _device_arrays(engine, np.random.default_rng(1))))
    with cupy.cuda.Device(1):
        arrays = _device_arrays(engine, np.random.default_rng(1))
    with cupy.cuda.Device(0):
        results = _both(engine, arrays)
        assert cupy.cuda.runtime.getDevice() == 0
    with cupy.cuda.Device(1):
        assert results[0].device.id == 1
        assert _bits(*results) == expected
        elsewhere = {"k": arrays["k"]}
    with cupy.cuda.Device(0):
        mine = {name: cupy.zeros(arrays[name].shape, np.float16) for name in "qkv"}
    with pytest.raises(TypeError, match=r"\bk\b.*device"):
        cupyflash.flash_attention(**(mine | elsewhere))


def test_threads_at_once(engine, rng):
    jobs = [_device_arrays(engine, rng, dtype=dtype) for dtype in ("float16", "float32") * 4]
    expected = [_bits(*_both(engine, arrays)) for arrays in jobs]
    cupy.cuda.Device().synchronize()

    def work(arrays):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            results = [_both(engine, arrays) for _ in range(10)]
            stream.synchronize()
            return [_bits(*result) for result in results]

    with ThreadPoolExecutor(8) as pool:
        for right, got in zip(expected, pool.map(work, jobs), strict=True):
            assert all(bits == right for bits in got)


def test_first_calls_of_many_threads(engine, rng):
    """A kernel that nobody has compiled yet, asked for by all at once."""
    arguments = draw(rng, Shape(1, 20, 20, 1, 1, 77, 91), "float32")
    q, k, v = (to_engine(engine, arguments[name]) for name in "qkv")
    cupy.cuda.Device().synchronize()

    def work(_):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            out = cupyflash.flash_attention(q, k, v, engine=engine)
            stream.synchronize()
            return to_host(out).tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(work, range(8)))) == 1


@pytest.mark.parametrize("features", [(), ("gqa",), ("varlen",), ("dropout",)], ids=str)
def test_graph_capture_after_one_warm_up(engine, rng, features):
    require(engine, *features)
    arguments = draw(rng, Shape(2, 150, 170, 4, 4, 64, 64), "float16", features)
    cu_seqlens = [to_engine(engine, cu) for cu in arguments.pop("cu_seqlens", ())]
    names = ("q", "k", "v", "dout")
    arrays = {name: to_engine(engine, arguments.pop(name)) for name in names}
    fresh = {name: to_engine(engine, rng.normal(size=arrays[name].shape).astype(np.float16))
             for name in names}  # fmt: skip
    forward = cupyflash.flash_attention_varlen_forward if cu_seqlens else (
        cupyflash.flash_attention_forward
    )  # fmt: skip

    def both(inputs):
        out, saved = forward(
            *(inputs[n] for n in "qkv"), *cu_seqlens, engine=engine, causal=True, **arguments
        )
        return (
            out,
            saved,
            cupyflash.flash_attention_backward(inputs["dout"], saved, deterministic=True),
        )

    expected = _bits(*both(fresh))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        both(arrays)  # the warm-up
        stream.synchronize()
        stream.begin_capture()
        captured = both(arrays)  # anything that synchronises fails here
        graph = stream.end_capture()
        for name in names:
            arrays[name][...] = fresh[name]
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        assert _bits(*captured) == expected


@pytest.mark.parametrize("features", [(), ("mask", "bias")], ids=str)
def test_a_captured_graph_has_memory_of_its_own(engine, rng, features):
    require(engine, *features)
    arrays = _device_arrays(engine, rng, *features)
    options = {name: x for name, x in arrays.items() if name in ("mask", "bias")}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        _both(engine, arrays, **options)
        stream.synchronize()
        stream.begin_capture()
        captured = _both(engine, arrays, **options)
        graph = stream.end_capture()
        # Allocations that would take any memory that the captured calls had given back.
        others = [cupy.zeros(2**n, np.uint8) for n in range(9, 22) for _ in range(20)]
        graph.launch(stream)
        stream.synchronize()
        assert not any(other.any() for other in others)
        assert np.isfinite(to_host(captured[0])).all()


def test_a_captured_score_mod_has_memory_of_its_own(engine, rng):
    require(engine, "score_mod")
    arrays = _device_arrays(engine, rng)
    table = cupy.asarray(rng.normal(size=(170, 4)).astype(np.float32)).T  # is copied
    mod = cupyflash.ScoreMod("score + table[h * 170 + j]", "1", {"table": table})
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        right = _both(engine, arrays, score_mod=mod)
        stream.synchronize()
        stream.begin_capture()
        captured = _both(engine, arrays, score_mod=mod)
        graph = stream.end_capture()
        others = [cupy.zeros(2**n, np.uint8) for n in range(9, 22) for _ in range(20)]
        graph.launch(stream)
        stream.synchronize()
        assert not any(other.any() for other in others)
        assert _bits(*captured) == _bits(*right)
        gradients = (to_host(grads.dscore_params["table"]) for *_, grads in (captured, right))
        assert same_bits(*gradients)


def test_a_captured_seed_on_the_device_can_change(engine, rng):
    require(engine, "dropout")
    arrays = _device_arrays(engine, rng)
    seed = cupy.array([5], np.uint64)
    q, k, v = (arrays[name] for name in "qkv")
    options = {"engine": engine, "dropout_p": 0.4}
    right = {n: to_host(cupyflash.flash_attention(q, k, v, seed=n, **options)) for n in (5, 2**63)}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupyflash.flash_attention(q, k, v, seed=seed, **options)
        stream.begin_capture()
        out = cupyflash.flash_attention(q, k, v, seed=seed, **options)
        graph = stream.end_capture()
        for number, expected in right.items():
            seed[...] = number
            graph.launch(stream)
            stream.synchronize()
            assert same_bits(to_host(out), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_200_forwards_and_50_deterministic_backwards_are_bit_equal(engine, rng, dtype):
    shape = Shape(2, 517, 517, 4, 4, 64, 64)
    arguments = draw(rng, shape, dtype, ["gqa"])
    arrays = {name: to_engine(engine, arguments[name]) for name in ("q", "k", "v", "dout")}
    out, saved, grads = _both(engine, arrays)
    bits = _bits(out, saved, grads)
    first, gradients = bits[:3], bits[3:]
    for _ in range(200):
        again, state = cupyflash.flash_attention_forward(
            *(arrays[n] for n in "qkv"), engine=engine, causal=True
        )
        assert [to_host(x).tobytes() for x in (again, state.row_max, state.row_sum)] == first
    for _ in range(50):
        grads = cupyflash.flash_attention_backward(arrays["dout"], saved, deterministic=True)
        assert [to_host(x).tobytes() for x in grads[:3]] == gradients


# --- which engine serves what -------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
def test_what_the_table_leaves_out_is_unsupported(engine, rng, feature):
    if feature in SUPPORTED[engine]:
        call(engine, **draw(rng, Shape(), "float16", [feature]))  # and what it lists is served
        return
    arguments = draw(rng, Shape(), "float16", [feature])
    arguments.pop("dout")
    cu_seqlens = [to_engine(engine, cu) for cu in arguments.pop("cu_seqlens", ())]
    arrays = {name: to_engine(engine, value) for name, value in arguments.items()}
    function = cupyflash.flash_attention_varlen if cu_seqlens else cupyflash.flash_attention
    with pytest.raises(cupyflash.UnsupportedError, match=engine):
        function(arrays.pop("q"), arrays.pop("k"), arrays.pop("v"), *cu_seqlens, engine=engine,
                 **arrays)  # fmt: skip


def test_the_chosen_engine_agrees(engine, rng):
    arguments = draw(rng, Shape(2, 150, 170, 4, 4, 64, 64), "float16", ["causal", "gqa"])
    named = call(engine, **arguments)
    arrays = [to_engine(engine, arguments[name]) for name in "qkv"]
    chosen = to_host(cupyflash.flash_attention(*arrays, causal=arguments["causal"]))
    assert_agree("out", chosen, named.out, expected(**arguments))


def test_the_numpy_engine_takes_no_device_arrays(engine, rng):
    q = to_engine(engine, rng.normal(size=(1, 5, 2, 8)))
    with pytest.raises(cupyflash.UnsupportedError, match="numpy"):
        cupyflash.flash_attention(q, q, q, engine="numpy")


@pytest.mark.parametrize("host", ["q", "k", "v", "out"])
def test_host_beside_device_is_a_type_error(engine, rng, host):
    arrays = {n: to_engine(engine, rng.normal(size=(1, 5, 2, 8))) for n in ("q", "k", "v", "out")}
    arrays[host] = np.zeros((1, 5, 2, 8))
    with pytest.raises(TypeError, match=r"host"):
        cupyflash.flash_attention(**arrays)


def test_a_tiling_that_does_not_fit(engine, rng):
    q = to_engine(engine, rng.normal(size=(1, 64, 2, 128)).astype(np.float16))
    tiling = cupyflash.Tiling(block_m=8192, block_n=8192)
    with pytest.raises(cupyflash.UnsupportedError, match="tiling"):
        cupyflash.flash_attention(q, q, q, engine=engine, tiling=tiling)
