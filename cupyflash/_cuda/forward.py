"""The CUDA forward: plan, compiled module and parameters are found once, then only launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyflash._cuda import plan_mma, tuned
from cupyflash._cuda.arguments import (
    OptionalLayout,
    Strides,
    address,
    alignment,
    fill,
    optional_addresses,
    row_alignment,
    values_of,
)
from cupyflash._cuda.device import Device, describe
from cupyflash._cuda.device_table import DeviceTable
from cupyflash._cuda.engines import PLANNERS
from cupyflash._cuda.forward_wgmma import wgmma_arguments
from cupyflash._cuda.kernel import VECTOR_BYTES
from cupyflash._cuda.launch import Launcher, Moved
from cupyflash._cuda.module import load
from cupyflash._cuda.operand_maps import is_mappable
from cupyflash._cuda.params import (
    FORWARD_DESCALES,
    FORWARD_PARAMS,
    FORWARD_POINTERS,
    ITEMSIZE,
    pointers_of,
)
from cupyflash._cuda.plan_mma import MmaForwardPlan
from cupyflash._cuda.plan_wgmma import COUNTER_BYTES, SUSPECTS, WgmmaForwardPlan
from cupyflash._cuda.score_check import check_once
from cupyflash._cuda.scratch import allocate
from cupyflash._cuda.tuned import Tile
from cupyflash._cuda.warpgroup import WARPGROUP_WARPS
from cupyflash._problem import Array, Operands, Problem

__all__ = ["ForwardLayout", "Prepared", "forward", "forward_params", "prepare"]


class ForwardLayout(NamedTuple):
    """All that a launch depends on beside the problem: strides in bytes, and alignments."""

    query: Strides
    key: Strides
    value: Strides
    out: Strides
    row_max: Strides | None
    row_sum: Strides | None
    optional: OptionalLayout
    load_alignment: int  # power of two that divides the addresses of query, key, value
    store_alignment: int  # and of out

    @property
    def vector_bytes(self) -> tuple[int, int]:
        """Bytes that every load and every store may move at once."""
        loads = row_alignment(self.load_alignment, (self.query, self.key, self.value))
        return loads, row_alignment(self.store_alignment, (self.out,))


class Prepared(NamedTuple):
    """Launchers that only lack the pointers, in order, each with its number of blocks."""

    pointers: tuple[str, ...]  # that each launch takes
    scratch: dict[str, tuple[int, str]]  # pointer -> number of elements, dtype
    launches: tuple[tuple[Launcher, int], ...]
    zeroed: tuple[str, ...] = ()  # of the scratch memory


def forward(
    engine: str,
    problem: Problem,
    operands: Operands,
    tiling: Tile | None,
    out: Array,
    row_max: Array | None,
    row_sum: Array | None,
) -> None:
    """Write attention's output and softmax statistics.

    FlashAttention-2 (Dao 2023, arXiv 2307.08691), Algorithm 1.

    Parameters
    ----------
    engine : str
        A key of `engines.PLANNERS` that serves the problem.
    problem, operands : Problem, Operands
        What is asked; device arrays in canonical order.
    tiling : Tile or None
        None: the one that tuning remembers, else the engine's own choice.
    out : array ``(b, sq, h, dv)``, varlen ``(total_q, h, dv)``
        Any strides, the last axis contiguous.
    row_max, row_sum : array ``(b, h, sq)``, varlen ``(h, total_q)``, or None
        Statistics in the accumulator dtype; None: not wanted.

    Raises
    ------
    UnsupportedError
        The tiling does not fit the device.
    CompileError
        The kernel does not compile.
    ValueError
        With ``CUPYFLASH_DEBUG=1``: the score_mod's derivative is wrong.
    """
    if problem.score_mod is not None:
        check_once(problem, operands)
    prepared = prepare(engine, problem, operands, tiling, out, row_max, row_sum)
    addresses: dict[str, Any] = {
        "query": address(operands.query),
        "key": address(operands.key),
        "value": address(operands.value),
        "out": address(out),
        "row_max": address(row_max),
        "row_sum": address(row_sum),
        **optional_addresses(operands),
    }
    scratch = allocate(prepared.scratch)  # kept until all is launched
    for name in prepared.zeroed:
        scratch[name].fill(0)
    addresses.update((name, address(array)) for name, array in scratch.items())
    values = values_of(prepared.pointers, addresses)
    for launcher, blocks in prepared.launches:
        launcher(blocks, *values)


def prepare(
    engine: str,
    problem: Problem,
    operands: Operands,
    tiling: Tile | None,
    out: Array,
    row_max: Array | None,
    row_sum: Array | None,
) -> Prepared:
    """Return launchers that only lack the pointers.

    They serve every call whose arrays have these strides and at least this alignment.
    """
    query, key, value = operands.query, operands.key, operands.value
    layout = ForwardLayout(
        query.strides,
        key.strides,
        value.strides,
        out.strides,
        None if row_max is None else row_max.strides,
        None if row_sum is None else row_sum.strides,
        OptionalLayout.of(operands),
        alignment((address(query), address(key), address(value))),
        alignment((address(out),)),
    )
    return _prepare(engine, problem, query.device.id, tiling, layout)


def forward_params(problem: Problem, layout: ForwardLayout) -> npt.NDArray[np.void]:
    """Return the kernel's parameters, all but the pointers."""
    params: npt.NDArray[Any] = np.zeros((), FORWARD_PARAMS)
    heads = {name: getattr(layout, name) for name in ("query", "key", "value", "out")}
    statistics = {"row_max": layout.row_max, "row_sum": layout.row_sum}
    fill(params, problem, heads, statistics, layout.optional)
    float32 = ITEMSIZE["float32"]
    for name, (batch, head) in zip(FORWARD_DESCALES, layout.optional.descales, strict=True):
        params[f"{name}_strides"] = batch // float32, head // float32
    params["value_scale"] = problem.value_scale
    return params


