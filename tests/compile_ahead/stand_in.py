"""The stand-in for the module `cupy`: one H200 whose launches do nothing.

What is not here is NumPy's function of that name.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from tests.compile_ahead.arrays import filled_from, ndarray, unwrap, wrapped

__version__ = "14.2.0"

# Kernels are planned for these figures: another GPU would compile others.
H200 = {
    "name": b"NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multiProcessorCount": 132,
    "sharedMemPerBlockOptin": 232448,
    "l2CacheSize": 62914560,
}


class Part(ModuleType):
    """A module of the stand-in: what it lacks is missing here, not in the caller."""

    def __init__(self, name: str, **contents: Any) -> None:
        super().__init__(f"cupy.{name}")
        vars(self).update(contents)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the stand-in has no {self.__name__}.{name}")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # NumPy's __path__ would make imports of cupy.lib read NumPy's files
        raise AttributeError(name)
    found = getattr(np, name)
    return wrapped(found) if callable(found) and not isinstance(found, type) else found


# --- arrays -------------------------------------------------------------------------------------


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def empty_like(x: ndarray, dtype: Any = None, order: str = "C") -> ndarray:
    return ndarray(x.shape, dtype or x.dtype, order=order)


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    array = ndarray(shape, dtype)
    array.fill(0)
    return array


def asarray(x: Any, dtype: Any = None) -> ndarray:
    if isinstance(x, ndarray):
        return x if dtype in (None, x.dtype) else x.astype(dtype)
    return filled_from(np.asarray(x, dtype))


def array(x: Any, dtype: Any = None) -> ndarray:
    return filled_from(np.asarray(unwrap(x), dtype))


def asnumpy(x: ndarray) -> Any:
    return x.get()


# --- CUDA ---------------------------------------------------------------------------------------


class Device:
    """Stands in for `cupy.cuda.Device`."""

    id = 0
    compute_capability = "90"

    def __init__(self, number: int = 0) -> None:
        assert number == 0, "the stand-in has one device"

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: Any) -> None:
        """Devices do not change."""

    def synchronize(self) -> None:
        """Nothing runs."""


class Graph:
    """Stands in for `cupy.cuda.Graph`."""

    def launch(self, stream: Any) -> None:
        """Nothing is replayed."""


class Stream:
    """Stands in for `cupy.cuda.Stream`; the current one, as threads see it, does not change."""

    ptr = 0

    def __init__(self, non_blocking: bool = False) -> None:
        self._capturing = False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        """See the class."""

    def synchronize(self) -> None:
        """Nothing runs."""

    def is_capturing(self) -> bool:
        return self._capturing

    def begin_capture(self) -> None:
        self._capturing = True

    def end_capture(self) -> Graph:
        self._capturing = False
        return Graph()


class Function:
    """Stands in for `cupy.cuda.Function`."""

    ptr = 1

    @property
    def kernel(self) -> Function:
        return self


class RawModule:
    """Stands in for `cupy.RawModule`; its file exists, as the real one's must."""

    def __init__(self, path: str) -> None:
        with open(path, "rb"):
            pass

    def get_function(self, name: str) -> Function:
        return Function()


class RawKernel:
    """Stands in for `cupy.RawKernel`."""

    def __init__(self, code: str, name: str) -> None:
        """Nothing is compiled: tests spin with it."""

    def __call__(self, grid: Any, block: Any, arguments: Any) -> None:
        """Nothing runs."""


def launch_kernel(
    function: int,
    grid_x: int, grid_y: int, grid_z: int,
    block_x: int, block_y: int, block_z: int,
    shared_memory: int,
    stream: int,
    parameters: int,
    extra: int,
) -> None:  # fmt: skip
    """Nothing runs; a call with other arguments raises."""


def set_attribute(function: int, attribute: int, value: int) -> None:
    """Nothing is set."""


@contextmanager
def using_allocator(allocator: Any) -> Any:
    """All memory is as `ndarray` allocates it."""
    yield


_default_stream = Stream()
_pool = Part("pool", used_bytes=lambda: 0, total_bytes=lambda: 0, free_all_blocks=lambda: None)


def get_default_memory_pool() -> Any:
    return _pool


lib = Part(
    "lib",
    stride_tricks=Part("lib.stride_tricks", as_strided=wrapped(np.lib.stride_tricks.as_strided)),
)
random = Part("random")
cuda = Part(
    "cuda",
    Device=Device,
    Stream=Stream,
    alloc=lambda size: empty(size, "uint8").data,
    get_current_stream=lambda device_id=0: _default_stream,
    is_available=lambda: True,
    using_allocator=using_allocator,
    runtime=Part(
        "runtime",
        is_hip=False,
        getDevice=lambda: 0,
        setDevice=lambda device_id: None,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda device_id: H200,
        deviceSynchronize=lambda: None,
        memGetInfo=lambda: (1 << 37, 1 << 37),
    ),
    driver=Part(
        "driver",
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        ctxGetCurrent=lambda: 1,
        funcSetAttribute=set_attribute,
        launchKernel=launch_kernel,
    ),
)


def install() -> None:
    """Be `cupy` in this process, from here on."""
    sys.modules["cupy"] = sys.modules[__name__]
    for part in (cuda, lib, lib.stride_tricks):
        sys.modules[part.__name__] = part
