"""The activation of BERT and Whisper, which NumPy cannot write with an erf of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["gelu"]

Array = Any


def gelu(xp: Any, hidden: Array) -> Array:
    """Return ``x * Phi(x)``, the exact form and not the tanh one.

    Abramowitz & Stegun 7.1.26, absolute error below 1.5e-7.
    """
    x = xp.abs(hidden) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * x)
    tail = t * np.float32(1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail = t * (tail + np.float32(coefficient))
    erf = xp.copysign(1 - tail * xp.exp(-x * x), hidden)
    return hidden * (1 + erf) / 2
