"""`Device`: what planning needs to know of a GPU, measured or from a table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from cupyflash.errors import NoDeviceError

__all__ = ["KNOWN", "Device", "current", "describe", "require_cupy"]

_INSTALL = "pip install 'cupyflash[cuda13]' (cuda12 for a driver older than 580)"
_KIB = 1024


@dataclass(frozen=True)
class Device:
    """One GPU. Memory sizes are in bytes.

    Parameters
    ----------
    id : int
        CUDA's device number; -1 for an entry of the table, which no launch can use.
    name : str
        As the driver says it.
    compute_capability : tuple of int
        ``(major, minor)``.
    multiprocessors : int
        Streaming multiprocessors.
    shared_memory_per_block_optin : int
        The most shared memory that a thread block can be given.
    l2_cache : int
        Second level cache.
    """

    id: int
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block_optin: int
    l2_cache: int

    @property
    def arch(self) -> str:
        """Return the architecture to compile for; Hopper's has wgmma and setmaxnreg."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")

    @staticmethod
    def known(arch: str) -> Device:
        """Return a typical GPU of an architecture, to plan and compile for without having one.

        Raises
        ------
        KeyError
            The architecture is not in the table.
        """
        return KNOWN[arch]


def _known(name: str, major: int, minor: int, processors: int, shared: int, l2: int) -> Device:
    return Device(-1, name, (major, minor), processors, shared * _KIB, l2 * _KIB * _KIB)


KNOWN = {
    device.arch: device
    for device in (
        _known("NVIDIA T4", 7, 5, 40, 64, 4),
        _known("NVIDIA A100", 8, 0, 108, 163, 40),
        _known("NVIDIA RTX A6000", 8, 6, 84, 99, 6),
        _known("NVIDIA L40S", 8, 9, 142, 99, 96),
        _known("NVIDIA H100", 9, 0, 132, 227, 50),
        _known("NVIDIA B200", 10, 0, 148, 227, 126),
        _known("NVIDIA GeForce RTX 5090", 12, 0, 170, 99, 96),
    )
}


@cache
def require_cupy() -> Any:
    """Return the cupy module, once it is known to have a GPU.

    Raises
    ------
    NoDeviceError
        CuPy is not installed, was built for another vendor, or finds no usable GPU.
    """
    try:
        cupy: Any = import_module("cupy")
    except ImportError as error:
        raise NoDeviceError(
            f"device arrays and GPU engines need CuPy, which cannot be imported ({error})."
            f" Install it: {_INSTALL}; or pass NumPy arrays, which need no GPU."
        ) from error
    if cupy.cuda.runtime.is_hip:
        raise NoDeviceError("this CuPy is built for ROCm; the CUDA engines need an NVIDIA GPU.")
    if not cupy.cuda.is_available():
        raise NoDeviceError(
            f"CuPy {cupy.__version__} finds no usable NVIDIA GPU: check that nvidia-smi lists one,"
            " that CUDA_VISIBLE_DEVICES does not hide it, and that the driver is new enough for"
            " this CuPy; or pass NumPy arrays, which need no GPU."
        )
    return cupy


def current() -> Device:
    """Return CuPy's current device. Raises NoDeviceError where there is none."""
    return describe(require_cupy().cuda.runtime.getDevice())


@cache
def describe(device_id: int) -> Device:
    """Return the GPU of this number. Raises NoDeviceError where there is none."""
    runtime = require_cupy().cuda.runtime
    count = runtime.getDeviceCount()
    if not 0 <= device_id < count:
        raise NoDeviceError(f"there is no device {device_id}: this process sees {count} GPU(s).")
    properties = runtime.getDeviceProperties(device_id)
    return Device(
        id=device_id,
        name=properties["name"].decode(),
        compute_capability=(properties["major"], properties["minor"]),
        multiprocessors=properties["multiProcessorCount"],
        shared_memory_per_block_optin=properties["sharedMemPerBlockOptin"],
        l2_cache=properties["l2CacheSize"],
    )
