"""The CUDA backward: delta, dk and dv, dq, and the gradient of sinks, each one launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyflash._cuda.device import Device, describe, require_cupy
from cupyflash._cuda.launch import Launcher
from cupyflash._cuda.module import load
from cupyflash._cuda.params import (
    BACKWARD_PARAMS,
    BACKWARD_POINTERS,
    Strides,
    address,
    alignment,
    fill,
    optional_strides,
    row_alignment,
)
from cupyflash._cuda.plan import BackwardPlan, plan_backward
from cupyflash._problem import Array, GradientBuffers, Operands, Problem
from cupyflash.errors import UnsupportedError
from cupyflash.tiling import Tiling

__all__ = ["BackwardLayout", "backward", "backward_params"]

_FLOAT32_BYTES = 4


class BackwardLayout(NamedTuple):
    """All that the launches depend on beside the problem: strides in bytes, and alignments."""

    query: Strides
    key: Strides
    value: Strides
    out: Strides
    grad_out: Strides
    grad_query: Strides
    grad_key: Strides
    grad_value: Strides
    row_max: Strides
    row_sum: Strides
    grad_lse: Strides | None
    delta: Strides
    grad_sinks: Strides | None
    optional: tuple[Strides, Strides]
    load_alignment: int  # power of two that divides the addresses of query, key, value, grad_out
    store_alignment: int  # and of the gradients

    @property
    def vector_bytes(self) -> tuple[int, int]:
        """Bytes that every load and every store may move at once."""
        loads = (self.query, self.key, self.value, self.grad_out)
        stores = (self.grad_query, self.grad_key, self.grad_value)
        return (
            row_alignment(self.load_alignment, loads),
            row_alignment(self.store_alignment, stores),
        )


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

    FlashAttention-2 (Dao 2023, arXiv 2307.08691), Algorithm 2, in two passes: one over the keys
    for dk and dv, one over the queries for dq.

    Parameters
    ----------
    problem, operands, out, row_max, row_sum
        As `forward` got and wrote them.
    tiling : Tiling or None
        For both passes, where it fits them; None: chosen.
    grad_out : array
        Gradient of out, in its shape and dtype, the last axis contiguous.
    grad_lse : array or None
        Gradient of ``row_max + log(row_sum)``, in the shape and dtype of row_max.
    gradients : GradientBuffers
        Written: dq, dk, dv, and dsinks where there are sinks.
    deterministic : bool
        Results are the same bits from run to run whatever it says.

    Raises
    ------
    CompileError
        The kernels do not compile.
    """
    query, key, value = operands.query, operands.key, operands.value
    device_id = query.device.id
    cupy = require_cupy()
    with cupy.cuda.Device(device_id):
        delta = cupy.empty(row_max.shape, problem.accumulator_dtype)
    loaded = (query, key, value, grad_out)
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
        delta.strides,
        None if gradients.dsinks is None else gradients.dsinks.strides,
        optional_strides(operands),
        alignment(map(address, loaded)),
        alignment(map(address, stored)),
    )
    pointers = [
        address(array)
        for array in (
            *(query, key, value, out, grad_out),
            *(row_max, row_sum, grad_lse, delta),
            *stored,
            *(operands.cu_seqlens_q, operands.cu_seqlens_k),
            *(operands.alibi_slopes, operands.sinks, gradients.dsinks),
        )
    ]
    for launcher, blocks in _prepare(problem, device_id, tiling, layout):
        launcher(blocks, *pointers)


def backward_params(problem: Problem, layout: BackwardLayout) -> npt.NDArray[np.void]:
    """Return the kernels' parameters, all but the pointers."""
    params: npt.NDArray[Any] = np.zeros((), BACKWARD_PARAMS)
    statistics = ("row_max", "row_sum", "grad_lse", "delta")
    fill(
        params,
        problem,
        {name: getattr(layout, name) for name in BackwardLayout._fields[:8]},
        {name: getattr(layout, name) for name in statistics},
        layout.optional,
    )
    if layout.grad_sinks is not None:
        params["grad_sinks_stride"] = layout.grad_sinks[0] // _FLOAT32_BYTES
    return params


@lru_cache(maxsize=4096)
def _prepare(
    problem: Problem, device_id: int, tiling: Tiling | None, layout: BackwardLayout
) -> tuple[tuple[Launcher, int], ...]:
    """Return launchers that only lack the pointers, in order, each with its number of blocks."""
    plan = _plan(problem, describe(device_id), tiling, layout)
    entries = [launch.entry for launch in plan.launches]
    module = load(plan.stub, entries, device_id=device_id, plan=plan)
    params = backward_params(problem, layout)
    return tuple(
        (
            Launcher(
                module.get_function(launch.entry, launch.shared_memory),
                device_id,
                params,
                BACKWARD_POINTERS,
                threads=launch.threads,
                shared_memory=launch.shared_memory,
            ),
            launch.blocks,
        )
        for launch in plan.launches
    )


def _plan(
    problem: Problem, device: Device, tiling: Tiling | None, layout: BackwardLayout
) -> BackwardPlan:
    """Plan with the forward's tiling; with the table's where the backward needs more room."""
    try:
        return plan_backward(problem, device, tiling, *layout.vector_bytes)
    except UnsupportedError:
        if tiling is None:
            raise
        return plan_backward(problem, device, None, *layout.vector_bytes)
