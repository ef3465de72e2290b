"""The structs that kernels receive by value: mirrors of ``kernels/attention/params.cuh``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyflash._problem import Operands, Problem

__all__ = [
    "BACKWARD_PARAMS",
    "BACKWARD_POINTERS",
    "FORWARD_PARAMS",
    "FORWARD_POINTERS",
    "ITEMSIZE",
    "Strides",
    "address",
    "alignment",
    "fill",
    "optional_strides",
    "row_alignment",
    "size_assertion",
]

Strides = tuple[int, ...]  # of an array, in bytes, as NumPy gives them

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

_OPEN = 2**31 - 1  # a window side without a bound
_WIDEST = 16  # bytes of the widest access


def _struct(*fields: tuple[str, Any]) -> np.dtype[np.void]:
    return np.dtype(list(fields), align=True)


_STRIDES = _struct(("batch", np.int64), ("row", np.int64), ("head", np.int64))

_ATTENTION = _struct(
    ("softmax_scale", np.float64),
    ("softcap", np.float64),
    ("alibi_batch_stride", np.int64),
    ("alibi_head_stride", np.int64),
    ("sinks_stride", np.int64),
    ("batch", np.int32),
    ("seqlen_q", np.int32),
    ("seqlen_k", np.int32),
    ("num_heads", np.int32),
    ("group_size", np.int32),
    ("head_dim", np.int32),
    ("head_dim_v", np.int32),
    ("window_left", np.int32),
    ("window_right", np.int32),
    ("top_left", np.int32),
)

FORWARD_POINTERS = (
    "query",
    "key",
    "value",
    "out",
    "row_max",
    "row_sum",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "alibi_slopes",
    "sinks",
)
FORWARD_PARAMS = _struct(
    *((name, np.uint64) for name in FORWARD_POINTERS),
    *((f"{name}_strides", _STRIDES) for name in FORWARD_POINTERS[:6]),
    ("attention", _ATTENTION),
)

BACKWARD_POINTERS = (
    "query",
    "key",
    "value",
    "out",
    "grad_out",
    "row_max",
    "row_sum",
    "grad_lse",
    "delta",
    "grad_query",
    "grad_key",
    "grad_value",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "alibi_slopes",
    "sinks",
    "grad_sinks",
)
BACKWARD_PARAMS = _struct(
    *((name, np.uint64) for name in BACKWARD_POINTERS),
    *((f"{name}_strides", _STRIDES) for name in BACKWARD_POINTERS[:12]),
    ("grad_sinks_stride", np.int64),
    ("attention", _ATTENTION),
)


def size_assertion(name: str, dtype: np.dtype[np.void]) -> str:
    """Return a static_assert that the C++ struct `name` is as large as `dtype`.

    There is no offsetof without headers; a unit test compares the order of the fields.
    """
    return f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name} differs from Python");'


def attention_values(problem: Problem) -> npt.NDArray[np.void]:
    """Return the `Attention` struct of a problem, with the strides of ALiBi and sinks at 0."""
    values = np.zeros((), _ATTENTION)
    values["softmax_scale"] = problem.softmax_scale
    values["softcap"] = problem.softcap or 0.0
    for name in ("batch", "seqlen_q", "seqlen_k", "num_heads", "group_size", "head_dim"):
        values[name] = getattr(problem, name)
    values["head_dim_v"] = problem.head_dim_v
    for side in ("window_left", "window_right"):
        bound = getattr(problem, side)
        values[side] = _OPEN if bound is None else min(bound, _OPEN)
    values["top_left"] = problem.top_left
    return values


def head_strides(strides: Strides, itemsize: int) -> tuple[int, int, int]:
    """Return (batch, row, head) distances in elements of ``(b, s, h, d)`` or ``(total, h, d)``."""
    distances = [stride // itemsize for stride in strides[:-1]]
    batch, row, head = [0] * (3 - len(distances)) + distances
    return batch, row, head


def statistic_strides(strides: Strides, itemsize: int) -> tuple[int, int, int]:
    """Return (batch, row, head) distances in elements of ``(b, h, s)`` or ``(h, total)``."""
    batch, head, row = [0] * (3 - len(strides)) + [stride // itemsize for stride in strides]
    return batch, row, head


def address(array: Any) -> int:
    """Return the device address of an array; 0 for None."""
    return 0 if array is None else int(array.data.ptr)


def alignment(numbers: Iterable[int]) -> int:
    """Return the largest power of two, up to 16, that divides all the addresses and strides."""
    bits = _WIDEST
    for number in numbers:
        bits |= number
    return bits & -bits


def row_alignment(pointers: int, strides: Iterable[Strides]) -> int:
    """Return the same for every row of arrays whose addresses are multiples of `pointers`."""
    return alignment((pointers, *(stride for array in strides for stride in array[:-1])))


def optional_strides(operands: Operands) -> tuple[Strides, Strides]:
    """Return the strides in bytes of ALiBi slopes, by (batch, head), and of sinks; 0 if absent."""
    slopes, sinks = operands.alibi_slopes, operands.sinks
    alibi = (0, 0)
    if slopes is not None:
        alibi = (0 if slopes.shape[0] == 1 else slopes.strides[0], slopes.strides[1])
    return alibi, (0,) if sinks is None else tuple(sinks.strides)


def fill(
    params: npt.NDArray[np.void],
    problem: Problem,
    heads: Mapping[str, Strides],
    statistics: Mapping[str, Strides | None],
    optional: tuple[Strides, Strides],
) -> None:
    """Write everything but pointers into a params struct.

    Parameters
    ----------
    params : structured array
        One element of `FORWARD_PARAMS` or `BACKWARD_PARAMS`, zeros.
    problem : Problem
        Lengths and options.
    heads, statistics : mapping of str to strides
        Strides in bytes of the arrays with a head_dim and of those without; None: not given.
    optional : pair of strides
        From `optional_strides`.
    """
    itemsize = ITEMSIZE[problem.dtype]
    accumulator = ITEMSIZE[problem.accumulator_dtype]
    for name, strides in heads.items():
        params[f"{name}_strides"] = head_strides(strides, itemsize)
    for name, given in statistics.items():
        if given is not None:
            params[f"{name}_strides"] = statistic_strides(given, accumulator)
    attention = attention_values(problem)
    (alibi_batch, alibi_head), (sinks,) = optional
    float32 = ITEMSIZE["float32"]
    attention["alibi_batch_stride"] = alibi_batch // float32
    attention["alibi_head_stride"] = alibi_head // float32
    attention["sinks_stride"] = sinks // float32
    params["attention"] = attention
