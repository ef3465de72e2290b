"""Every rule of the API's error section: the kind, what the message names, and no byte written."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import BlockMask, NoDeviceError, ScoreMod, Tiling, UnsupportedError
from tests.harness import Guarded, require, to_engine, to_host

B, SQ, SK, H, HK, D, DV = 2, 12, 15, 4, 2, 8, 6


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def arguments() -> dict[str, Any]:
    return {"q": array(B, SQ, H, D), "k": array(B, SK, HK, D), "v": array(B, SK, HK, DV)}


def retyped(dtype: Any, *names: str) -> dict[str, Any]:
    return {name: arguments()[name].astype(dtype) for name in names}


@dataclasses.dataclass(frozen=True)
class Bad:
    """A change of good arguments, and what must come of it."""

    error: type[Exception] | tuple[type[Exception], ...]
    names: str  # the argument that the message names
    change: dict[str, Any]
    shows: tuple[str, ...] = ()  # what else the message shows: the shape, dtype or value given

    def __str__(self) -> str:
        value = self.change.get(self.names, self.change)
        value = f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else value
        value = "function" if callable(value) else value
        return re.sub(r"[^\w.,()-]+", "", f"{self.names}-{value}".replace(" ", ""))[:60]


INT64 = np.int64
BAD = [
    # dtypes of q, k, v
    Bad(TypeError, "q", retyped(np.int32, "q", "k", "v"), ("int32",)),
    Bad(TypeError, "q", retyped(bool, "q", "k", "v"), ("bool",)),
    Bad(TypeError, "q", retyped(np.complex64, "q", "k", "v"), ("complex64",)),
    Bad(TypeError, "k", retyped(np.float16, "k"), ("float16", "float32")),
    Bad(TypeError, "v", retyped(np.float64, "v"), ("float64", "float32")),
    Bad(TypeError, "k", retyped(ml_dtypes.bfloat16, "k", "v"), ("bfloat16", "float32")),
    # shapes of q, k, v
    Bad(ValueError, "q", {"q": array(SQ, H)}, (f"({SQ}, {H})",)),
    Bad(ValueError, "q", {"q": array(1, B, SQ, H, D)}, (f"(1, {B}, {SQ}, {H}, {D})",)),
    Bad(ValueError, "k", {"k": array(SK, HK, D)}, (f"({SK}, {HK}, {D})",)),
    Bad(ValueError, "v", {"v": array(SK, HK, DV)}, (f"({SK}, {HK}, {DV})",)),
    Bad(ValueError, "k", {"k": array(B + 1, SK, HK, D)}, (f"({B + 1}, {SK}, {HK}, {D})",)),
    Bad(ValueError, "k", {"k": array(1, SK, HK, D)}, (f"(1, {SK}, {HK}, {D})",)),
    Bad(ValueError, "k", {"k": array(B, SK, HK, D + 1)}, (f"({B}, {SK}, {HK}, {D + 1})",)),
    Bad(ValueError, "v", {"v": array(B, SK + 1, HK, DV)}, (f"({B}, {SK + 1}, {HK}, {DV})",)),
    Bad(ValueError, "v", {"v": array(B, SK, HK + 2, DV)}, (f"({B}, {SK}, {HK + 2}, {DV})",)),
    Bad(ValueError, "k", {"k": array(B, SK, 3, D), "v": array(B, SK, 3, DV)}, ("4", "3")),
    Bad(ValueError, "k", {"k": array(B, SK, 8, D), "v": array(B, SK, 8, DV)}, ("4", "8")),
    Bad(ValueError, "k", {"k": array(B, SK, 0, D), "v": array(B, SK, 0, DV)}, ("4", "0")),
    Bad(ValueError, "q", {"q": array(B, SQ, H, 0), "k": array(B, SK, HK, 0)}, ("0",)),
    Bad(ValueError, "v", {"v": array(B, SK, HK, 0)}, ("0",)),
    Bad(UnsupportedError, "q", {"q": array(B, SQ, H, 257), "k": array(B, SK, HK, 257)}, ("257",)),
    Bad(UnsupportedError, "v", {"v": array(B, SK, HK, 257)}, ("257", "256")),
    # options
    Bad(ValueError, "layout", {"layout": "sbhd"}, ("sbhd", "bshd", "bhsd")),
    Bad(ValueError, "engine", {"engine": "cuda"}, ("cuda", "numpy", "simt")),
    Bad(ValueError, "causal", {"causal": "bottom-left"}, ("bottom-left", "bottom-right")),
    Bad(TypeError, "causal", {"causal": np.ones(2)}),
    Bad(TypeError, "causal", {"causal": 0.5}, ("0.5",)),
    Bad(ValueError, "window", {"window": (-1, 0)}, ("-1",)),
    Bad(ValueError, "window", {"window": (None, -(2**70))}),
    Bad(ValueError, "window", {"window": (1, 2, 3)}, ("(1, 2, 3)",)),
    Bad(TypeError, "window", {"window": (True, 0)}, ("True",)),
    Bad(TypeError, "window", {"window": (1.0, 0)}, ("1.0",)),
    Bad(TypeError, "window", {"window": 5}, ("5",)),
    Bad(TypeError, "window", {"window": "ab"}, ("ab",)),
    Bad(ValueError, "softcap", {"softcap": -1.0}, ("-1.0",)),
    Bad(ValueError, "softcap", {"softcap": float("inf")}, ("inf",)),
    Bad(ValueError, "softcap", {"softcap": float("nan")}, ("nan",)),
    Bad(TypeError, "softcap", {"softcap": "30"}, ("30",)),
    Bad(ValueError, "softmax_scale", {"softmax_scale": float("nan")}, ("nan",)),
    Bad(ValueError, "softmax_scale", {"softmax_scale": float("-inf")}, ("inf",)),
    Bad(TypeError, "softmax_scale", {"softmax_scale": 1j}),
    Bad(TypeError, "softmax_scale", {"softmax_scale": "1"}),
    Bad(ValueError, "dropout_p", {"dropout_p": 1.0}, ("1.0",)),
    Bad(ValueError, "dropout_p", {"dropout_p": -0.1}, ("-0.1",)),
    Bad(ValueError, "dropout_p", {"dropout_p": float("nan")}, ("nan",)),
    Bad(TypeError, "dropout_p", {"dropout_p": "0.5"}),
    Bad(ValueError, "seed", {"dropout_p": 0.5, "seed": -1}, ("-1",)),
    Bad(ValueError, "seed", {"dropout_p": 0.5, "seed": 2**64}, (str(2**64),)),
    Bad(TypeError, "seed", {"dropout_p": 0.5, "seed": 1.5}, ("1.5",)),
    Bad(TypeError, "tiling", {"tiling": (64, 64)}, ("tuple",)),
    Bad(ValueError, "tiling", {"tiling": Tiling(0, 64)}, ("0",)),
    Bad(ValueError, "tiling", {"tiling": Tiling(64, -16)}, ("-16",)),
    Bad(TypeError, "tiling", {"tiling": Tiling(64.0, 16)}, ("64.0",)),  # type: ignore[arg-type]
    # array options
    Bad(TypeError, "mask", {"mask": array(SQ, SK)}, ("float32", "bool")),
    Bad(TypeError, "mask", {"mask": array(SQ, SK, dtype=np.uint8)}, ("uint8", "bool")),
    Bad(ValueError, "mask", {"mask": array(SQ, SK + 1, dtype=bool)}, (f"({SQ}, {SK + 1})",)),
    Bad(ValueError, "mask", {"mask": array(B, SQ, H, SK, dtype=bool)}, (str((B, SQ, H, SK)),)),
    Bad(ValueError, "mask", {"mask": array(1, 1, H, SQ, 1, dtype=bool)}, (str((1, 1, H, SQ, 1)),)),
    Bad(ValueError, "mask", {"mask": array(0, dtype=bool)}, ("(0,)",)),
    Bad(TypeError, "bias", {"bias": array(SQ, SK, dtype=INT64)}, ("int64",)),
    Bad(TypeError, "bias", {"bias": array(SQ, SK, dtype=bool)}, ("bool",)),
    Bad(ValueError, "bias", {"bias": array(SK, SQ)}, (f"({SK}, {SQ})",)),
    Bad(ValueError, "bias", {"bias": array(B, HK, SQ, SK)}, (f"({B}, {HK}, {SQ}, {SK})",)),
    Bad(ValueError, "alibi_slopes", {"alibi_slopes": array(HK)}, (f"({HK},)",)),
    Bad(ValueError, "alibi_slopes", {"alibi_slopes": array(H, B)}, (f"({H}, {B})",)),
    Bad(ValueError, "alibi_slopes", {"alibi_slopes": array(1, 1, H)}, (f"(1, 1, {H})",)),
    Bad(TypeError, "alibi_slopes", {"alibi_slopes": array(H, dtype=np.float64)}, ("float64",)),
    Bad(ValueError, "sinks", {"sinks": array(HK)}, (f"({HK},)",)),
    Bad(ValueError, "sinks", {"sinks": array(B, H)}, (f"({B}, {H})",)),
    Bad(TypeError, "sinks", {"sinks": array(H, dtype=np.float16)}, ("float16",)),
    Bad(TypeError, "score_mod", {"score_mod": lambda score, b, h, i, j: score}),
    Bad(TypeError, "score_mod", {"score_mod": "score"}),
    Bad(TypeError, "block_mask", {"block_mask": array(SQ, SK, dtype=bool)}),
    Bad(ValueError, "block_mask", {"block_mask": (1, 1, 3, 3, 4, 4)}, ("(1, 1, 3, 3)",)),
    Bad(ValueError, "block_mask", {"block_mask": (B + 1, 1, 3, 4, 4, 4)}, (f"({B + 1}, 1, 3, 4)",)),
    Bad(ValueError, "block_mask", {"block_mask": (1, HK, 3, 4, 4, 4)}, (f"(1, {HK}, 3, 4)",)),
]  # fmt: skip


def _prepared(engine: str, change: dict[str, Any]) -> dict[str, Any]:
    changed = arguments() | change
    block_mask = changed.get("block_mask")
    if isinstance(block_mask, tuple):  # (b, h, rows, columns, bq, bk)
        blocks = array(*block_mask[:4], dtype=bool)
        changed["block_mask"] = BlockMask(blocks, block_size=block_mask[4:])
    return {name: to_engine(engine, value) for name, value in changed.items()}


def _assert_message(message: str, bad: Bad) -> None:
    assert re.search(rf"\b{bad.names}\b", message), f"{bad.names!r} is not named: {message}"
    for fragment in bad.shows:
        assert fragment in message, f"{fragment!r} is not shown: {message}"


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_arguments(engine, rng, bad):
    changed = _prepared(engine, bad.change)
    layout_rank = changed["q"].ndim if hasattr(changed["q"], "ndim") else 4
    shape = (B, SQ, H, changed["v"].shape[-1] or DV) if layout_rank == 4 else (B, SQ, H, DV)
    out = Guarded(engine, shape, np.dtype(changed["q"].dtype), "gaps", rng)
    for function in (cupyflash.flash_attention, cupyflash.flash_attention_forward):
        with pytest.raises(bad.error) as caught:
            function(**changed, out=out.view)
        _assert_message(str(caught.value), bad)
    out.assert_unchanged()
    with pytest.raises(bad.error):
        cupyflash.choose_tiling(**changed)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"window": (1, 0)}, {"window": (True, 0)}),
        ({"window": (1, 0)}, {"window": (1.0, 0)}),
        ({"softmax_scale": 1}, {"softmax_scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"dropout_p": 0}, {"dropout_p": False}),
    ],
    ids=str,
)
def test_bad_values_that_equal_good_ones(engine, good, bad):
    """Whatever a first, good call leaves behind must not vouch for a bad one."""
    require(engine, *(set(good) & {"window", "softcap"}))
    arrays = _prepared(engine, {})
    for _ in range(2):
        cupyflash.flash_attention(**arrays, **good)
    with pytest.raises(TypeError, match=next(iter(bad))):
        cupyflash.flash_attention(**arrays, **bad)


def test_good_arguments_are_good(engine):
    """The table above changes these: were they wrong, it would prove nothing."""
    out = cupyflash.flash_attention(**_prepared(engine, {}))
    assert to_host(out).shape == (B, SQ, H, DV)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_eight_bit_floats(dtype):
    changed = arguments() | retyped(dtype, "q", "k", "v")
    with pytest.raises((TypeError, UnsupportedError), match=r"\bq\b.*float"):
        cupyflash.flash_attention(**changed)


def test_foreign_byte_order():
    changed = arguments() | retyped(">f4", "q", "k", "v")
    with pytest.raises(TypeError, match=r"\bq\b.*byte order"):
        cupyflash.flash_attention(**changed)


def test_masked_arrays_would_lose_their_mask():
    with pytest.raises(TypeError, match=r"\bk\b.*Masked"):
        cupyflash.flash_attention(**(arguments() | {"k": np.ma.masked_array(arguments()["k"])}))


@pytest.mark.parametrize("block_size", [(0, 4), (-4, 4), (4,), (4.0, 4), 4], ids=str)
def test_block_size(engine, block_size):
    blocks = to_engine(engine, array(1, 1, 3, 4, dtype=bool))
    good = _prepared(engine, {})
    with pytest.raises((TypeError, ValueError), match="block_size"):
        cupyflash.flash_attention(**good, block_mask=BlockMask(blocks, block_size=block_size))


def test_block_mask_must_be_bool(engine):
    blocks = to_engine(engine, array(1, 1, 3, 4))
    good = _prepared(engine, {})
    with pytest.raises(TypeError, match=r"block.*float32"):
        cupyflash.flash_attention(**good, block_mask=BlockMask(blocks, block_size=(4, 4)))


def test_block_mask_from_mask(rng):
    mask = rng.random((2, 1, 10, 13)) < 0.3
    block_mask = BlockMask.from_mask(mask, (4, 5))
    assert block_mask.blocks.shape == (2, 1, 3, 3) and block_mask.block_size == (4, 5)
    q, k = array(2, 10, 1, 8), array(2, 13, 1, 8)
    v = rng.normal(size=(2, 13, 1, 8)).astype(np.float32)
    np.testing.assert_allclose(
        cupyflash.flash_attention(q, k, v, block_mask=block_mask),
        cupyflash.flash_attention(q, k, v, mask=mask), atol=1e-6,
    )  # fmt: skip


def test_score_mod_for_host_arrays_needs_its_callable():
    with pytest.raises((TypeError, ValueError, UnsupportedError), match="numpy_forward"):
        cupyflash.flash_attention(**arguments(), score_mod=ScoreMod("score"))


def test_score_mod_backward_needs_its_factor():
    mod = ScoreMod("2.0f * score", numpy_forward=lambda score, b, h, i, j: 2 * score)
    out, saved = cupyflash.flash_attention_forward(**arguments(), score_mod=mod)
    with pytest.raises((TypeError, ValueError, UnsupportedError), match="backward"):
        cupyflash.flash_attention_backward(out, saved)


# --- engines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["simt", "mma", "wgmma"])
def test_gpu_engines_take_no_host_arrays(name):
    with pytest.raises(UnsupportedError, match=rf"{name}.*NumPy"):
        cupyflash.flash_attention(**arguments(), engine=name)


def test_unsupported_is_a_not_implemented_error():
    assert issubclass(UnsupportedError, NotImplementedError)
    assert issubclass(NoDeviceError, RuntimeError)
    assert issubclass(cupyflash.CompileError, RuntimeError)


def test_options_are_keywords(engine):
    q, k, v = (to_engine(engine, x) for x in arguments().values())
    with pytest.raises(TypeError):
        cupyflash.flash_attention(q, k, v, True)
    with pytest.raises(TypeError, match="is_causal"):
        cupyflash.flash_attention(q, k, v, is_causal=True)
    with pytest.raises(TypeError):
        cupyflash.flash_attention(q, k)


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
        cupyflash.flash_attention(**_prepared(engine, {}), out=out.view)
    assert str(np.dtype(dtype)) in str(caught.value) or str(shape) in str(caught.value)
    out.assert_unchanged()


@pytest.mark.parametrize("out", [[1.0], "out", 3], ids=str)
def test_out_that_is_no_array(engine, out):
    with pytest.raises(TypeError, match=r"\bout\b"):
        cupyflash.flash_attention(**_prepared(engine, {}), out=out)


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
        cupyflash.flash_attention(**_prepared(engine, {}), out=out)
    assert (to_host(memory) == 7).all()


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
    _, saved = cupyflash.flash_attention_forward(**_prepared(engine, {}))
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
    out, saved = cupyflash.flash_attention_forward(**_prepared(engine, {}))
    with pytest.raises(error, match=r"\bdlse\b"):
        cupyflash.flash_attention_backward(out, saved, dlse=to_engine(engine, bad))


@pytest.mark.parametrize("saved", [None, (1, 2), "saved", {}], ids=str)
def test_saved_must_come_from_a_forward(saved):
    with pytest.raises(TypeError, match=r"\bsaved\b.*flash_attention_forward"):
        cupyflash.flash_attention_backward(array(B, SQ, H, DV), saved)


def test_deterministic_is_a_flag(engine):
    out, saved = cupyflash.flash_attention_forward(**_prepared(engine, {}))
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
