"""A device without a GPU: arrays with CuPy's rules, to test what the host must never do.

An array of it holds NumPy's behind a wall: whatever would read a value on the host raises, and so
does mixing it with a NumPy array, or a function that CuPy has not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cupy
import numpy as np

from cupyflash import _arrays, _engines, kvcache
from cupyflash._cuda import decode
from cupyflash._float8 import FLOAT8
from cupyflash._kvcache import attend

METHODS = (
    "all",
    "any",
    "argmax",
    "astype",
    "clip",
    "copy",
    "max",
    "mean",
    "ravel",
    "repeat",
    "reshape",
)
METHODS += ("sum", "swapaxes", "transpose", "view")
OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "lshift",
)
OTHERS = ("lt", "le", "gt", "ge", "eq", "ne", "abs", "neg", "invert")


class DeviceArray:
    """Stands in for `cupy.ndarray`."""

    __array_ufunc__ = None
    device = SimpleNamespace(id=0)
    host_may_read = False  # one value at a time, as bool() and float() do

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)

    shape = property(lambda self: self._values.shape)
    dtype = property(lambda self: self._values.dtype)
    ndim = property(lambda self: self._values.ndim)
    size = property(lambda self: self._values.size)
    strides = property(lambda self: self._values.strides)
    T = property(lambda self: self.transpose())

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self._values.__array_interface__["data"][0], device_id=0)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return DeviceArray(self._values[inner(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self._values[inner(index)] = inner(value)

    def get(self) -> Any:
        return self._values

    def _refused(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the host reads a device value")

    __array__ = tolist = item = _refused

    def __iter__(self) -> Iterator[Any]:
        if not self.host_may_read:
            self._refused()
        return (self[index] for index in range(len(self)))


def read(name: str) -> Any:
    """The conversion of that name, where the host may read."""

    def convert(self: DeviceArray) -> Any:
        return getattr(self._values, name)() if self.host_may_read else self._refused()

    return convert


def inner(x: Any) -> Any:
    """NumPy's values of a device array; a bare NumPy array has no business here."""
    if isinstance(x, (tuple, list)):
        return type(x)(inner(y) for y in x)
    assert not isinstance(x, np.ndarray), "a NumPy array meets a device array"
    return x._values if isinstance(x, DeviceArray) else x


def outer(x: Any) -> Any:
    """Device arrays of what a function of NumPy returned."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(outer, x))
    return DeviceArray(x) if isinstance(x, (np.ndarray, np.generic)) else x


def wrapped(function: Any) -> Any:
    """`function` of NumPy for device arrays."""

    def on_device(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):  # a GPU warns of nothing
            return outer(function(*inner(args), **{name: inner(x) for name, x in kwargs.items()}))

    return on_device


for _name in METHODS:
    assert hasattr(cupy.ndarray, _name)
    setattr(DeviceArray, _name, wrapped(getattr(np.ndarray, _name)))
for _name in OPERATORS:
    for _form in ("__{}__", "__r{}__", "__i{}__"):
        _method = getattr(np.ndarray, _form.format(_name))
        setattr(DeviceArray, _form.format(_name), wrapped(_method))
for _name in ("bool", "int", "index", "float"):
    setattr(DeviceArray, f"__{_name}__", read(f"__{_name}__"))
for _name in OTHERS:
    setattr(DeviceArray, f"__{_name}__", wrapped(getattr(np.ndarray, f"__{_name}__")))


class Device(nullcontext[None]):
    """Stands in for `cupy.cuda.Device`."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.id = number


class Namespace:
    """Stands in for the module `cupy`."""

    ndarray = DeviceArray
    lib = SimpleNamespace(
        stride_tricks=SimpleNamespace(as_strided=wrapped(np.lib.stride_tricks.as_strided))
    )
    cuda = SimpleNamespace(
        Device=Device,
        MemoryPool=lambda: SimpleNamespace(
            malloc=None, set_limit=mock.Mock(), total_bytes=lambda: 1
        ),
        get_current_stream=lambda: mock.Mock(spec=["synchronize"]),
        is_available=lambda: True,
        runtime=SimpleNamespace(
            getDevice=lambda: 0, getDeviceProperties=lambda number: {"name": b"strict device"}
        ),
        using_allocator=nullcontext,
    )

    def asarray(self, x: Any, dtype: Any = None) -> Any:
        """Copies host arrays to the device; takes device arrays as they are."""
        if isinstance(x, DeviceArray):
            return x if dtype in (None, x.dtype) else x.astype(dtype)
        return DeviceArray(np.array(x, dtype))

    def __getattr__(self, name: str) -> Any:
        assert hasattr(cupy, name), f"CuPy has no {name}"
        found = getattr(np, name)
        return wrapped(found) if callable(found) else found


@contextmanager
def strict_device() -> Iterator[None]:
    """Make cupyflash take `DeviceArray`s as CuPy's; the attention itself is the NumPy engine's."""
    namespace, host_attention = Namespace(), attend.forward_over_cache

    def attention(*arrays: Any, **options: Any) -> Any:
        assert all(isinstance(x, DeviceArray) for x in arrays[:3]), "q, k and v are on the device"
        arrays = tuple(_as_float8(on_host(x)) for x in arrays)
        options = {name: on_host(x) for name, x in options.items()} | {"engine": None}
        out, saved = host_attention(*arrays, **options)
        return DeviceArray(out), SimpleNamespace(lse=DeviceArray(saved.lse))

    def select(problem: Any, place: Any, *args: Any, **kwargs: Any) -> str:
        return "numpy" if place == _arrays.HOST else "simt"

    faults = DeviceArray(np.zeros(2, np.int32))
    with (
        mock.patch.object(decode, "faults_of", return_value=faults),
        mock.patch.object(_arrays, "require_cupy", return_value=namespace),
        mock.patch.dict(sys.modules, {"cupy": namespace}),
        mock.patch.object(_engines, "select", select),
        mock.patch.object(kvcache, "kernel_device", return_value=None),
        mock.patch.object(attend, "forward_over_cache", attention),
    ):
        yield


def _as_float8(x: Any) -> Any:
    """FP8 is uint8 on a device."""
    return x.view(FLOAT8) if x.dtype == np.uint8 else x


def to_device(x: Any) -> Any:
    """`x`, in a device array if it is an array."""
    return DeviceArray(x) if isinstance(x, np.ndarray) else x


def on_host(x: Any) -> Any:
    """The values of a device array, for tests."""
    return x.get() if isinstance(x, DeviceArray) else x
