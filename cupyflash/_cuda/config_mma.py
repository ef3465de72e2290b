"""What the mma engine's kernels are compiled for and given: mirrors of kernels/attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyflash._cuda.params import BACKWARD_PARAMS, BACKWARD_POINTERS

__all__ = [
    "MMA_BACKWARD_PARAMS",
    "MMA_BACKWARD_POINTERS",
    "MmaBackwardConfig",
    "MmaForwardConfig",
    "Scratch",
]

# ``MmaBackwardParams`` of kernels/attention/params_mma.cuh.
MMA_BACKWARD_POINTERS = ("query_sums", "statistics", "turns", *BACKWARD_POINTERS)
MMA_BACKWARD_PARAMS: np.dtype[np.void] = np.dtype(
    [(name, np.uint64) for name in MMA_BACKWARD_POINTERS[:3]]
    + [(name, BACKWARD_PARAMS[name]) for name in BACKWARD_PARAMS.names or ()]
    + [("rows", np.int64), ("tiles", np.int64)],
    align=True,
)


@dataclass(frozen=True)
class MmaForwardConfig:
    """``MmaForwardConfig`` of kernels/attention/config_mma.cuh."""

    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    warps: int
    load_width: int
    store_width: int
    kept_steps: int
    turns: bool
    raw_scores: bool
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
    bias_width: int
    exact_softcap: bool


@dataclass(frozen=True)
class MmaBackwardConfig:
    """``MmaBackwardConfig`` of the same file."""

    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    key_warps: int
    query_warps: int
    load_width: int
    store_width: int
    raw_scores: bool
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
    bias_width: int
    exact_softcap: bool
    bias_rows: bool
    bias_cols: bool
    bias_shared: bool
    bias_in_tiles: bool
    grad_bias_dtype: str
    deterministic: bool


@dataclass(frozen=True)
class Scratch:
    """Sizes of a tensor-core backward's scratch memory: see ``MmaBackwardParams``."""

    rows: int  # of each (batch, head)
    tiles: int
    pairs: int  # (batch, head) pairs
    head_dim: int  # padded
    row_statistics: int = 3  # of a row
    sum_pairs: int | None = None  # that are summed up at a time; None: all

    @property
    def query_sums(self) -> int:
        """Number of float32."""
        pairs = self.pairs if self.sum_pairs is None else self.sum_pairs
        return pairs * self.rows * self.head_dim

    @property
    def statistics(self) -> int:
        """Number of float32."""
        return self.row_statistics * self.pairs * self.rows

    @property
    def turns(self) -> int:
        """Number of int32."""
        return self.pairs * self.tiles
