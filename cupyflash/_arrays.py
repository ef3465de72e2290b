"""Taking other people's arrays: NumPy, CuPy, DLPack and `__cuda_array_interface__` objects."""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupyflash._cuda.device import require_cupy
from cupyflash._cuda.scratch import keep
from cupyflash._float8 import FLOAT8
from cupyflash.errors import NoDeviceError

Array = Any

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_DTYPES: dict[np.dtype[Any], str] = {
    np.dtype(np.float16): "float16",
    BFLOAT16: "bfloat16",
    np.dtype(np.float32): "float32",
    np.dtype(np.float64): "float64",
}
DTYPES_BY_NAME = {name: dtype for dtype, name in FLOAT_DTYPES.items()}
_MAX_OVERLAP_WORK: Any = 10_000  # candidate solutions; NumPy's stubs know only -1 and 0
_MAX_COMPARED = 1 << 20  # elements, in some 0.1 s
_DLPACK_HOST_KINDS = (1, 3, 11)  # CPU, CUDA pinned host, ROCm pinned host
_DLPACK_CUDA_KINDS = (2, 13)  # CUDA, CUDA managed


class Place(NamedTuple):
    """Where the arrays of a call live: the host (None) or one CUDA device (its id)."""

    device_id: int | None

    @property
    def namespace(self) -> Any:
        return np if self.device_id is None else require_cupy()

    def current(self) -> AbstractContextManager[Any]:
        """Make this device current, as allocations and launches go there."""
        if self.device_id is None:
            return nullcontext()
        cuda = require_cupy().cuda
        if cuda.runtime.getDevice() == self.device_id:
            return nullcontext()
        return cuda.Device(self.device_id)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return "host (NumPy)" if self.device_id is None else f"CUDA device {self.device_id}"


HOST = Place(None)


def is_cupy(x: Any) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, getattr(cupy, "ndarray", ()))


def place_of(array: Array) -> Place:
    return HOST if isinstance(array, np.ndarray) else Place(array.device.id)


def as_array(x: Any, name: str) -> Array:
    """Return `x` as a NumPy or CuPy array over the same memory.

    Raises
    ------
    TypeError
        `x` is no array, or one that cannot be shared.
    ValueError
        Its elements are where a GPU cannot read them.
    NoDeviceError
        `x` lives on a GPU and CuPy cannot be imported.
    """
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(
                f"{name} is a numpy.ma.MaskedArray, whose mask would be lost; "
                "pass its data and give the mask as mask="
            )
        return np.asarray(x)
    if is_cupy(x):
        return _aligned(x, name)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(x, name)
    if hasattr(x, "__cuda_array_interface__"):
        return _aligned(_cupy_for(name).asarray(x), name)
    raise TypeError(
        f"{name} must be an array (NumPy, CuPy, or anything with __dlpack__ or "
        f"__cuda_array_interface__), got {type(x).__name__}; wrap it in numpy.asarray first"
    )


def as_operand(x: Any, name: str) -> Array:
    """Like `as_array`, for q, k and v: FP8 is uint8 on a GPU, as CuPy has no such dtype."""
    array = as_array(x, name)
    return array.view(np.uint8) if array.dtype == FLOAT8 and is_cupy(array) else array


def is_float8(array: Array) -> bool:
    """Whether a q, k or v that `as_operand` gave holds e4m3 numbers."""
    return bool(array.dtype == (np.uint8 if is_cupy(array) else FLOAT8))


def _aligned(array: Array, name: str) -> Array:
    """Return a device array; a read between elements' own addresses would end the CUDA context."""
    itemsize = array.dtype.itemsize
    strides = [n for length, n in zip(array.shape, array.strides, strict=True) if length > 1]
    if array.size and any(distance % itemsize for distance in (array.data.ptr, *strides)):
        raise ValueError(
            f"{name} has elements at addresses that are no multiples of their {itemsize} bytes "
            f"(address {array.data.ptr:#x}, strides {array.strides}), which no GPU reads; "
            "copy its bytes into an array of this dtype"
        )
    return array


def _cupy_for(name: str) -> Any:
    """CuPy, which the device array `name` needs."""
    try:
        return require_cupy()
    except NoDeviceError as error:
        raise NoDeviceError(f"{name} is a device array, but {error}") from error


