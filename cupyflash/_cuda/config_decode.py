"""What the kernels of a key-value cache are compiled for and given, as in kernels/attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyflash._cuda.params import ATTENTION, FORWARD_PARAMS

__all__ = ["ARRAYS", "CACHE_PARAMS", "CACHE_POINTERS", "DESCALES", "AppendConfig", "DecodeConfig"]

# ``CacheParams`` of kernels/attention/params_decode.cuh.
CACHE_POINTERS = (
    "query",
    "attended",
    "key",
    "value",
    "new_key",
    "new_value",
    "out",
    "lse",
    "lengths",
    "leftpad",
    "blocks",
    "cos",
    "sin",
    "alibi_slopes",
    "sinks",
    "key_descale",
    "value_descale",
    "partial_sums",
    "partial_statistics",
    "faults",
)
ARRAYS = CACHE_POINTERS[:7]  # with a head_dim
DESCALES = ("key_descale", "value_descale")
_STRIDES = FORWARD_PARAMS["query_strides"]
_DESCALE_STRIDES = FORWARD_PARAMS["key_descale_strides"]
CACHE_PARAMS: np.dtype[np.void] = np.dtype(
    [
        *((name, np.uint64) for name in CACHE_POINTERS),
        ("length", np.int64),
        *((f"{name}_strides", _STRIDES) for name in ARRAYS),
        ("lengths_stride", np.int64),
        ("leftpad_stride", np.int64),
        ("blocks_stride", np.int64),
        ("blocks_page_stride", np.int64),
        ("cos_strides", (np.int64, (2,))),
        ("sin_strides", (np.int64, (2,))),
        *((f"{name}_strides", _DESCALE_STRIDES) for name in DESCALES),
        ("key_scale", np.float64),
        ("value_scale", np.float64),
        ("attention", ATTENTION),
        ("num_blocks", np.int32),
        ("new_tokens", np.int32),
        ("rotary_rows", np.int32),
        ("rotary_pairs", np.int32),
        ("turns_each_query", np.int32),
        ("num_splits", np.int32),
        ("split_keys", np.int32),
    ],
    align=True,
)


@dataclass(frozen=True)
class DecodeConfig:
    """``DecodeConfig`` of kernels/attention/config_decode.cuh."""

    dtype: str
    kv_dtype: str
    head_dim: int
    head_dim_v: int
    row_warps: int
    key_warps: int
    warp_keys: int
    stages: int
    kept_steps: int
    load_width: int
    cache_width: int
    store_width: int
    page_size: int
    raw_scores: bool
    window: bool
    softcap: bool
    alibi: bool
    sinks: bool
    exact_softcap: bool
    split: bool


@dataclass(frozen=True)
class AppendConfig:
    """``AppendConfig`` of the same file."""

    dtype: str
    kv_dtype: str
    rotary_dtype: str
    width: int
    page_size: int
    rotary: bool
    interleaved: bool