@lru_cache(maxsize=4096)
def _prepare(
    engine: str, problem: Problem, device_id: int, tiling: Tile | None, layout: ForwardLayout
) -> Prepared:
    device = describe(device_id)
    loads, stores = layout.vector_bytes
    bias_bytes = layout.optional.bias_bytes
    if engine == "wgmma":
        lengths = problem.batch, problem.seqlen_q, problem.num_heads
        if not problem.varlen and not is_mappable(layout.out, lengths):
            stores = min(stores, VECTOR_BYTES // 2)  # the copy engine cannot write such an array
        loads = VECTOR_BYTES  # as `unreadable` has seen; strides of axes of length 1 are not taken
        if problem.is_empty:  # of such arrays there is no description: others write zeros
            PLANNERS[engine].plan_forward(problem, device, tiling)
            engine, tiling = "simt" if problem.is_float8 else "mma", None
    tiling = tiling or tuned.find(engine, "forward", problem, device)
    plan = PLANNERS[engine].plan_forward(problem, device, tiling, loads, stores, bias_bytes)
    params = forward_params(problem, layout)
    pointers = pointers_of(FORWARD_POINTERS, problem)
    scratch = {tile_map.pointer: (tile_map.size, "uint8") for tile_map in plan.tile_maps}
    if not isinstance(plan, WgmmaForwardPlan):
        return Prepared(pointers, scratch, _launches(plan, device_id, params, pointers))
    if plan.suspects:
        pointers = FORWARD_POINTERS
        scratch[SUSPECTS] = plan.suspects + COUNTER_BYTES * problem.varlen, "uint8"
        params["scores"]["map_cols"] = plan.suspects // WARPGROUP_WARPS
    own, moved, tables = wgmma_arguments(problem, layout, plan, params, device_id)
    launches = _launches(plan, device_id, own, pointers, moved, tables)
    if plan.suspects:
        again = plan_mma.after_wgmma(_plan_mma(problem, device, layout))
        launches += _launches(again, device_id, params, pointers)
    return Prepared(pointers, scratch, launches, (SUSPECTS,) if problem.varlen else ())


def _plan_mma(problem: Problem, device: Device, layout: ForwardLayout) -> MmaForwardPlan:
    """Return the plan with which mma serves a call by itself."""
    tiling = tuned.find("mma", "forward", problem, device)
    bias_bytes = layout.optional.bias_bytes
    return plan_mma.plan_forward(problem, device, tiling, *layout.vector_bytes, bias_bytes)


def _launches(
    plan: Any,
    device_id: int,
    params: npt.NDArray[np.void],
    pointers: tuple[str, ...],
    moved: Sequence[Moved] = (),
    tables: Mapping[str, DeviceTable] = MappingProxyType({}),
) -> tuple[tuple[Launcher, int], ...]:
    """Return a plan's launchers, compiled, each with its number of blocks."""
    entries = [launch.entry for launch in plan.launches]
    module = load(plan.stub, entries, device_id=device_id, plan=plan)
    launchers = (
        Launcher(
            module.get_function(launch.entry, launch.shared_memory),
            device_id,
            params,
            pointers,
            threads=launch.threads,
            shared_memory=launch.shared_memory,
            moved=moved,
            tables=tables,
        )
        for launch in plan.launches
    )
    blocks = (launch.blocks for launch in plan.launches)
    return tuple(zip(launchers, blocks, strict=True))
