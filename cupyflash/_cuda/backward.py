"""The CUDA backward: plan, compiled module and parameters are found once, then only launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyflash._cuda import tuned
from cupyflash._cuda.arguments import (
    OptionalLayout,
    ScoreLayout,
    Strides,
    address,
    alignment,
    fill,
    optional_addresses,
    row_alignment,
    values_of,
)
from cupyflash._cuda.backward_wgmma import can_read, wgmma_backward_arguments
from cupyflash._cuda.config_mma import MMA_BACKWARD_PARAMS, MMA_BACKWARD_POINTERS
from cupyflash._cuda.config_wgmma import MAPPED_BACKWARD
from cupyflash._cuda.device import describe
from cupyflash._cuda.device_table import DeviceTable
from cupyflash._cuda.engines import PLANNERS
from cupyflash._cuda.launch import Launcher, Moved
from cupyflash._cuda.module import load
from cupyflash._cuda.params import BACKWARD_PARAMS, BACKWARD_POINTERS, pointers_of
from cupyflash._cuda.plan import BackwardPlan
from cupyflash._cuda.plan_mma_backward import MmaBackwardPlan
from cupyflash._cuda.plan_wgmma_backward import WgmmaBackwardPlan
from cupyflash._cuda.score_gradients import round_sums, zeroed_sums
from cupyflash._cuda.scratch import allocate
from cupyflash._cuda.tuned import Tile
from cupyflash._problem import Array, GradientBuffers, Operands, Problem

__all__ = ["BackwardLayout", "backward", "backward_params"]

_FLOAT32_BYTES = 4


_LOADED = ("query", "key", "value", "out", "grad_out")
_STORED = ("grad_query", "grad_key", "grad_value")
_STATISTICS = ("row_max", "row_sum", "grad_lse")


class BackwardLayout(NamedTuple):
    """All that the launches depend on beside the problem: strides in bytes, and alignments."""

    loaded: tuple[Strides, ...]  # of _LOADED
    stored: tuple[Strides, ...]  # of _STORED
    statistics: tuple[Strides | None, ...]  # of _STATISTICS; None: not given
    grad_sinks: Strides | None
    grad_bias: ScoreLayout | None
    optional: OptionalLayout
    load_alignment: int  # power of two that divides the addresses of what is loaded
    mapped_alignment: int  # of what Hopper's copy engine loads: all of it but out
    store_alignment: int  # of what is stored

    @classmethod
    def of(cls, arrays: dict[str, Array], optional: OptionalLayout) -> BackwardLayout:
        """The layout of arrays that go by the names of their parameters."""
        loaded = [arrays[name] for name in _LOADED]
        stored = [arrays[name] for name in _STORED]
        return cls(
            tuple(array.strides for array in loaded),
            tuple(array.strides for array in stored),
            tuple(_strides_or_none(arrays[name]) for name in _STATISTICS),
            _strides_or_none(arrays["grad_sinks"]),
            ScoreLayout.of(arrays["grad_bias"]),
            optional,
            alignment(map(address, loaded)),
            alignment(address(arrays[name]) for name in MAPPED_BACKWARD),
            alignment(map(address, stored)),
        )

    @property
    def vector_bytes(self) -> tuple[int, int]:
        """Bytes that every load and every store may move at once."""
        return (
            row_alignment(self.load_alignment, self.loaded),
            row_alignment(self.store_alignment, self.stored),
        )


def _strides_or_none(array: Array | None) -> Strides | None:
    return None if array is None else tuple(array.strides)


class BackwardStruct(NamedTuple):
    """What an engine's kernels are given, all but the pointers, and their scratch memory."""

    params: npt.NDArray[np.void]
    pointers: tuple[str, ...]  # in the order of the struct
    scratch: dict[str, tuple[int, str]]  # name -> number of elements, dtype
    zeroed: tuple[str, ...] = ()  # arrays that are added to
    moved: tuple[Moved, ...] = ()  # where else pointers are written
    tables: Mapping[str, DeviceTable] = MappingProxyType({})  # whose addresses it holds


