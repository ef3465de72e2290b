"""What the Hopper backward is launched with: parameters and tensor maps; and what it can read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cupyflash._cuda import tensor_map
from cupyflash._cuda.config_wgmma import MAPPED_BACKWARD, WGMMA_BACKWARD_PARAMS
from cupyflash._cuda.device_table import DeviceTable
from cupyflash._cuda.kernel import VECTOR_BYTES
from cupyflash._cuda.launch import Moved
from cupyflash._cuda.operand_maps import MappedOperand, write_maps
from cupyflash._cuda.order_table import order_table
from cupyflash._cuda.plan_wgmma_backward import WgmmaBackwardPlan
from cupyflash._cuda.tile_order import key_tile_order, seeing_queries, seen_keys
from cupyflash._problem import Problem

if TYPE_CHECKING:
    from cupyflash._cuda.backward import BackwardLayout

__all__ = ["can_read", "wgmma_backward_arguments"]

_LOG2_E = 1.4426950408889634


def can_read(problem: Problem, layout: BackwardLayout) -> bool:
    """Whether the copy engine reads q, k, v and grad_out as they are."""
    if problem.is_empty or layout.mapped_alignment % VECTOR_BYTES:
        return False
    queries = problem.batch, problem.seqlen_q, problem.num_heads
    keys = problem.batch, problem.seqlen_k, problem.num_heads_kv
    return all(
        length <= 1 or tensor_map.is_legal_stride(stride)
        for lengths, strides in zip((queries, keys, keys, queries), _mapped(layout), strict=True)
        for length, stride in zip(lengths, strides, strict=False)
    )


def wgmma_backward_arguments(
    problem: Problem,
    layout: BackwardLayout,
    plan: WgmmaBackwardPlan,
    common: npt.NDArray[np.void],
    device_id: int,
) -> tuple[npt.NDArray[np.void], list[Moved], dict[str, DeviceTable]]:
    """Return ``WgmmaBackwardParams``, all but the pointers.

    And where else these are written, and the tables whose addresses it holds. `common` is its
    ``BackwardParams``.
    """
    config = plan.config
    params: npt.NDArray[Any] = np.zeros((), WGMMA_BACKWARD_PARAMS)
    for name in common.dtype.names or ():
        params[name] = common[name]
    params["rows"], params["tiles"] = plan.scratch.rows, plan.scratch.tiles
    queries, keys = seeing_queries(problem), seen_keys(problem)
    if keys[0] >= keys[1] or queries[0] >= queries[1]:  # one row is described, and none read
        queries = keys = 0, 1
    params["first_query"], params["first_key"] = queries[0], keys[0]
    scale = problem.softmax_scale if config.raw_scores else 1.0
    params["exponent_factor"] = scale * _LOG2_E
    tables = {}
    if config.persistent and config.window and not config.whole_heads:
        tile, blocks = (config.block_m, config.block_n), plan.main.blocks
        tables["order"] = order_table(key_tile_order, problem, *tile, blocks, device_id)
    of_queries = *queries, problem.num_heads
    of_keys = *keys, problem.num_heads_kv
    dim, dim_v = problem.head_dim, problem.head_dim_v
    shapes = (
        (*of_queries, dim, config.block_m),
        (*of_keys, dim, config.block_n),
        (*of_keys, dim_v, config.block_n),
        (*of_queries, dim_v, config.block_m),
    )
    operands = [
        MappedOperand(name, problem.dtype, strides, problem.batch, *shape)
        for name, strides, shape in zip(MAPPED_BACKWARD, _mapped(layout), shapes, strict=True)
    ]
    return params, write_maps(params, operands), tables


def _mapped(layout: BackwardLayout) -> tuple[tuple[int, ...], ...]:
    """Return the strides of `MAPPED_BACKWARD`."""
    query, key, value, _, grad_out = layout.loaded
    return query, key, value, grad_out
