"""What the Hopper kernels are compiled for and given: mirrors of kernels/attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._cuda import tensor_map
from cupyflash._cuda.config_mma import MMA_BACKWARD_PARAMS
from cupyflash._cuda.params import FORWARD_PARAMS

__all__ = [
    "MAPPED",
    "MAPPED_BACKWARD",
    "WGMMA_BACKWARD_PARAMS",
    "WGMMA_FORWARD_PARAMS",
    "WgmmaBackwardConfig",
    "WgmmaForwardConfig",
]

# Operands that the kernels read, and out, which they write, through tensor maps.
MAPPED = ("query", "key", "value", "out", "bias")
MAPPED_BACKWARD = ("query", "key", "value", "grad_out")


def _params(
    base: np.dtype[np.void], scalars: tuple[tuple[str, Any], ...], mapped: tuple[str, ...]
) -> np.dtype[np.void]:
    """Return a struct of kernels/attention/params_wgmma.cuh: `base`, spread out, scalars, maps."""
    fields: dict[str, Any] = dict(base.fields or {})
    names = list(base.names or ())
    formats = [fields[name][0] for name in names]
    offsets = [fields[name][1] for name in names]
    end = base.itemsize
    own = [(name, scalar, np.dtype(scalar).itemsize) for name, scalar in scalars]
    own += [(f"{name}_map", f"V{tensor_map.BYTES}", tensor_map.ALIGNMENT) for name in mapped]
    for name, format_, alignment in own:
        offset = -(-end // alignment) * alignment
        names.append(name)
        formats.append(format_)
        offsets.append(offset)
        end = offset + np.dtype(format_).itemsize
    size = -(-end // tensor_map.ALIGNMENT) * tensor_map.ALIGNMENT
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


WGMMA_FORWARD_PARAMS = _params(
    FORWARD_PARAMS,
    (("places", np.uint64), ("first_key", np.int32), ("exponent_factor", np.float32)),
    MAPPED,
)
WGMMA_BACKWARD_PARAMS = _params(
    MMA_BACKWARD_PARAMS,
    (
        ("order", np.uint64),
        ("first_query", np.int32),
        ("first_key", np.int32),
        ("exponent_factor", np.float32),
    ),
    MAPPED_BACKWARD,
)


@dataclass(frozen=True)
class WgmmaForwardConfig:
    """``WgmmaForwardConfig`` of kernels/attention/config_wgmma.cuh."""

    dtype: str
    out_dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    stages: int
    query_tiles: int
    store_width: int
    staged: int
    query_in_registers: bool
    shared_probabilities: bool
    joined: bool
    apart: bool
    sums_by_tile: bool
    turns: bool
    eager: bool
    raw_scores: bool
    window: bool
    softcap: bool
    exact_softcap: bool
    sinks: bool
    alibi: bool
    bias: bool
    bias_dtype: str
    bias_stages: int
    varlen: bool

    @property
    def meets_others(self) -> bool:
        """Whether a key tile may hold NaN that nobody sees."""
        return self.bias or self.varlen


@dataclass(frozen=True)
class WgmmaBackwardConfig:
    """``WgmmaBackwardConfig`` of the same file."""

    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    stages: int
    grad_out_stages: int
    early: bool
    roles: bool
    direct: bool
    persistent: bool
    whole_heads: bool
    load_width: int
    store_width: int
    raw_scores: bool
    window: bool
    softcap: bool
    exact_softcap: bool
    deterministic: bool
