"""What the simt engine's kernels are compiled for: mirrors of kernels/attention/config.cuh."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from cupyflash._problem import Problem

__all__ = ["BackwardConfig", "ForwardConfig", "constant", "score_features"]


@dataclass(frozen=True)
class ForwardConfig:
    """What a forward kernel is compiled for: ``ForwardConfig`` of the C++ file."""

    dtype: str
    kv_dtype: str
    out_dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    warps: int
    load_width: int
    store_width: int
    async_copy: bool
    window: bool
    softcap: bool
    alibi: bool
    sinks: bool
    varlen: bool
    masks: int
    block_mask: bool
    visibility: bool
    bias: bool
    bias_dtype: str
    dropout: bool
    score_mod: bool


@dataclass(frozen=True)
class BackwardConfig:
    """What a backward kernel is compiled for: ``BackwardConfig`` of the same file."""

    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    warps: int
    load_width: int
    store_width: int
    async_copy: bool
    window: bool
    softcap: bool
    alibi: bool
    varlen: bool
    masks: int
    block_mask: bool
    visibility: bool
    bias: bool
    bias_dtype: str
    dropout: bool
    score_mod: bool
    exact_sums: bool


def score_features(problem: Problem) -> dict[str, Any]:
    """Return the fields that every engine's configurations have for changes of the scores."""
    return {
        "window": problem.is_banded,
        "softcap": problem.softcap is not None,
        "alibi": "alibi_slopes" in problem.extras,
        "varlen": problem.varlen,
        "masks": problem.masks,
        "block_mask": "block_mask" in problem.extras,
        "visibility": bool(problem.mask_shape),
        "bias": problem.bias_dtype is not None,
        "bias_dtype": problem.bias_dtype or "float32",
        "dropout": problem.dropout_p > 0,
        "score_mod": "score_mod" in problem.extras,
    }


def constant(config: Any, name: str = "config") -> str:
    """Return the C++ definition of `config`, a dataclass named as its C++ struct."""
    initialisers = ", ".join(
        f".{field.name} = {_literal(getattr(config, field.name))}" for field in fields(config)
    )
    return f"constexpr {type(config).__name__} {name}{{{initialisers}}};"


def _literal(value: object) -> str:
    return f"DataType::{value}" if isinstance(value, str) else str(value).lower()
