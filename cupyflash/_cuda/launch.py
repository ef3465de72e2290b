"""`Launcher`: one kernel with its parameters laid out in advance, launched in few microseconds."""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyflash._cuda.device import require_cupy
from cupyflash._cuda.device_table import DeviceTable

__all__ = ["LaunchSequence", "Launcher", "Moved", "seconds_per_launch"]

_FORMATS = {"u8": "Q", "i8": "q", "u4": "I", "i4": "i", "f4": "f", "f8": "d"}


class Moved(NamedTuple):
    """A place in the struct that holds the value of a varying field, plus a constant."""

    offset: int  # in bytes, a multiple of 8
    field: str  # 8 bytes
    shift: int


class Launcher:
    """Launch one function whose only parameter is a struct passed by value.

    Constants are written into the struct once, here; a launch packs the varying fields, in one
    step, and hands the struct to the driver, which copies it before the launch returns. Threads
    may share a launcher. Nothing is synchronised, and nothing is allocated on the device.

    Parameters
    ----------
    function : cupy.cuda.Function
        From `LoadedModule.get_function`, with its shared memory already allowed.
    device_id : int
        Device that the function was loaded on; launches go to CuPy's current stream there.
    parameters : numpy.ndarray
        The struct with its constants filled in: one element of a structured dtype. It is copied.
    varying : sequence of str
        Fields that every launch sets, in the order of the struct and next to each other (pointers
        first, say): 4 or 8-byte scalars, or arrays of them.
    threads : int
        Threads of one block, all along x.
    shared_memory : int, default 0
        Dynamic shared memory of one block, in bytes.
    moved : sequence of Moved, optional
        Where else varying fields are written.
    tables : mapping of str to DeviceTable, optional
        Fields, 8 bytes each, that hold the address of a table's copy for the stream of the launch.

    Raises
    ------
    ValueError
        The varying fields are out of order or have a constant between them.
    """

    __slots__ = (
        "_address",
        "_buffer",
        "_device_id",
        "_driver",
        "_function",
        "_get_stream",
        "_lock",
        "_moved",
        "_offset",
        "_pack_into",
        "_pointers",
        "_pointers_address",
        "_runtime",
        "_shared_memory",
        "_tables",
        "_threads",
        "_words",
    )

    def __init__(
        self,
        function: Any,
        device_id: int,
        parameters: npt.NDArray[np.void],
        varying: Sequence[str],
        *,
        threads: int,
        shared_memory: int = 0,
        moved: Sequence[Moved] = (),
        tables: Mapping[str, DeviceTable] = MappingProxyType({}),
    ) -> None:
        cuda = require_cupy().cuda
        self._driver, self._runtime = cuda.driver, cuda.runtime
        self._get_stream = cuda.get_current_stream
        self._function = function  # holds the module; its address alone would not
        self._address = function.ptr
        self._device_id = device_id
        self._threads = threads
        self._shared_memory = shared_memory
        struct_ = parameters.reshape(1).copy()
        self._buffer = struct_.view(np.uint8).data
        self._pointers = np.array([struct_.ctypes.data], dtype=np.uintp)
        self._pointers_address = self._pointers.ctypes.data
        self._offset, format_ = _varying_format(struct_.dtype, varying)
        self._pack_into = struct.Struct(format_).pack_into
        names = list(varying)
        self._words: Any = struct_.view(np.uint64).data if moved or tables else None
        self._moved = [(each.offset // 8, names.index(each.field), each.shift) for each in moved]
        fields: Any = struct_.dtype.fields
        self._tables = [(fields[name][1] // 8, table) for name, table in tables.items()]
        self._lock = threading.Lock()

    def __call__(self, blocks: int, *values: float) -> None:
        """Launch `blocks` thread blocks along x (none for 0) with these varying fields."""
        if blocks == 0:
            return
        device_id = self._device_id
        previous = self._runtime.getDevice()
        if previous == device_id:
            self._launch(blocks, values)
            return
        self._runtime.setDevice(device_id)
        try:
            self._launch(blocks, values)
        finally:
            self._runtime.setDevice(previous)

    def current_stream(self) -> Any:
        """Return the device's current stream, ready for a launch in this thread."""
        if not self._driver.ctxGetCurrent():  # the driver knows no context yet in a new thread
            self._runtime.memGetInfo()
        return self._get_stream(self._device_id)

    def _launch(self, blocks: int, values: tuple[float, ...]) -> None:
        driver, stream = self._driver, self.current_stream()
        held = [(word, table.on(stream)) for word, table in self._tables]
        with self._lock:
            self._pack_into(self._buffer, self._offset, *values)
            for word, index, shift in self._moved:
                self._words[word] = values[index] + shift
            for word, array in held:
                self._words[word] = array.data.ptr
            driver.launchKernel(
                self._address,
                blocks,
                1,
                1,
                self._threads,
                1,
                1,
                self._shared_memory,
                stream.ptr,
                self._pointers_address,
                0,
            )


class LaunchSequence(Launcher):
    """Launch functions that take the same struct, one after another.

    Parameters
    ----------
    kernels : list of (function, blocks, threads, shared memory)
        As for `Launcher` each; those of 0 blocks are left out.
    device_id, parameters, varying
        As there.
    """

    __slots__ = ("_functions", "_kernels")

    def __init__(
        self,
        kernels: list[tuple[Any, int, int, int]],
        device_id: int,
        parameters: npt.NDArray[np.void],
        varying: tuple[str, ...],
    ) -> None:
        super().__init__(kernels[0][0], device_id, parameters, varying, threads=0)
        self._functions = [function for function, *_ in kernels]  # they hold their modules
        self._kernels = [(function.ptr, *sizes) for function, *sizes in kernels if sizes[0]]

    def run(self, stream: Any, values: tuple[float, ...]) -> None:
        """Launch all with these varying fields on the `current_stream` of the current device."""
        launch, pointers, queue = self._driver.launchKernel, self._pointers_address, stream.ptr
        with self._lock:
            self._pack_into(self._buffer, self._offset, *values)
            for address, blocks, threads, memory in self._kernels:
                launch(address, blocks, 1, 1, threads, 1, 1, memory, queue, pointers, 0)

    def _launch(self, blocks: int, values: tuple[float, ...]) -> None:
        self.run(self.current_stream(), values)


def _varying_format(dtype: np.dtype[np.void], varying: Sequence[str]) -> tuple[int, str]:
    """Return the offset and the `struct` format that cover adjacent fields with one packing."""
    fields: Mapping[str, Any] = dtype.fields or {}
    names = sorted(fields, key=lambda name: fields[name][1])
    first = names.index(varying[0]) if varying else 0
    if tuple(varying) != tuple(names[first : first + len(varying)]):
        raise ValueError(f"varying fields {list(varying)} are not neighbours, in order, in {names}")
    start = end = fields[varying[0]][1] if varying else 0
    format_ = "="
    for name in varying:
        field, offset = fields[name][:2]
        scalar, count = field.base, field.itemsize // field.base.itemsize
        format_ += "x" * (offset - end) + str(count) + _FORMATS[scalar.str[1:]]
        end = offset + field.itemsize
    return start, format_


def seconds_per_launch(launcher: Launcher, *values: float, repeat: int = 1000) -> float:
    """Return the host's time for one launch of one block: the fastest of several runs.

    Each run ends with a synchronisation outside the timed part, so that the queue never fills.
    """
    from timeit import Timer

    synchronize = require_cupy().cuda.runtime.deviceSynchronize
    timer = Timer(lambda: launcher(1, *values), setup=synchronize)
    return min(timer.repeat(5, repeat)) / repeat
