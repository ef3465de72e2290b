"""The options of one call as the user gave them, and the checks of each scalar one."""

from __future__ import annotations

import math
import operator
import reprlib
import secrets
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from cupyflash.tiling import Tiling

LAYOUTS = ("bshd", "bhsd")
ENGINES = ("numpy", "simt", "mma", "wgmma")
_SEED_END = 2**64
# Of the largest number: such a cap changes scores by less than rounding, unless they overflow soon.
_HARMLESS_CAP = 2.0**-24


class Options(NamedTuple):
    """Everything that `flash_attention` takes beyond q, k, v and out."""

    causal: Any = False
    window: Any = None
    softmax_scale: Any = None
    softcap: Any = None
    mask: Any = None
    block_mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    score_mod: Any = None
    dropout_p: Any = 0.0
    seed: Any = None
    layout: Any = "bshd"
    engine: Any = None
    tiling: Any = None
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    out_dtype: Any = None


def finite_number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {reprlib.repr(value)}")
    return number


def softmax_scale(value: Any, head_dim: int, largest: float) -> float:
    """Return the checked scale, no larger than what the accumulator can hold."""
    if value is None:
        return 1.0 / math.sqrt(head_dim)
    return max(-largest, min(finite_number(value, "softmax_scale"), largest))


def softcap(value: Any, largest: float) -> float | None:
    """Return the checked cap; None for one that no accumulator could tell from no cap."""
    if value is None:
        return None
    cap = finite_number(value, "softcap")
    if cap < 0:
        raise ValueError(f"softcap must be > 0 (None or 0 turns it off), got {value!r}")
    return None if cap == 0 or cap > largest * _HARMLESS_CAP else cap


def dropout_p(value: Any) -> float:
    probability = finite_number(value, "dropout_p")
    if not 0 <= probability < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {value!r}")
    return probability


def seed(value: Any, needed: bool) -> int | None:
    """Return the checked seed; draw one if dropout needs it and none was given."""
    if value is None:
        return secrets.randbits(64) if needed else None
    number = integer(value, "seed")
    if not 0 <= number < _SEED_END:
        raise ValueError(f"seed must be in [0, 2**64), got {value!r}")
    return number


def alignment(causal: Any) -> tuple[bool, bool]:
    """Return ``(is causal, is top-left)`` for a value of ``causal=``."""
    if isinstance(causal, str):
        if causal not in ("bottom-right", "top-left"):
            raise ValueError(
                f"causal must be True, False, 'bottom-right' or 'top-left', got {causal!r}"
            )
        return True, causal == "top-left"
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(
            "causal must be True, False, 'bottom-right' or 'top-left', "
            f"got {type(causal).__name__} {causal!r}"
        )
    return bool(causal), False


def window(value: Any, reach: int) -> tuple[int | None, int | None]:
    """Return the checked window; a bound that spans `reach` keys hides nothing and is open."""
    if value is None:
        return None, None
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"window must be None or a tuple (left, right), got {value!r}")
    if len(value) != 2:
        raise ValueError(f"window must have two sides (left, right), got {value!r}")
    left, right = (_window_side(side, value) for side in value)
    return left if left is None or left < reach else None, (
        right if right is None or right < reach else None
    )


def _window_side(side: Any, given: Any) -> int | None:
    if side is None:
        return None
    bound = integer(side, "window")
    if bound < 0:
        raise ValueError(f"window sides must be >= 0 or None (open), got window={given!r}")
    return bound


def layout(value: Any) -> str:
    return _choice(value, LAYOUTS, "layout")


def engine(value: Any) -> str | None:
    return None if value is None else _choice(value, ENGINES, "engine")


def _choice(value: Any, choices: tuple[str, ...], name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {choices}, got {type(value).__name__} {value!r}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
    return value


def tiling(value: Any) -> Tiling | None:
    if value is None:
        return None
    if not isinstance(value, Tiling):
        raise TypeError(f"tiling must be a cupyflash.Tiling, got {type(value).__name__}")
    for name in ("block_m", "block_n", "stages", "warps"):
        if integer(getattr(value, name), f"tiling.{name}") < 1:
            raise ValueError(f"tiling.{name} must be >= 1, got {value}")
    return value


def require_bools(**flags: Any) -> None:
    """Refuse what is only true or false in an ``if``: the string "False" is true there."""
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False, got {flag!r}")


def integer(value: Any, name: str) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must hold integers, got {type(value).__name__} {value!r}")
