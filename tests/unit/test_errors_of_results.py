"""The API's error rules, continued: ``out=``, varlen, the backward and `merge_states`."""

from __future__ import annotations

import re

import numpy as np
import pytest

import cupyflash
from cupyflash import BlockMask, UnsupportedError
from cupyflash._arrays import overlaps_itself
from tests.harness import require
from tests.memory import Guarded, to_engine, to_host
from tests.unit.test_errors import DV, HK, SK, SQ, B, D, H, arguments, array, prepared

# --- out= ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [
        ((B, SQ, H, D), np.float32, ValueError),
        ((B, H, SQ, DV), np.float32, ValueError),
        ((1, B, SQ, H, DV), np.float32, ValueError),
        ((B, SQ, H, DV), np.float16, TypeError),
        ((B, SQ, H, DV), np.float64, TypeError),
    ],
    ids=str,
)
def test_out_of_another_form(engine, rng, shape, dtype, error):
    out = Guarded(engine, shape, np.dtype(dtype), "dense", rng)
    with pytest.raises(error, match=r"\bout\b") as caught:
        cupyflash.flash_attention(**prepared(engine, {}), out=out.view)
    assert str(np.dtype(dtype)) in str(caught.value) or str(shape) in str(caught.value)
    out.assert_unchanged()


@pytest.mark.parametrize("out", [[1.0], "out", 3], ids=str)
def test_out_that_is_no_array(engine, out):
    with pytest.raises(TypeError, match=r"\bout\b"):
        cupyflash.flash_attention(**prepared(engine, {}), out=out)


def test_out_that_is_read_only():
    out = np.full((B, SQ, H, DV), 7, np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"\bout\b.*(read-only|writ)"):
        cupyflash.flash_attention(**arguments(), out=out)
    assert (out == 7).all()


def test_out_that_overlaps_itself(engine):
    memory = to_engine(engine, np.full((1, SQ, H, DV), 7, np.float32))
    if engine == "numpy":
        out = np.lib.stride_tricks.as_strided(memory, (B, SQ, H, DV), (0, *memory.strides[1:]))
    else:
        import cupy

        out = cupy.lib.stride_tricks.as_strided(memory, (B, SQ, H, DV), (0, *memory.strides[1:]))
    with pytest.raises(ValueError, match=r"\bout\b.*(overlap|share)"):
        cupyflash.flash_attention(**prepared(engine, {}), out=out)
    assert (to_host(memory) == 7).all()


def test_axes_may_interleave_where_no_byte_is_shared(rng):
    """Strides of 3 and 2 items over lengths 2 and 3: offsets 0, 2, 4, 3, 5, 7."""
    arrays = [rng.normal(size=(1, 2, 1, 3)).astype(np.float32) for _ in range(3)]
    memory = np.full(8, 7, np.float32)
    out = np.lib.stride_tricks.as_strided(memory, (1, 2, 1, 3), (96, 12, 96, 8))
    assert cupyflash.flash_attention(*arrays, out=out) is out
    np.testing.assert_array_equal(out, cupyflash.flash_attention(*arrays))
    np.testing.assert_array_equal(memory[[1, 6]], 7)


