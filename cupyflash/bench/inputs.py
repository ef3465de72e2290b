"""Random arrays for a workload, and what a contender must return for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._arrays import BFLOAT16
from cupyflash._cuda.device import require_cupy
from cupyflash._float8 import FLOAT8, float8_bits
from cupyflash.bench.workloads import Workload

__all__ = ["TOLERANCE", "Inputs", "disagreement", "draw", "normal", "reference_rows", "sampled"]

Array = Any

# Relative, in the norm: peers that keep 16-bit scores round more often than we do.
# FP8: probabilities are rounded to 3 bits.
TOLERANCE = {"float16": 5e-3, "bfloat16": 2e-2, "float32": 1e-4, "float8_e4m3fn": 6e-2}
_ROWS = 32  # of one head, which float64 on the host does in no time


@dataclass(frozen=True, eq=False)
class Inputs:
    """Arrays of a workload, ``(b, s, h, d)``."""

    query: Array
    key: Array
    value: Array
    grad_out: Array


def draw(workload: Workload) -> Inputs:
    """Return standard normal numbers on the device."""
    rows = (workload.batch, workload.seqlen_q, workload.num_heads, workload.head_dim)
    columns = (workload.batch, workload.seqlen_k, workload.num_heads_kv, workload.head_dim)
    return Inputs(*(normal(shape, workload.dtype) for shape in (rows, columns, columns, rows)))


def normal(shape: tuple[int, ...], dtype: str) -> Array:
    """Return standard normal numbers on the device, of a dtype by its name."""
    cupy = require_cupy()
    numbers = cupy.random.standard_normal(shape, dtype="float32")
    if dtype == "float8_e4m3fn":
        return float8_bits(numbers, cupy)
    if dtype == "bfloat16":  # by its bits: CuPy has no such cast in every version
        bits = (numbers.view("uint32") + 0x8000) >> 16
        return bits.astype("uint16").view(BFLOAT16)
    return numbers.astype(dtype, copy=False)


def sampled(workload: Workload, array: Array) -> Array:
    """Return the rows of out or dq that `reference_rows` computes, in float64 on the host."""
    return _host(array[-1, _sample(workload), -1])


def reference_rows(workload: Workload, inputs: Inputs) -> tuple[Array, Array]:
    """Return ``(out, dq)`` of some rows of the last head, dense in float64 on the host.

    It shares nothing with any engine. The last rows are among them: they see most keys.
    """
    rows = _sample(workload)
    query, grad_out = (_host(x[-1, rows, -1]) for x in (inputs.query, inputs.grad_out))
    key, value = (_host(x[-1, :, -1]) for x in (inputs.key, inputs.value))
    scale = workload.head_dim**-0.5
    scores = scale * query @ key.T
    if workload.causal:
        last_seen = np.arange(workload.seqlen_q)[rows] + workload.seqlen_k - workload.seqlen_q
        scores[np.arange(workload.seqlen_k) > last_seen[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    out = weights @ value
    grad_weights = grad_out @ value.T - (grad_out * out).sum(axis=1, keepdims=True)
    return out, scale * (weights * grad_weights) @ key


def disagreement(found: Sequence[Array], expected: Sequence[Array]) -> float:
    """Return the largest relative error, in the norm of an array; NaN where one is not finite."""
    errors = []
    for mine, right in zip(found, expected, strict=True):
        if mine.shape != right.shape:
            raise ValueError(f"a result has shape {mine.shape} in place of {right.shape}")
        difference = _floats(mine) - _floats(right)
        errors.append(_norm(difference) / _norm(_floats(right)))
    return float(np.max(errors))


def _sample(workload: Workload) -> slice:
    step = max(1, workload.seqlen_q // _ROWS)
    return slice((workload.seqlen_q - 1) % step, None, step)


def _floats(array: Array) -> Array:
    """Widen 16-bit floats where they are; bfloat16 by its bits, as in `draw`."""
    if array.dtype != BFLOAT16:
        return array.astype("float64" if isinstance(array, np.ndarray) else "float32")
    bits = array.view("uint16").astype("uint32") << 16
    return bits.view("float32")


def _norm(array: Array) -> float:
    return float((array * array).sum() ** 0.5)


def _host(array: Array) -> Array:
    array = array.get() if hasattr(array, "get") else array
    return (array.view(FLOAT8) if array.dtype == np.uint8 else array).astype(np.float64)
