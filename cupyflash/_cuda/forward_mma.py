"""The mma engine's forward: as `forward`, with tensor-core kernels."""

from __future__ import annotations

from functools import lru_cache

from cupyflash._cuda.device import describe
from cupyflash._cuda.forward import ForwardLayout, forward_params
from cupyflash._cuda.launch import Launcher
from cupyflash._cuda.module import load
from cupyflash._cuda.params import FORWARD_POINTERS, address, alignment, optional_strides
from cupyflash._cuda.plan_mma import plan_forward
from cupyflash._problem import Array, Operands, Problem
from cupyflash.tiling import Tiling

__all__ = ["forward"]


def forward(
    problem: Problem,
    operands: Operands,
    tiling: Tiling | None,
    out: Array,
    row_max: Array | None,
    row_sum: Array | None,
) -> None:
    """Write attention's output and softmax statistics.

    FlashAttention-2 (Dao 2023, arXiv 2307.08691), Algorithm 1. Parameters and errors as in
    `cupyflash._cuda.forward.forward`.
    """
    query, key, value = operands.query, operands.key, operands.value
    layout = ForwardLayout(
        query.strides,
        key.strides,
        value.strides,
        out.strides,
        None if row_max is None else row_max.strides,
        None if row_sum is None else row_sum.strides,
        optional_strides(operands),
        alignment((address(query), address(key), address(value))),
        alignment((address(out),)),
    )
    launcher, blocks = _launcher(problem, query.device.id, tiling, layout)
    launcher(
        blocks,
        address(query),
        address(key),
        address(value),
        address(out),
        address(row_max),
        address(row_sum),
        address(operands.cu_seqlens_q),
        address(operands.cu_seqlens_k),
        address(operands.alibi_slopes),
        address(operands.sinks),
    )


@lru_cache(maxsize=4096)
def _launcher(
    problem: Problem, device_id: int, tiling: Tiling | None, layout: ForwardLayout
) -> tuple[Launcher, int]:
    plan = plan_forward(problem, describe(device_id), tiling, *layout.vector_bytes)
    launch = plan.launch
    module = load(plan.stub, [launch.entry], device_id=device_id, plan=plan)
    launcher = Launcher(
        module.get_function(launch.entry, launch.shared_memory),
        device_id,
        forward_params(problem, layout),
        FORWARD_POINTERS,
        threads=launch.threads,
        shared_memory=launch.shared_memory,
    )
    return launcher, launch.blocks
