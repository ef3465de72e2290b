"""How much memory a call takes; offsets, grids and alignments at their limits."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from tests.cases import DTYPES, Shape
from tests.harness import assert_bits, check, draw, require
from tests.memory import Guarded, to_engine, to_host

cupy = pytest.importorskip("cupy")


class Meter:
    """An allocator that adds up what is asked of it."""

    def __init__(self):
        self.total = 0

    def __call__(self, size):
        self.total += size
        return cupy.get_default_memory_pool().malloc(size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_takes_out_and_two_statistics(engine, rng, dtype):
    arguments = draw(rng, Shape(2, 1024, 1024, 4, 4, 64, 64), dtype)
    q, k, v, dout = (to_engine(engine, arguments[name]) for name in ("q", "k", "v", "dout"))
    cupyflash.flash_attention(q, k, v, engine=engine)  # compiles
    meter = Meter()
    with cupy.cuda.using_allocator(meter):
        out, saved = cupyflash.flash_attention_forward(q, k, v, engine=engine)
    assert meter.total <= out.nbytes + saved.row_max.nbytes + saved.row_sum.nbytes + 1024
    cupyflash.flash_attention_backward(dout, saved)
    meter = Meter()
    with cupy.cuda.using_allocator(meter):
        cupyflash.flash_attention_backward(dout, saved)
    # Gradients, float32 copies of those that are summed, D: all linear in the sequence.
    wide = 3 * max(4, q.itemsize) * q.size
    assert meter.total <= 3 * q.nbytes + wide + 4 * saved.row_max.nbytes + 1024


@pytest.mark.large
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "sequence", "heads"])
def test_offsets_beyond_32_bits(engine, rng, axis):
    shape = Shape(2, 70, 70, 2, 2, 32, 32)
    arguments = draw(rng, shape, "float16")
    lengths = (2, 70, 2, 32)
    stride = 2**31 // (lengths[axis] - 1) + 4096  # elements: the last is past 2**31
    strides = [0, 0, 0, 2]
    strides[axis] = 2 * stride
    inner = 64
    for other in (2, 1, 0):
        if other != axis:
            strides[other], inner = inner, inner * lengths[other]
    size = stride * (lengths[axis] - 1) + inner // 2

    def spread(x):
        memory = cupy.empty(size, np.float16)
        memory.data.memset(0xFF, memory.nbytes)
        view = cupy.lib.stride_tricks.as_strided(memory, x.shape, strides)
        view[...] = cupy.asarray(x)
        return view

    q, k, v, dout = (spread(arguments[name]) for name in ("q", "k", "v", "dout"))
    out = spread(np.zeros(lengths, np.float16))
    got, saved = cupyflash.flash_attention_forward(q, k, v, causal=True, engine=engine, out=out)
    grads = cupyflash.flash_attention_backward(dout, saved, deterministic=True)
    assert got is out
    bits = {name: to_host(getattr(grads, name)) for name in ("dq", "dk", "dv")}
    bits["out"] = np.ascontiguousarray(to_host(out))
    assert_bits(engine, bits, causal=True, **arguments)
    del q, k, v, dout, out, got, saved, grads
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.large
@pytest.mark.parametrize(
    "shape",
    [
        Shape(70000, 2, 3, 1, 1, 8, 8),
        Shape(300, 2, 3, 250, 250, 8, 8),
        Shape(1, 2, 3, 70000, 70000, 8, 8),
        Shape(1, 5_000_000, 3, 1, 1, 8, 8),
        Shape(1, 2, 5_000_000, 1, 1, 8, 8),
    ],
    ids=["batch", "both", "heads", "queries", "keys"],
)
def test_grids_beyond_16_bits(engine, rng, shape):
    arguments = draw(rng, shape, "float32", ["top_left"])
    if shape.seqlen_q > 10**6:  # sums of so many float32 have another error than cuBLAS's
        del arguments["dout"]
    check(engine, on=engine, **arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [31, 32, 64])
def test_pointers_aligned_to_one_element(engine, rng, dtype, head_dim):
    arguments = draw(rng, Shape(2, 70, 75, 2, 2, head_dim, head_dim), dtype, ["causal", "dlse"])
    aligned = dict(arguments)
    for name in ("q", "k", "v", "dout", "dlse"):
        x = arguments[name]
        memory = np.zeros(x.size + 1, x.dtype)
        memory[1:] = x.ravel()
        whole = to_engine(engine, memory)
        arguments[name] = whole[1:].reshape(x.shape)
        assert arguments[name].data.ptr % (2 * x.itemsize) == x.itemsize
    q, k, v, dout = (arguments[name] for name in ("q", "k", "v", "dout"))
    memory = cupy.zeros(q.size + 1, q.dtype)
    out = memory[1:].reshape(q.shape)
    _, saved = cupyflash.flash_attention_forward(q, k, v, causal=True, engine=engine, out=out)
    grads = cupyflash.flash_attention_backward(
        dout, saved, dlse=arguments["dlse"], deterministic=True
    )
    bits = {name: to_host(getattr(grads, name)) for name in ("dq", "dk", "dv")}
    assert_bits(engine, bits | {"out": to_host(out)}, **aligned)


@pytest.mark.parametrize(
    "lengths",
    [[0, 9, 4, 20], [5, 5, 5, 5], [0, -7, 10, 20], [0, 10, 20, 2**30], [0, 2**31 - 1, 3, 20]],
    ids=str,
)
def test_malformed_lengths_on_the_device_stay_inside_the_arrays(engine, rng, lengths):
    require(engine, "varlen")
    q, k, v = (to_engine(engine, rng.normal(size=(20, 2, 32)).astype(np.float16)) for _ in range(3))
    good = cupy.array([0, 5, 10, 20], np.int32)
    bad = cupy.array(lengths, np.int32)
    for cu_seqlens in ((bad, good), (good, bad), (bad, bad)):
        out = Guarded(engine, (20, 2, 32), np.dtype(np.float16), "gaps", rng)
        _, saved = cupyflash.flash_attention_varlen_forward(
            q, k, v, *cu_seqlens, out=out.view, engine=engine
        )
        cupyflash.flash_attention_backward(q, saved)
        cupy.cuda.Device().synchronize()  # an illegal access would raise here
        out.assert_rest_unchanged()
