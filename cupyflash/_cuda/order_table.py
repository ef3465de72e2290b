"""An order of tiles as a table on the device, shared by all calls that take tiles alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cupyflash._cuda.device_table import DeviceTable
from cupyflash._problem import Problem

__all__ = ["order_table"]

# `tile_places` or `key_tile_order`.
_Order: TypeAlias = Callable[[Problem, int, int, int], npt.NDArray[np.int32]]


def order_table(
    order: _Order, problem: Problem, block_m: int, block_n: int, blocks: int, device_id: int
) -> DeviceTable:
    """Return the table of ``order(problem, block_m, block_n, blocks)`` for launches on a device.

    Every device has its own: their streams may have the same number.
    """
    alike = replace(
        problem, softmax_scale=1.0, key_scale=1.0, value_scale=1.0, softcap=None, extras=frozenset()
    )
    return _table(order, alike, block_m, block_n, blocks, device_id)


@lru_cache(maxsize=1024)
def _table(
    order: _Order, problem: Problem, block_m: int, block_n: int, blocks: int, device_id: int
) -> DeviceTable:
    del device_id
    return DeviceTable(partial(order, problem, block_m, block_n, blocks))
