"""Calls that kernels of their own serve: one launch appends, one or two attend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash._arrays import FLOAT_DTYPES, has_contiguous_last_axis
from cupyflash._cuda import decode
from cupyflash._cuda.device import Device
from cupyflash._cuda.plan_decode import splits_of, tile_of
from cupyflash._cuda.scratch import keep
from cupyflash._kvcache.arguments import CacheArrays, arrays_of, layout_of, problem_of
from cupyflash._kvcache.call import CacheCall

Array = Any

# With more queries times heads of a group than this the forward's larger tiles are faster, but the
# array operations around them cost the host some milliseconds: where there is more to compute, too.
_FEW_ROWS = 256
_FEW_OPERATIONS = 2**39
_MOST_ROWS = 2**31 - 1  # which the kernels count in an int
_DTYPES = ("float16", "bfloat16")
_FLOAT32 = np.dtype(np.float32)
_MOST_TOKENS = 2**30 - 1  # of an entry, so that a position plus a window bound stays an int


def serve(call: CacheCall) -> bool:
    """Whether the kernels know what such a call asks for, on a device that has them."""
    query, (key, value) = call.query, (call.storage.key, call.storage.value)
    problem = call.attention.problem
    batch, seqlen_q, num_heads, head_dim = query.shape
    rows = seqlen_q * num_heads // max(1, key.shape[2])
    all_rows = batch * seqlen_q * num_heads
    operations = 2 * all_rows * call.storage.capacity * (head_dim + value.shape[3])
    # Whatever else is in a batch must not matter to an entry where it promises that.
    is_little = operations <= _FEW_OPERATIONS and not call.batch_invariant
    return (
        FLOAT_DTYPES.get(query.dtype) in _DTYPES
        and problem.output_dtype == FLOAT_DTYPES[query.dtype]
        and 0 < all_rows <= _MOST_ROWS
        and (rows <= _FEW_ROWS or is_little)
        and min(batch, head_dim, value.shape[3], len(key)) > 0
        and 0 < call.storage.capacity <= _MOST_TOKENS
        and all(map(has_contiguous_last_axis, (key, value)))
    )


class KernelCall:
    """One kind of call: all of it but the addresses, and the lengths that the host knows.

    Parameters
    ----------
    call : CacheCall
        One that the kernels serve; its arrays are not kept.
    arrays : CacheArrays
        `arrays_of` it.
    used : list of int
        Their addresses.
    device : Device
    """

    def __init__(
        self, call: CacheCall, arrays: CacheArrays, used: list[int], device: Device
    ) -> None:
        self._device = device
        self._allocate = call.place.namespace.ndarray
        self._problem = problem_of(call)
        self._keys = tile_of(self._problem, device).keys
        self._prepared: dict[int, decode.Prepared] = {}
        self._layout = layout_of(call, arrays, used)
        (self._faults,) = decode.addresses([decode.faults_of(device.id)])
        self._splits = call.num_splits, call.batch_invariant
        batch, seqlen_q, num_heads, _ = call.query.shape
        self._out = (batch, seqlen_q, num_heads, call.storage.value.shape[3]), call.query.dtype
        self._lse = (batch, num_heads, seqlen_q)

    def __call__(
        self, used: Sequence[int], length: int, longest: int, wants_lse: bool
    ) -> tuple[Array, Array | None]:
        """Append and attend, on the current device; return out and lse.

        Parameters
        ----------
        used : sequence of int
            Addresses of the fields of CacheArrays, 0 for None. The arrays have the strides and, at
            least, the alignment of those that this was made for.
        length : int
            Of all entries, where there is no array of lengths.
        longest : int
            No entry is longer after the append.
        wants_lse : bool
        """
        steps = -(-longest // self._keys)
        prepared = self._prepared.get(steps) or self._prepare(steps)
        out = self._allocate(*self._out)
        lse = self._allocate(self._lse, _FLOAT32) if wants_lse else None
        query, key, value, new_key, new_value, *others = used
        stream = prepared.launches.current_stream()
        attended, sums, statistics = query, 0, 0
        if prepared.scratch_bytes:
            memory = decode.allocate_bytes(prepared.scratch_bytes, stream)  # held until launched
            sums = memory.ptr
            statistics = sums + prepared.statistics
            if prepared.turns:
                attended = sums + prepared.turned
        values = (
            query, attended, key, value, new_key, new_value,
            decode.address(out), decode.address(lse), *others,
            sums, statistics, self._faults, length,
        )  # fmt: skip
        prepared.launches.run(stream, values)
        return out, lse

    def _prepare(self, steps: int) -> decode.Prepared:
        """Prepare for entries of at most so many steps, which settles how they are cut."""
        splits = splits_of(self._problem, self._device, steps * self._keys, *self._splits)
        prepared = decode.prepare(self._problem, self._device, self._layout, splits)
        self._prepared[steps] = prepared
        return prepared


def run(
    call: CacheCall, device: Device, wants_lse: bool
) -> tuple[tuple[Array, Array | None], KernelCall, CacheArrays]:
    """Serve a checked call; return its result, and what serves the next of its kind."""
    arrays = arrays_of(call)
    if call.place.device_id is not None:
        keep(*arrays)  # replays of a graph read again what was copied here
    length = call.lengths if isinstance(call.lengths, int) else 0
    used = decode.addresses(arrays)
    kind = KernelCall(call, arrays, used, device)
    return kind(used, length, call.entries.longest, wants_lse), kind, arrays
