"""Which machine the demo and the examples run on, and how they take its time and memory."""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyflash import _engines
from cupyflash._arrays import HOST, Place
from cupyflash._problem import Problem

__all__ = [
    "Measurement",
    "describe",
    "engine_name",
    "measure",
    "select",
    "timed",
    "to_host",
]

Array = Any


class Measurement(NamedTuple):
    """What a call returned, and what it took."""

    result: Any
    seconds: float
    peak_bytes: int  # beyond what was held before the call


def select(device: str | None) -> Any:
    """Return ``numpy`` or ``cupy`` for "cpu", "gpu", or None (the GPU if it can be used).

    Raises
    ------
    SystemExit
        "gpu" was asked for, and cannot be had; the message says why. This serves command lines.
    """
    if device == "cpu":
        return np
    obstacle = gpu_obstacle()
    if obstacle is None:
        import cupy

        return cupy
    if device == "gpu":
        sys.exit(f"--device gpu: {obstacle} (--device cpu runs the same in NumPy)")
    print(f"note: this runs in NumPy, as {obstacle}", file=sys.stderr)
    return np


def gpu_obstacle() -> str | None:
    """Say what keeps the demo from running on a GPU, or None."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    if not cupy.cuda.is_available():
        return "CuPy finds no usable NVIDIA GPU"
    try:
        cupy.ones((2, 2), "float32") @ cupy.ones((2, 2), "float32")
    except ImportError:  # cupyflash does without cuBLAS, a model's dense layers do not
        return "CuPy finds no cuBLAS: pip install nvidia-cublas (CUDA 12: nvidia-cublas-cu12)"
    return None


def to_host(array: Array) -> Any:
    """The same numbers as a NumPy array."""
    return array if isinstance(array, np.ndarray) else array.get()


def describe(xp: Any) -> str:
    """One line for people: the GPU's name, or the host and its cores."""
    if xp is np:
        return f"host, {platform.machine()}, {os.cpu_count()} cores"
    number = xp.cuda.Device().id
    properties = xp.cuda.runtime.getDeviceProperties(number)
    return f"GPU {number}, {properties['name'].decode()}"


def engine_name(xp: Any, *, varlen: bool = False) -> str:
    """The engine that cupyflash chooses for plain float32 attention there."""
    problem = Problem("float32", 1, 1, 1, 1, 1, 64, 64, 0.125, varlen=varlen)
    return _engines.select(problem, HOST if xp is np else Place(xp.cuda.Device().id), None)


def timed(xp: Any, function: Callable[[], Any]) -> tuple[Any, float]:
    """What `function` returns, and the seconds until the device had finished."""
    synchronize(xp)
    start = time.perf_counter()
    result = function()
    synchronize(xp)
    return result, time.perf_counter() - start


def synchronize(xp: Any) -> None:
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def measure(xp: Any, function: Callable[[], Any]) -> Measurement:
    """The time of `function`, and the most memory it held."""
    gc.collect()
    if xp is np:
        tracemalloc.start()  # NumPy reports its buffers to it
        try:
            return Measurement(*timed(xp, function), tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    pool = xp.cuda.MemoryPool()  # of its own, as the default one may have room to spare
    with xp.cuda.using_allocator(pool.malloc):
        function()
        peak = pool.total_bytes()  # it only grows
        return Measurement(*timed(xp, function), peak)