def test_elements_that_share_bytes_are_found_out_exactly(rng):
    found = []
    for _ in range(300):
        shape = tuple(rng.integers(0, 4, 3))
        strides = tuple(rng.integers(-9, 10, 3) * rng.choice([1, 2, 4]))
        array = np.lib.stride_tricks.as_strided(np.zeros(100, np.uint16)[50:], shape, strides)
        starts = [sum(i * s for i, s in zip(n, strides, strict=True)) for n in np.ndindex(shape)]
        touched = [start + byte for start in starts for byte in range(2)]
        found.append(overlaps_itself(array))
        assert found[-1] == (len(set(touched)) < len(touched)), (shape, strides)
    assert {True, False} == set(found)
    whole = np.broadcast_to(np.zeros(1), 1 << 40)  # is not enumerated
    assert overlaps_itself(whole) and not overlaps_itself(whole[:0])


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask"])
def test_out_that_overlaps_an_input(engine, rng, name):
    shapes = {"q": (B, SQ, H, D), "k": (B, SK, HK, D), "v": (B, SK, HK, DV),
              "bias": (H, SQ, SK), "mask": (SQ, SK)}  # fmt: skip
    values = {n: rng.integers(0, 2, shapes[n]).astype(np.float32) for n in {"q", "k", "v", name}}
    if name == "mask":
        values["mask"] = values["mask"].astype(bool)
    out_bytes, in_bytes = 4 * B * SQ * H * DV, values[name].nbytes
    host = np.concatenate([np.zeros(out_bytes, np.uint8), values[name].view(np.uint8).ravel()])
    memory = to_engine(engine, host)
    changed = {n: to_engine(engine, x) for n, x in values.items()}
    changed[name] = memory[out_bytes:].view(values[name].dtype).reshape(shapes[name])
    assert changed[name].nbytes == in_bytes
    out = memory[4 : 4 + out_bytes].view(np.float32).reshape(B, SQ, H, DV)  # four bytes too far
    with pytest.raises(ValueError, match=r"\bout\b.*overlap") as caught:
        cupyflash.flash_attention(**changed, out=out)
    assert re.search(rf"\b{name}\b", str(caught.value))
    np.testing.assert_array_equal(to_host(memory), host)


# --- varlen -------------------------------------------------------------------------------------

GOOD_Q, GOOD_K = np.array([0, 5, 9], np.int32), np.array([0, 7, 7], np.int32)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize(
    ("bad", "error", "shows"),
    [
        (np.array([0, 5, 7], np.int64), TypeError, "int64"),
        (np.array([0, 5, 7], np.float32), TypeError, "float32"),
        ([0, 5, 7], TypeError, "list"),
        (None, TypeError, "None"),
        (np.array([[0, 5, 7]], np.int32), ValueError, "(1, 3)"),
        (np.array(0, np.int32), ValueError, "()"),
        (np.array([], np.int32), ValueError, "(0,)"),
        (np.array([0, 5, 6, 7], np.int32), ValueError, "4"),
        (np.array([1, 5, 7], np.int32), ValueError, "1"),
        (np.array([0, 5, 4], np.int32), ValueError, "4"),
        (np.array([0, -1, 4], np.int32), ValueError, "-1"),
        (np.array([0, 5, 1000], np.int32), ValueError, "1000"),
    ],
    ids=repr,
)
def test_cu_seqlens(engine, rng, name, bad, error, shows):
    q, k, v = (to_engine(engine, array(n, 2, 8)) for n in (9, 7, 7))
    lengths = {"cu_seqlens_q": GOOD_Q, "cu_seqlens_k": GOOD_K} | {name: bad}
    out = Guarded(engine, (9, 2, 8), np.dtype(np.float32), "dense", rng)
    for function in (cupyflash.flash_attention_varlen, cupyflash.flash_attention_varlen_forward):
        with pytest.raises(error, match=rf"\b{name}\b") as caught:
            function(q, k, v, **lengths, out=out.view)  # on the host also beside device arrays
        assert shows in str(caught.value)
    out.assert_unchanged()


@pytest.mark.parametrize("hint", [{"max_seqlen_q": 2.5}, {"max_seqlen_k": "7"}], ids=str)
def test_varlen_hints_are_integers(engine, hint):
    q, k, v = (to_engine(engine, array(n, 2, 8)) for n in (9, 7, 7))
    with pytest.raises(TypeError, match=next(iter(hint))):
        cupyflash.flash_attention_varlen(q, k, v, GOOD_Q, GOOD_K, **hint)