class _Prepared(NamedTuple):
    """Launchers that only lack the pointers, in order, each with its number of blocks."""

    struct: BackwardStruct
    launches: tuple[tuple[Launcher, int], ...]


def backward(
    engine: str,
    problem: Problem,
    operands: Operands,
    tiling: Tile | None,
    out: Array,
    row_max: Array,
    row_sum: Array,
    grad_out: Array,
    grad_lse: Array | None,
    gradients: GradientBuffers,
    deterministic: bool,
) -> None:
    """Write the gradients of attention.

    FlashAttention-2 (Dao 2023, arXiv 2307.08691), Algorithm 2.

    Parameters
    ----------
    engine : str
        A key of `engines.PLANNERS` that serves the problem.
    problem, operands, out, row_max, row_sum
        As `forward` got and wrote them.
    tiling : Tile or None
        That of the forward, used where it fits; None: as in the forward.
    grad_out : array
        Gradient of out, in its shape and dtype, the last axis contiguous.
    grad_lse : array or None
        Gradient of ``row_max + log(row_sum)``, in the shape and dtype of row_max.
    gradients : GradientBuffers
        Written: dq, dk, dv, and those of the optional operands that there are.
    deterministic : bool
        Results are the same bits from run to run. Without it mma adds to dq in any order; simt's
        always are.

    Raises
    ------
    CompileError
        The kernels do not compile.
    """
    arrays = {
        "query": operands.query,
        "key": operands.key,
        "value": operands.value,
        "out": out,
        "grad_out": grad_out,
        "row_max": row_max,
        "row_sum": row_sum,
        "grad_lse": grad_lse,
        "grad_query": gradients.dq,
        "grad_key": gradients.dk,
        "grad_value": gradients.dv,
        "grad_sinks": gradients.dsinks,
        "grad_bias": gradients.dbias,
    }
    device_id = operands.query.device.id
    layout = BackwardLayout.of(arrays, OptionalLayout.of(operands))
    prepared = _prepare(engine, problem, device_id, tiling, layout, deterministic)
    arrays |= allocate(prepared.struct.scratch)
    for name in prepared.struct.zeroed:
        arrays[name].fill(0)
    addresses: dict[str, Any] = {name: address(array) for name, array in arrays.items()}
    addresses.update(optional_addresses(operands))
    exact = engine == "simt" and deterministic
    sums = zeroed_sums(problem, gradients.dscore_params, exact=exact)
    addresses["grad_score_params"] = tuple(map(address, sums))
    values = values_of(prepared.struct.pointers, addresses)
    for launcher, blocks in prepared.launches:
        launcher(blocks, *values)
    if exact and gradients.dscore_params is not None:
        round_sums(problem, sums, gradients.dscore_params)


def backward_params(problem: Problem, layout: BackwardLayout) -> npt.NDArray[np.void]:
    """Return ``BackwardParams``, all but the pointers."""
    params: npt.NDArray[Any] = np.zeros((), BACKWARD_PARAMS)
    heads = dict(zip((*_LOADED, *_STORED), (*layout.loaded, *layout.stored), strict=True))
    statistics = dict(zip(_STATISTICS, layout.statistics, strict=True))
    statistics["delta"] = _dense_strides(problem)
    fill(params, problem, heads, statistics, layout.optional)
    if layout.grad_sinks is not None:
        params["grad_sinks_stride"] = layout.grad_sinks[0] // _FLOAT32_BYTES
    if layout.grad_bias is not None:
        params["grad_bias_strides"] = layout.grad_bias.values()
    return params


def _dense_strides(problem: Problem) -> Strides:
    """Strides of contiguous ``(b, h, sq)`` or ``(h, total_q)`` statistics."""
    itemsize = np.dtype(problem.accumulator_dtype).itemsize
    row = itemsize * problem.seqlen_q
    return (row, itemsize) if problem.varlen else (row * problem.num_heads, row, itemsize)


