"""What the Hopper kernel is compiled for and given: mirrors of kernels/attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._cuda import tensor_map
from cupyflash._cuda.params import FORWARD_PARAMS

__all__ = ["MAPPED", "WGMMA_FORWARD_PARAMS", "WgmmaForwardConfig"]

MAPPED = ("query", "key", "value")  # operands that the kernel reads through tensor maps


def _params() -> np.dtype[np.void]:
    """``WgmmaForwardParams`` of kernels/attention/params_wgmma.cuh, ``common`` spread out."""
    common: dict[str, Any] = dict(FORWARD_PARAMS.fields or {})
    names = list(FORWARD_PARAMS.names or ())
    formats = [common[name][0] for name in names]
    offsets = [common[name][1] for name in names]
    end = FORWARD_PARAMS.itemsize
    own: list[tuple[str, Any, int]] = [
        ("order", np.uint64, 8),
        ("first_key", np.int32, 4),
        ("exponent_factor", np.float32, 4),
    ]
    own += [(f"{name}_map", f"V{tensor_map.BYTES}", tensor_map.ALIGNMENT) for name in MAPPED]
    for name, format_, alignment in own:
        offset = -(-end // alignment) * alignment
        names.append(name)
        formats.append(format_)
        offsets.append(offset)
        end = offset + np.dtype(format_).itemsize
    size = -(-end // tensor_map.ALIGNMENT) * tensor_map.ALIGNMENT
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


WGMMA_FORWARD_PARAMS = _params()


@dataclass(frozen=True)
class WgmmaForwardConfig:
    """``WgmmaForwardConfig`` of kernels/attention/config_wgmma.cuh."""

    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    stages: int
    query_tiles: int
    prefetched: int
    store_width: int
    query_in_registers: bool
    interleaved: bool
    raw_scores: bool
    window: bool
    softcap: bool
    sinks: bool