def _from_dlpack(x: Any, name: str) -> Array:
    kind = int(x.__dlpack_device__()[0])
    if kind in _DLPACK_CUDA_KINDS:
        return _aligned(_shared(_cupy_for(name).from_dlpack, x, name), name)
    if kind in _DLPACK_HOST_KINDS:
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            if name == "out":  # what follows may copy, and nobody would see what is written
                raise TypeError(f"out does not share its memory: {error}") from error
            # NumPy's DLPack knows no bfloat16, and no read-only producer of protocol 0.
            return _shared(_host_view, x, name)
    raise TypeError(
        f"{name} lives on a device of DLPack kind {kind}; only host memory and CUDA are supported"
    )


def _host_view(x: Any) -> Array:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(BFLOAT16)
    array = np.asarray(x)
    if array.dtype == object:
        raise TypeError("it has no NumPy equivalent")
    return array


def _shared(convert: Any, x: Any, name: str) -> Array:
    try:
        return convert(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name} ({type(x).__module__}.{type(x).__name__}) does not share its memory: {error}"
        ) from error


def as_boolean(x: Any, name: str) -> Array:
    """Like `as_array`; TypeError unless the dtype is bool."""
    array = as_array(x, name)
    if array.dtype != np.bool_:
        raise TypeError(
            f"{name} must have dtype bool (True = takes part), got {describe(array)}; "
            "an additive mask is a bias"
        )
    return array


def require_place(array: Array, name: str, place: Place) -> None:
    found = place_of(array)
    if found != place:
        raise TypeError(
            f"{name} lives on the {found} but q on the {place}; all arrays of one call must live "
            "in one place: use cupy.asarray or cupy.asnumpy"
        )


def describe(array: Array) -> str:
    return f"shape {tuple(array.shape)}, dtype {array.dtype}"


def has_contiguous_last_axis(array: Array) -> bool:
    """Whether rows are dense and every stride is a whole number of items."""
    itemsize = array.dtype.itemsize
    last_is_dense = array.shape[-1] <= 1 or array.strides[-1] == itemsize
    return last_is_dense and all(stride % itemsize == 0 for stride in array.strides)


def contiguous_last_axis(array: Array) -> Array:
    """Return `array`, copied only if it has no contiguous last axis."""
    return array if has_contiguous_last_axis(array) else dense_copy(array)


def dense_copy(array: Array) -> Array:
    """Return a copy in C order; replays of a CUDA graph may read what was copied in its capture."""
    place = place_of(array)
    if place == HOST:
        return array.copy(order="C")
    with place.current():
        copy = array.copy(order="C")
        keep(copy)
        return copy


def memory_overlaps(a: Array, b: Array) -> bool:
    """Whether two arrays of one place share a byte."""
    try:
        return np.shares_memory(_shadow(a), _shadow(b), max_work=_MAX_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True  # an exotic pattern of strides: better refused than overwritten


class _Shadow:
    """A device array's address and strides, for NumPy's overlap solver; never dereferenced."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (int(array.data.ptr), True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
        }


def _shadow(array: Array) -> np.ndarray[Any, Any]:
    if isinstance(array, np.ndarray):
        return array
    return np.empty(0) if array.size == 0 else np.asarray(_Shadow(array))


def overlaps_itself(array: Array) -> bool:
    """Whether two elements of `array` share a byte, as in a broadcast view.

    Where too many would have to be compared, axes that interleave count as sharing.
    """
    itemsize = array.dtype.itemsize
    axes = sorted(
        (abs(stride), length)
        for length, stride in zip(array.shape, array.strides, strict=True)
        if length > 1
    )
    extent, interleaved = itemsize, 0  # of the axes so far, and how many of them interleave
    for number, (stride, length) in enumerate(axes, 1):
        if stride < extent:
            interleaved = number
        extent += stride * (length - 1)
    elements = math.prod(length for _, length in axes[:interleaved])
    if not interleaved or not array.size or elements > _MAX_COMPARED:
        return interleaved > 0 and array.size > 0
    offsets = np.zeros(1, np.int64)
    for stride, length in axes[:interleaved]:
        offsets = np.add.outer(offsets, stride * np.arange(length)).ravel()
    return bool((np.diff(np.sort(offsets)) < itemsize).any())
