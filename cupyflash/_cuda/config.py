"""What the simt engine's kernels are compiled for: mirrors of kernels/attention/config.cuh."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["BackwardConfig", "ForwardConfig", "constant"]


@dataclass(frozen=True)
class ForwardConfig:
    """What a forward kernel is compiled for: ``ForwardConfig`` of the C++ file."""

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
    sinks: bool
    varlen: bool


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


def constant(config: Any, name: str = "config") -> str:
    """Return the C++ definition of `config`, a dataclass named as its C++ struct."""
    initialisers = ", ".join(
        f".{field.name} = {_literal(getattr(config, field.name))}" for field in fields(config)
    )
    return f"constexpr {type(config).__name__} {name}{{{initialisers}}};"


def _literal(value: object) -> str:
    return f"DataType::{value}" if isinstance(value, str) else str(value).lower()