def test_varlen_wants_three_axes(engine):
    q = to_engine(engine, array(1, 9, 2, 8))
    with pytest.raises(ValueError, match=r"\bq\b.*total"):
        cupyflash.flash_attention_varlen(q, q, q, GOOD_Q, GOOD_Q)


def test_varlen_serves_no_block_mask(engine):
    require(engine, "varlen", "block_mask")
    q = to_engine(engine, array(9, 2, 8))
    block_mask = BlockMask(to_engine(engine, array(1, 1, 2, 2, dtype=bool)), block_size=(4, 4))
    with pytest.raises(UnsupportedError, match="block_mask"):
        cupyflash.flash_attention_varlen(q, q, q, GOOD_Q, GOOD_Q, block_mask=block_mask)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_varlen_arrays_that_do_not_broadcast(engine, name):
    q, k, v = (to_engine(engine, array(n, 2, 8)) for n in (9, 7, 7))
    bad = to_engine(engine, array(3, 1, 5, 7, dtype=bool if name == "mask" else np.float32))
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        cupyflash.flash_attention_varlen(q, k, v, GOOD_Q, GOOD_K, **{name: bad})


# --- backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (array(B, SQ, H, D), ValueError),
        (array(B, H, SQ, DV), ValueError),
        (array(SQ, H, DV), ValueError),
        (array(B, SQ, H, DV, dtype=np.float16), TypeError),
        (array(B, SQ, H, DV, dtype=np.float64), TypeError),
        (array(B, SQ, H, DV).tolist(), TypeError),
        (None, TypeError),
    ],
)
def test_dout(engine, bad, error):
    _, saved = cupyflash.flash_attention_forward(**prepared(engine, {}))
    with pytest.raises(error, match=r"\bdout\b") as caught:
        cupyflash.flash_attention_backward(to_engine(engine, bad), saved)
    if isinstance(bad, np.ndarray):
        assert str(bad.shape) in str(caught.value) and str(bad.dtype) in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (array(B, SQ, H), ValueError),
        (array(B, H), ValueError),
        (array(B, H, SQ, dtype=np.float64), TypeError),
        (array(B, H, SQ, dtype=np.float16), TypeError),
        (1.0, TypeError),
    ],
)
def test_dlse(engine, bad, error):
    out, saved = cupyflash.flash_attention_forward(**prepared(engine, {}))
    with pytest.raises(error, match=r"\bdlse\b"):
        cupyflash.flash_attention_backward(out, saved, dlse=to_engine(engine, bad))


@pytest.mark.parametrize("saved", [None, (1, 2), "saved", {}], ids=str)
def test_saved_must_come_from_a_forward(saved):
    with pytest.raises(TypeError, match=r"\bsaved\b.*flash_attention_forward"):
        cupyflash.flash_attention_backward(array(B, SQ, H, DV), saved)


def test_deterministic_is_a_flag(engine):
    out, saved = cupyflash.flash_attention_forward(**prepared(engine, {}))
    with pytest.raises(TypeError, match="deterministic"):
        cupyflash.flash_attention_backward(out, saved, deterministic="yes")
    with pytest.raises(TypeError):
        cupyflash.flash_attention_backward(out, saved, None)


# --- merge_states -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outs", "lses", "error"),
    [
        ([array(2, 5, 3, 8)] * 2, [array(2, 3, 5)], ValueError),
        ([array(2, 5, 3, 8)] * 2, [array(2, 5, 3)] * 2, ValueError),
        ([array(2, 5, 3, 8), array(2, 5, 3, 7)], [array(2, 3, 5)] * 2, ValueError),
        ([], [], ValueError),
        ([array(2, 5, 3, 8, dtype=np.int32)], [array(2, 3, 5)], TypeError),
        ([array(2, 5, 3, 8)], [array(2, 3, 5, dtype=np.int32)], TypeError),
        (3, 4, TypeError),
    ],
)
def test_merge_states(outs, lses, error):
    with pytest.raises(error, match=r"out|lse"):
        cupyflash.merge_states(outs, lses)
