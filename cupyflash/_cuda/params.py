"""The structs that kernels receive by value: mirrors of ``kernels/attention/params.cuh``."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash._problem import Problem

__all__ = [
    "ATTENTION",
    "BACKWARD_PARAMS",
    "BACKWARD_POINTERS",
    "FORWARD_DESCALES",
    "FORWARD_PARAMS",
    "FORWARD_POINTERS",
    "ITEMSIZE",
    "OPEN",
    "SCORE_ARRAYS",
    "SCORE_PARAMS",
    "pointers_of",
    "size_assertion",
]

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1}

SCORE_PARAMS = 8  # named arrays of a score_mod, at most

OPEN = 2**31 - 1  # a window side or an axis without a bound


def _struct(*fields: tuple[str, Any]) -> np.dtype[np.void]:
    return np.dtype(list(fields), align=True)


_STRIDES = _struct(("batch", np.int64), ("row", np.int64), ("head", np.int64))

_DESCALE_STRIDES = _struct(("batch", np.int64), ("head", np.int64))

_SCORE_STRIDES = _struct(
    ("batch", np.int64),
    ("head", np.int64),
    ("row", np.int64),
    ("col", np.int64),
    ("rows", np.int32),
    ("cols", np.int32),
)

SCORE_ARRAYS = _struct(
    ("mask", _SCORE_STRIDES),
    ("inner_mask", _SCORE_STRIDES),
    ("bias", _SCORE_STRIDES),
    ("blocks", _SCORE_STRIDES),
    ("param_sizes", (np.int64, (SCORE_PARAMS,))),
    ("block_rows", np.int32),
    ("block_cols", np.int32),
    ("map_batch", np.int32),
    ("map_heads", np.int32),
    ("map_rows", np.int32),
    ("map_cols", np.int32),
)

ATTENTION = _struct(
    ("softmax_scale", np.float64),
    ("softcap", np.float64),
    ("alibi_batch_stride", np.int64),
    ("alibi_head_stride", np.int64),
    ("sinks_stride", np.int64),
    ("keep_factor", np.float64),
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
    ("dropout_threshold", np.uint32),
)


def _pointer(name: str) -> tuple[str, Any]:
    """Return the field of a pointer, or of several."""
    several = name.endswith("score_params")
    return (name, (np.uint64, (SCORE_PARAMS,))) if several else (name, np.uint64)


_FIRST_OPTIONAL = (
    "mask"  # pointers from here on are null in calls without a feature that needs them
)

FORWARD_DESCALES = ("query_descale", "key_descale", "value_descale")
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
    "mask",
    "inner_mask",
    "bias",
    "blocks",
    "visibility",
    "seed_address",
    "seed",
    "score_params",
    *FORWARD_DESCALES,
)
FORWARD_PARAMS = _struct(
    *map(_pointer, FORWARD_POINTERS),
    *((f"{name}_strides", _STRIDES) for name in FORWARD_POINTERS[:6]),
    ("attention", ATTENTION),
    ("scores", SCORE_ARRAYS),
    *((f"{name}_strides", _DESCALE_STRIDES) for name in FORWARD_DESCALES),
    ("value_scale", np.float64),
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
    "mask",
    "inner_mask",
    "bias",
    "blocks",
    "visibility",
    "key_visibility",
    "seed_address",
    "seed",
    "score_params",
    "grad_bias",
    "bias_sums",
    "grad_score_params",
)
BACKWARD_PARAMS = _struct(
    *map(_pointer, BACKWARD_POINTERS),
    *((f"{name}_strides", _STRIDES) for name in BACKWARD_POINTERS[:12]),
    ("grad_bias_strides", _SCORE_STRIDES),
    ("grad_sinks_stride", np.int64),
    ("attention", ATTENTION),
    ("scores", SCORE_ARRAYS),
)


def size_assertion(name: str, dtype: np.dtype[np.void]) -> str:
    """Return a static_assert that the C++ struct `name` is as large as `dtype`.

    There is no offsetof without headers; a unit test compares the order of the fields.
    """
    return f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name} differs from Python");'


def pointers_of(names: tuple[str, ...], problem: Problem) -> tuple[str, ...]:
    """Return those of a struct's pointers that a launch sets: the others are null."""
    if problem.dropout_p or problem.is_float8 or problem.extras - {"alibi_slopes", "sinks"}:
        return names
    return names[: names.index(_FIRST_OPTIONAL)]
