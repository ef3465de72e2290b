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
from tests.harness import require
from tests.memory import Guarded, to_engine, to_host

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


def prepared(engine: str, change: dict[str, Any]) -> dict[str, Any]:
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
    changed = prepared(engine, bad.change)
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
    arrays = prepared(engine, {})
    for _ in range(2):
        cupyflash.flash_attention(**arrays, **good)
    with pytest.raises(TypeError, match=next(iter(bad))):
        cupyflash.flash_attention(**arrays, **bad)


def test_good_arguments_are_good(engine):
    """The table above changes these: were they wrong, it would prove nothing."""
    out = cupyflash.flash_attention(**prepared(engine, {}))
    assert to_host(out).shape == (B, SQ, H, DV)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e5m2])
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
    good = prepared(engine, {})
    with pytest.raises((TypeError, ValueError), match="block_size"):
        cupyflash.flash_attention(**good, block_mask=BlockMask(blocks, block_size=block_size))


def test_block_mask_must_be_bool(engine):
    blocks = to_engine(engine, array(1, 1, 3, 4))
    good = prepared(engine, {})
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


@pytest.mark.parametrize("ends", [[0, 1, -(2**31)], [0, 2**31 - 1, -1]])
def test_cu_seqlens_whose_differences_overflow(ends):
    q = np.zeros((4, 1, 8), np.float32)
    right, wrong = np.array([0, 2, 4], np.int32), np.array(ends, np.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        cupyflash.flash_attention_varlen(q, q, q, wrong, right)


def test_a_derivative_by_an_unknown_parameter():
    def backward(score, b, h, i, j, table):
        return 1.0, {"tabel": ((h,), 1.0)}

    mod = cupyflash.ScoreMod(
        "score",
        params={"table": np.zeros(2, np.float32)},
        numpy_forward=lambda score, b, h, i, j, table: score + table[h],
        numpy_backward=backward,
    )
    q = np.zeros((1, 4, 2, 8), np.float32)
    out, saved = cupyflash.flash_attention_forward(q, q, q, score_mod=mod)
    with pytest.raises(ValueError, match="tabel"):
        cupyflash.flash_attention_backward(out, saved)


@pytest.mark.parametrize(
    "wrong",
    [{"forward": 1}, {"backward": 2}, {"params": None}, {"params": {1: 2}}, {"numpy_forward": 5}],
)
def test_score_mod_of_wrong_kinds(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        cupyflash.ScoreMod(**({"forward": "score"} | wrong))


def test_out_that_only_copies_is_refused():
    class Copies:
        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **_):
            raise BufferError("not shared")

        def __array__(self, *_, **__):
            return np.zeros((1, 4, 2, 8), np.float32)

    q = np.zeros((1, 4, 2, 8), np.float32)
    with pytest.raises(TypeError, match="out"):
        cupyflash.flash_attention(q, q, q, out=Copies())


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_heads_that_do_not_fit_hint_at_the_other_layout(layout):
    q, k = np.zeros((2, 64, 4, 8), np.float32), np.zeros((2, 100, 2, 8), np.float32)
    other = "bhsd" if layout == "bshd" else "bshd"
    if layout == "bshd":
        q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    with pytest.raises(ValueError, match=f"layout='{other}' they have 4 and 2 heads"):
        cupyflash.flash_attention(q, k, k, layout=layout)
    odd = np.zeros((2, 100, 100, 8), np.float32)
    with pytest.raises(ValueError, match="multiple of k's 100 heads") as info:
        cupyflash.flash_attention(q, odd, odd, layout=layout)
    assert "layout" not in str(info.value)