def _simt_struct(
    problem: Problem, layout: BackwardLayout, plan: BackwardPlan, device_id: int
) -> BackwardStruct:
    del device_id
    rows = problem.num_heads * problem.seqlen_q * (1 if problem.varlen else problem.batch)
    scratch = {"delta": (rows, problem.accumulator_dtype), **_map_scratch(plan)}
    pointers = pointers_of(BACKWARD_POINTERS, problem)
    return BackwardStruct(backward_params(problem, layout), pointers, scratch)


def _mma_struct(
    problem: Problem, layout: BackwardLayout, plan: MmaBackwardPlan, device_id: int
) -> BackwardStruct:
    del device_id
    common = backward_params(problem, layout)
    params: npt.NDArray[Any] = np.zeros((), MMA_BACKWARD_PARAMS)
    for name in common.dtype.names or ():
        params[name] = common[name]
    params["rows"], params["tiles"] = plan.scratch.rows, plan.scratch.tiles
    scratch = _sums_scratch(plan) | _map_scratch(plan)
    zeroed = ("grad_bias",) if plan.zeroed_bias else ()
    if plan.convert_bias is not None:
        scratch["bias_sums"] = plan.bias_sums, "float32"
        zeroed = ("bias_sums",)
    return BackwardStruct(params, pointers_of(MMA_BACKWARD_POINTERS, problem), scratch, zeroed)


def _wgmma_struct(
    problem: Problem, layout: BackwardLayout, plan: WgmmaBackwardPlan, device_id: int
) -> BackwardStruct:
    common = backward_params(problem, layout)
    params, moved, tables = wgmma_backward_arguments(problem, layout, plan, common, device_id)
    pointers = pointers_of(MMA_BACKWARD_POINTERS, problem)
    scratch = _sums_scratch(plan)
    return BackwardStruct(params, pointers, scratch, moved=tuple(moved), tables=tables)


def _sums_scratch(plan: MmaBackwardPlan | WgmmaBackwardPlan) -> dict[str, tuple[int, str]]:
    sizes = plan.scratch
    scratch = {
        "query_sums": (sizes.query_sums, "float32"),
        "statistics": (sizes.statistics, "float32"),
    }
    if plan.config.deterministic:
        scratch["turns"] = sizes.turns, "int32"
    return scratch


def _map_scratch(plan: BackwardPlan | MmaBackwardPlan) -> dict[str, tuple[int, str]]:
    return {tile_map.pointer: (tile_map.size, "uint8") for tile_map in plan.tile_maps}


_STRUCTS: dict[str, Callable[[Problem, BackwardLayout, Any, int], BackwardStruct]] = {
    "simt": _simt_struct,
    "mma": _mma_struct,
    "wgmma": _wgmma_struct,
}


@lru_cache(maxsize=4096)
def _prepare(
    engine: str,
    problem: Problem,
    device_id: int,
    tiling: Tile | None,
    layout: BackwardLayout,
    deterministic: bool,
) -> _Prepared:
    device = describe(device_id)
    if engine == "wgmma" and not can_read(problem, layout):
        engine = "mma"
    tiling = tiling or tuned.find(engine, "backward", problem, device)
    plan = PLANNERS[engine].plan_backward(
        problem, device, tiling, *layout.vector_bytes, deterministic, layout.optional.bias_bytes
    )
    entries = [launch.entry for launch in plan.launches]
    module = load(plan.stub, entries, device_id=device_id, plan=plan)
    struct = _STRUCTS[plan.engine](problem, layout, plan, device_id)
    launchers = (
        Launcher(
            module.get_function(launch.entry, launch.shared_memory),
            device_id,
            struct.params,
            struct.pointers,
            threads=launch.threads,
            shared_memory=launch.shared_memory,
            moved=struct.moved,
            tables=struct.tables,
        )
        for launch in plan.launches
    )
    blocks = (launch.blocks for launch in plan.launches)
    return _Prepared(struct, tuple(zip(launchers, blocks, strict=True)))
