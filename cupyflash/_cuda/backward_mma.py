"""The mma engine's backward: statistics, the main kernel, dq's conversion, sinks' gradient."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyflash._cuda.backward import BackwardLayout, backward_params
from cupyflash._cuda.config_mma import MMA_BACKWARD_PARAMS, MMA_BACKWARD_POINTERS, Scratch
from cupyflash._cuda.device import describe, require_cupy
from cupyflash._cuda.launch import Launcher
from cupyflash._cuda.module import load
from cupyflash._cuda.params import address, alignment, optional_strides, row_alignment
from cupyflash._cuda.plan_mma import MmaBackwardPlan, plan_backward
from cupyflash._problem import Array, GradientBuffers, Operands, Problem
from cupyflash.tiling import Tiling

__all__ = ["backward"]


class _Prepared(NamedTuple):
    """Launchers that only lack the pointers, in order, each with its number of blocks."""

    scratch: Scratch
    launches: tuple[tuple[Launcher, int], ...]


def backward(
    problem: Problem,
    operands: Operands,
    tiling: Tiling | None,
    out: Array,
    row_max: Array,
    row_sum: Array,
    grad_out: Array,
    grad_lse: Array | None,
    gradients: GradientBuffers,
    deterministic: bool,
) -> None:
    """Write the gradients of attention.

    FlashAttention-2 (Dao 2023, arXiv 2307.08691), Algorithm 2. Parameters and errors as in
    `cupyflash._cuda.backward.backward`, except:

    Parameters
    ----------
    deterministic : bool
        Blocks add to dq in a fixed order; without it dq may differ by rounding from run to run.
    """
    query, key, value = operands.query, operands.key, operands.value
    device_id = query.device.id
    loaded = (query, key, value, out, grad_out)
    stored = (gradients.dq, gradients.dk, gradients.dv)
    layout = BackwardLayout(
        query.strides,
        key.strides,
        value.strides,
        out.strides,
        grad_out.strides,
        gradients.dq.strides,
        gradients.dk.strides,
        gradients.dv.strides,
        row_max.strides,
        row_sum.strides,
        None if grad_lse is None else grad_lse.strides,
        row_max.strides,  # delta is part of the scratch memory
        None if gradients.dsinks is None else gradients.dsinks.strides,
        optional_strides(operands),
        alignment(map(address, loaded)),
        alignment(map(address, stored)),
    )
    prepared = _prepare(problem, device_id, tiling, layout, deterministic)
    scratch = prepared.scratch
    cupy = require_cupy()
    with cupy.cuda.Device(device_id):
        query_sums = cupy.empty(scratch.query_sums, np.float32)
        statistics = cupy.empty(scratch.statistics, np.float32)
        turns = cupy.empty(scratch.turns, np.int32) if deterministic else None
    pointers = [
        address(array)
        for array in (
            *(query_sums, statistics, turns),
            *(query, key, value, out, grad_out),
            *(row_max, row_sum, grad_lse, None),
            *stored,
            *(operands.cu_seqlens_q, operands.cu_seqlens_k),
            *(operands.alibi_slopes, operands.sinks, gradients.dsinks),
        )
    ]
    for launcher, blocks in prepared.launches:
        launcher(blocks, *pointers)


def _params(problem: Problem, layout: BackwardLayout, scratch: Scratch) -> npt.NDArray[np.void]:
    """Return the kernels' parameters, all but the pointers."""
    common = backward_params(problem, layout)
    params: npt.NDArray[Any] = np.zeros((), MMA_BACKWARD_PARAMS)
    for name in common.dtype.names or ():
        params[name] = common[name]
    params["rows"], params["tiles"] = scratch.rows, scratch.tiles
    return params


@lru_cache(maxsize=4096)
def _prepare(
    problem: Problem,
    device_id: int,
    tiling: Tiling | None,
    layout: BackwardLayout,
    deterministic: bool,
) -> _Prepared:
    loads, stores = layout.vector_bytes
    loads = row_alignment(loads, (layout.out,))  # which is read by vectors too
    plan: MmaBackwardPlan = plan_backward(
        problem, describe(device_id), tiling, loads, stores, deterministic
    )
    entries = [launch.entry for launch in plan.launches]
    module = load(plan.stub, entries, device_id=device_id, plan=plan)
    params = _params(problem, layout, plan.scratch)
    return _Prepared(
        plan.scratch,
        tuple(
            (
                Launcher(
                    module.get_function(launch.entry, launch.shared_memory),
                    device_id,
                    params,
                    MMA_BACKWARD_POINTERS,
                    threads=launch.threads,
                    shared_memory=launch.shared_memory,
                ),
                launch.blocks,
            )
            for launch in plan.launches
        ),
    )
