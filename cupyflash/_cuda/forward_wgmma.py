"""What the Hopper kernel is launched with: parameters, tensor maps, places of query tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cupyflash._cuda.arguments import Strides
from cupyflash._cuda.config_wgmma import WGMMA_FORWARD_PARAMS
from cupyflash._cuda.device_table import DeviceTable
from cupyflash._cuda.launch import Moved
from cupyflash._cuda.operand_maps import MappedOperand, write_maps
from cupyflash._cuda.order_table import order_table
from cupyflash._cuda.plan_wgmma import WgmmaForwardPlan
from cupyflash._cuda.tile_order import seen_keys, tile_places
from cupyflash._cuda.warpgroup import WARP_ROWS
from cupyflash._problem import Problem

if TYPE_CHECKING:
    from cupyflash._cuda.forward import ForwardLayout

__all__ = ["wgmma_arguments"]

_LOG2_E = 1.4426950408889634


def wgmma_arguments(
    problem: Problem,
    layout: ForwardLayout,
    plan: WgmmaForwardPlan,
    common: npt.NDArray[np.void],
    device_id: int,
) -> tuple[npt.NDArray[np.void], list[Moved], dict[str, DeviceTable]]:
    """Return ``WgmmaForwardParams``, all but the pointers.

    And where else these are written, and the tables whose addresses it holds. `common` is its
    ``ForwardParams``.
    """
    config = plan.config
    params: npt.NDArray[Any] = np.zeros((), WGMMA_FORWARD_PARAMS)
    for name in common.dtype.names or ():
        params[name] = common[name]
    begin, end = (0, problem.seqlen_k) if problem.varlen else seen_keys(problem)
    if begin >= end:  # no key is seen: one is described, and none read
        begin, end = 0, 1
    params["first_key"] = begin
    scale = problem.softmax_scale if config.raw_scores else 1.0
    params["exponent_factor"] = scale * _LOG2_E
    tables = {}
    if not problem.varlen:  # else blocks find their tiles by themselves
        tile, blocks = (config.block_m, config.block_n), plan.launch.blocks
        tables["places"] = order_table(tile_places, problem, *tile, blocks, device_id)

    of_queries = 0, problem.seqlen_q, problem.num_heads
    of_keys = begin, end, problem.num_heads_kv
    dtype, dim, dim_v = problem.dtype, problem.head_dim, problem.head_dim_v
    mapped = [
        ("query", dtype, (*of_queries, dim, config.block_m)),
        ("key", dtype, (*of_keys, dim, config.block_n)),
        ("value", dtype, (*of_keys, dim_v, config.block_n)),
    ]
    if config.staged:  # else nothing is written through a map
        mapped.append(("out", problem.output_dtype, (*of_queries, dim_v, WARP_ROWS)))
    operands = [
        MappedOperand(name, dtype, *_entries(getattr(layout, name), problem), *shape)
        for name, dtype, shape in mapped
    ]
    bias = layout.optional.bias
    if bias is not None:
        batch, heads, rows, keys = bias.shape
        by_batch, by_head, by_row, _ = bias.strides
        shape = (batch, 0, rows, heads, keys, config.block_m)
        strides = by_batch, by_row, by_head
        operands.append(MappedOperand("bias", config.bias_dtype, strides, *shape))
    return params, write_maps(params, operands), tables


def _entries(strides: Strides, problem: Problem) -> tuple[Strides, int]:
    """Return strides of ``(b, s, h, d)``, and b: all varlen entries are one sequence there."""
    return ((0, *strides), 1) if problem.varlen else (strides, problem.batch)
