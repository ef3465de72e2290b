"""`DeviceTable`: values that a kernel reads from global memory, whatever stream it runs on."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy.typing as npt

from cupyflash._cuda.device import require_cupy
from cupyflash._cuda.scratch import keep

__all__ = ["DeviceTable"]

_MOST_BYTES = 32 << 20  # of all tables together; the latest one stays, whatever its size
_PER_THREAD = 2  # cudaStreamPerThread: one number for as many streams as there are threads

# Each copy and its source, which an upload may still be reading; the latest last.
_held: OrderedDict[Hashable, tuple[Any, npt.NDArray[Any]]] = OrderedDict()
_guard = threading.Lock()


class DeviceTable:
    """An array made on the host when first needed, and uploaded to each stream that reads it.

    As every stream has a copy of its own, nothing waits for an upload but what comes after it, and
    a copy that is dropped returns to CuPy's pool in the order of the only stream that has read it.
    Copies that were not used for longest are dropped first; they are made again if need be.

    Parameters
    ----------
    make : callable
        Returns the values, a NumPy array.
    """

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], npt.NDArray[Any]]) -> None:
        self.make = make

    def on(self, stream: Any) -> Any:
        """Return the copy of the current device's current stream, which is given.

        It must be held until the kernel that reads it is launched; what a CUDA graph being
        captured reads is held for good.
        """
        number = stream.ptr
        key = (self, number, threading.get_ident() if number == _PER_THREAD else None)
        with _guard:
            found = _held.get(key)
            if found is not None:
                _held.move_to_end(key)
        if found is None:
            values = self.make()
            found = _uploaded(values, stream), values
            _hold(key, found)
        array, _ = found
        keep(array)
        return array


def _uploaded(values: npt.NDArray[Any], stream: Any) -> Any:
    cupy = require_cupy()
    if not stream.is_capturing():
        return cupy.asarray(values)  # does not wait
    # A graph would repeat the copy: it is made outside, and done before the graph is launched.
    with cupy.cuda.Stream(non_blocking=True) as outside:
        array = cupy.asarray(values)
        outside.synchronize()
    return array


def _hold(key: Hashable, copy: tuple[Any, npt.NDArray[Any]]) -> None:
    with _guard:
        _held[key] = copy
        total = sum(values.nbytes for _, values in _held.values())
        while total > _MOST_BYTES and len(_held) > 1:
            _, (_, values) = _held.popitem(last=False)
            total -= values.nbytes
