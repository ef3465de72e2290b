"""From a checked `Call` to results: allocate, run the engine, present in the caller's axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash import _engines
from cupyflash._arrays import (
    DTYPES_BY_NAME,
    HOST,
    Place,
    as_array,
    contiguous_last_axis,
    has_contiguous_last_axis,
)
from cupyflash._cuda.scratch import keep
from cupyflash._problem import GradientBuffers
from cupyflash._validate import Call
from cupyflash.state import Gradients, SavedState

Array = Any


def forward(call: Call, *, save: bool) -> tuple[Array, Array | None, Array | None]:
    """Return ``(out, row_max, row_sum)`` in the caller's axes; no statistics unless `save`."""
    problem, operands, layout = call.problem, call.operands, call.layout
    engine = _engines.select(problem, call.place, call.options.engine, operands=operands)
    xp = call.place.namespace
    *lead, _ = operands.query.shape
    statistics_shape = _statistics_shape(call)
    with call.place.current():
        out = call.out
        if out is None:
            out = xp.empty(
                layout.users_shape((*lead, problem.head_dim_v)),
                dtype=DTYPES_BY_NAME[problem.output_dtype],
            )
        target = layout.canonical(as_array(out, "out"))
        written = target
        if not _engine_writes(target, call.place):
            written = xp.empty_like(target, order="C")
            keep(written)
        row_max = row_sum = None
        if save or call.place == HOST:  # the NumPy engine always writes them
            row_max = xp.empty(statistics_shape, problem.accumulator_dtype)
            row_sum = xp.empty(statistics_shape, problem.accumulator_dtype)
        _engines.forward(engine)(problem, operands, call.options.tiling, written, row_max, row_sum)
        if written is not target:
            target[...] = written
    if not save:
        return out, None, None
    return out, layout.users_statistics(row_max), layout.users_statistics(row_sum)


def saved_forward(call: Call) -> tuple[Array, SavedState]:
    """Return the output and what the backward needs."""
    out, row_max, row_sum = forward(call, save=True)
    return out, SavedState(*call.arrays, out, row_max, row_sum, call.options, call)


def backward(
    saved: SavedState, grad_out: Array, grad_lse: Array | None, deterministic: bool
) -> Gradients:
    """Return the gradients of a saved call in the caller's axes."""
    call = saved._call
    problem, operands, layout = call.problem, call.operands, call.layout
    engine = _engines.select_backward(problem, call.place, call.options.engine)
    if engine == "mma" and deterministic and not _mma_is_deterministic(call):
        engine = "simt"
    with call.place.current():
        buffers = _gradient_buffers(call, engine)
        _engines.backward(engine)(
            problem,
            operands,
            call.options.tiling,
            contiguous_last_axis(layout.canonical(as_array(saved.out, "out"))),
            layout.canonical_statistics(saved.row_max),
            layout.canonical_statistics(saved.row_sum),
            contiguous_last_axis(layout.canonical(grad_out)),
            None if grad_lse is None else layout.canonical_statistics(grad_lse),
            buffers,
            deterministic,
        )
    return _presented(call, buffers)


def _mma_is_deterministic(call: Call) -> bool:
    """Whether mma's sums have a fixed order, or can be given one."""
    problem, operands = call.problem, call.operands
    if not operands.cu_seqlens_checked:
        return False  # blocks take turns, and wrong cu_seqlens could let one wait for ever
    score_mod = operands.score_mod
    floats = [] if score_mod is None else [p for p in score_mod.params.values() if _is_float(p)]
    return not problem.bias_is_broadcast and not floats


def _is_float(array: Array) -> bool:
    return array.dtype.kind not in "iub"


def _statistics_shape(call: Call) -> tuple[int, ...]:
    problem = call.problem
    if problem.varlen:
        return problem.num_heads, problem.seqlen_q
    return problem.batch, problem.num_heads, problem.seqlen_q


def _gradient_buffers(call: Call, engine: str) -> GradientBuffers:
    """Uninitialised gradients: dense in the caller's axes, viewed in canonical ones."""
    problem, operands, layout = call.problem, call.operands, call.layout
    xp = call.place.namespace

    def like(operand: Array) -> Array:
        return layout.canonical(xp.empty(layout.users_shape(operand.shape), operand.dtype))

    accumulator = problem.accumulator_dtype
    bias, sinks, score_mod = operands.bias, operands.sinks, operands.score_mod
    dbias = None
    if bias is not None:
        rounded = problem.grad_bias_dtype(engine) == problem.bias_dtype
        dbias = xp.empty(bias.shape, bias.dtype if rounded else accumulator)
    params = {} if score_mod is None else score_mod.params
    return GradientBuffers(
        dq=like(operands.query),
        dk=like(operands.key),
        dv=like(operands.value),
        dbias=dbias,
        dsinks=None if sinks is None else xp.empty(sinks.shape, "float32"),
        dscore_params=None
        if score_mod is None
        else {
            name: xp.empty(param.shape, accumulator)
            for name, param in params.items()
            if _is_float(param)
        },
    )


def _presented(call: Call, buffers: GradientBuffers) -> Gradients:
    users = call.layout.users
    dbias = buffers.dbias
    if dbias is not None:
        bias = as_array(call.options.bias, "bias")
        with np.errstate(over="ignore"):  # a sum beyond a 16-bit dtype's range is inf there
            if dbias.dtype != bias.dtype and call.place != HOST:
                keep(dbias)
            dbias = dbias.reshape(bias.shape).astype(bias.dtype, copy=False)
    return Gradients(
        users(buffers.dq),
        users(buffers.dk),
        users(buffers.dv),
        dbias,
        buffers.dsinks,
        buffers.dscore_params,
    )


def _engine_writes(array: Array, place: Place) -> bool:
    """Whether an engine can write `array` in place: GPU engines want a dense last axis."""
    return place == HOST or has_contiguous_last_axis(array)
