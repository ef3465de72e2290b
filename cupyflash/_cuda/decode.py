"""A call on a key-value cache on a GPU: all but the pointers is found once, then only launched."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyflash._cuda.arguments import (
    Strides,
    address,
    addresses,
    attention_values,
    head_strides,
    row_alignment,
)
from cupyflash._cuda.config_decode import ARRAYS, CACHE_PARAMS, CACHE_POINTERS, DESCALES
from cupyflash._cuda.device import Device, require_cupy
from cupyflash._cuda.launch import LaunchSequence
from cupyflash._cuda.module import load
from cupyflash._cuda.params import ITEMSIZE
from cupyflash._cuda.plan_decode import (
    AppendPlan,
    CacheProblem,
    DecodePlan,
    Splits,
    plan_append,
    plan_decode,
)
from cupyflash._cuda.scratch import allocate_bytes

__all__ = [
    "CacheLayout",
    "Prepared",
    "address",
    "addresses",
    "allocate_bytes",
    "faults_of",
    "prepare",
    "take_faults",
]

_VARYING = (*CACHE_POINTERS, "length")
_INT32 = _FLOAT32 = 4
_SCRATCH_ALIGNMENT = 256
_faults: dict[int, Any] = {}


class CacheLayout(NamedTuple):
    """All that launches depend on beside the problem: strides in bytes, and alignments."""

    query: Strides
    key: Strides
    value: Strides
    new_key: Strides | None
    new_value: Strides | None
    lengths: Strides
    leftpad: Strides
    blocks: Strides
    cos: Strides
    sin: Strides
    rotary_shape: tuple[int, ...]
    alibi_slopes: Strides  # by (batch, head); 0 if absent, as those of the descales
    sinks: Strides
    key_descale: Strides
    value_descale: Strides
    num_blocks: int
    turns_each_query: bool
    read_alignment: int  # power of two that divides the addresses of query, key, value
    new_alignment: int  # and those of the new tokens

    def attended(self, problem: CacheProblem) -> Strides:
        """Strides of the queries that are attended to: a turned copy is dense."""
        if problem.rotary_dtype is None:
            return self.query
        attention = problem.attention
        head = attention.head_dim * ITEMSIZE[attention.dtype]
        row = attention.num_heads * head
        return (attention.seqlen_q * row, row, head, ITEMSIZE[attention.dtype])


class Prepared(NamedTuple):
    """Launches that only lack what varies, `CACHE_POINTERS` and the length; scratch memory."""

    launches: LaunchSequence
    statistics: int  # where partial statistics begin in the scratch memory, after partial sums
    turned: int  # where turned queries begin
    turns: bool  # whether there are such
    scratch_bytes: int


@lru_cache(maxsize=4096)
def prepare(problem: CacheProblem, device: Device, layout: CacheLayout, splits: Splits) -> Prepared:
    """Return what a call needs.

    It serves every call whose arrays have these strides and at least this alignment.
    """
    attended = layout.attended(problem)
    rows = (attended, layout.key, layout.value)
    plans: list[AppendPlan | DecodePlan] = []
    if layout.new_key is not None and layout.new_value is not None:
        written = (layout.new_key, layout.new_value, layout.key, layout.value)
        plans.append(plan_append(problem, row_alignment(layout.new_alignment, written)))
    reads = row_alignment(layout.read_alignment, rows)
    decoding = plan_decode(problem, device, splits, reads)
    params = _params(problem, layout, decoding)
    kernels: list[tuple[Any, int, int, int]] = []
    for plan in (*plans, decoding):
        entries = [launch.entry for launch in plan.launches]
        module = load(plan.stub, entries, device_id=device.id, plan=plan)
        for launch in plan.launches:
            function = module.get_function(launch.entry, launch.shared_memory)
            kernels.append((function, launch.blocks, launch.threads, launch.shared_memory))
    launches = LaunchSequence(kernels, device.id, params, _VARYING)
    statistics = decoding.partial_rows * decoding.config.head_dim_v * _FLOAT32
    turned = _rounded_up(statistics + decoding.partial_rows * 2 * _FLOAT32)
    turns = problem.rotary_dtype is not None
    end = turned + turns * problem.attention.batch * attended[0]
    return Prepared(launches, statistics, turned, turns, end)


def _rounded_up(size: int) -> int:
    return -(-size // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT


def _params(problem: CacheProblem, layout: CacheLayout, plan: DecodePlan) -> npt.NDArray[np.void]:
    """Return ``CacheParams``, all but what varies."""
    params: npt.NDArray[Any] = np.zeros((), CACHE_PARAMS)
    attention = problem.attention
    itemsize = ITEMSIZE[attention.dtype]
    out_row = attention.num_heads * attention.head_dim_v * itemsize
    out = (attention.seqlen_q * out_row, out_row, attention.head_dim_v * itemsize, itemsize)
    strides = {name: getattr(layout, name, None) for name in ARRAYS}
    strides |= {"attended": layout.attended(problem), "out": out}
    dtypes = dict.fromkeys(("key", "value"), attention.key_dtype)
    dtypes |= dict.fromkeys(("new_key", "new_value"), problem.given_dtype)
    for name, given in strides.items():
        if given is not None:
            dtype = dtypes.get(name, attention.dtype)
            params[f"{name}_strides"] = head_strides(given, ITEMSIZE[dtype])
    for name in DESCALES:
        batch, head = getattr(layout, name)
        params[f"{name}_strides"] = batch // _FLOAT32, head // _FLOAT32
    params["key_scale"], params["value_scale"] = attention.key_scale, attention.value_scale
    (params["lengths_stride"],) = (stride // _INT32 for stride in layout.lengths)
    (params["leftpad_stride"],) = (stride // _INT32 for stride in layout.leftpad)
    entry, page = (stride // _INT32 for stride in layout.blocks)
    params["blocks_stride"], params["blocks_page_stride"] = entry, page
    if problem.rotary_dtype is not None:
        angle = ITEMSIZE[problem.rotary_dtype]
        params["cos_strides"] = [stride // angle for stride in layout.cos]
        params["sin_strides"] = [stride // angle for stride in layout.sin]
        params["rotary_rows"], params["rotary_pairs"] = layout.rotary_shape
    values = attention_values(attention)
    (alibi_batch, alibi_head), (sinks,) = layout.alibi_slopes, layout.sinks
    values["alibi_batch_stride"] = alibi_batch // _FLOAT32
    values["alibi_head_stride"] = alibi_head // _FLOAT32
    values["sinks_stride"] = sinks // _FLOAT32
    params["attention"] = values
    params["num_blocks"] = layout.num_blocks
    params["new_tokens"] = problem.new_tokens
    params["turns_each_query"] = layout.turns_each_query
    params["num_splits"], params["split_keys"] = plan.splits.count, plan.splits.keys
    return params


def faults_of(device_id: int) -> Any:
    """Return the device's counters, int32: tokens dropped, whether something was clamped."""
    counters = _faults.get(device_id)
    if counters is None:
        cupy = require_cupy()
        with cupy.cuda.Device(device_id):
            counters = _faults[device_id] = cupy.zeros(2, np.int32)
    return counters


def take_faults(device_id: int) -> tuple[int, bool]:
    """Return what the counters say, once the current stream is there, and set them to 0."""
    if device_id not in _faults:
        return 0, False
    with require_cupy().cuda.Device(device_id):
        dropped, clamped = _faults[device_id].get()
        _faults[device_id].fill(0)
    return int(dropped), bool(clamped)
