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

from cupyflash import _arrays, _engines
from cupyflash._kvcache import attend

METHODS = ("argmax", "any", "astype", "clip", "copy", "max", "repeat", "reshape", "swapaxes")
METHODS += ("transpose", "view")
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


class DeviceArray:
    """Stands in for `cupy.ndarray`."""

    __array_ufunc__ = None
    device = SimpleNamespace(id=0)

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)

    shape = property(lambda self: self._values.shape)
    dtype = property(lambda self: self._values.dtype)
    ndim = property(lambda self: self._values.ndim)
    size = property(lambda self: self._values.size)
    strides = property(lambda self: self._values.strides)

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

    __bool__ = __int__ = __index__ = __float__ = __array__ = __iter__ = tolist = item = _refused


def inner(x: Any) -> Any:
    """NumPy's values of a device array; a bare NumPy array has no business here."""
    if isinstance(x, (tuple, list)):
        return type(x)(inner(y) for y in x)
    assert not isinstance(x, np.ndarray), "a NumPy array meets a device array"
    return x._values if isinstance(x, DeviceArray) else x


def wrapped(function: Any) -> Any:
    """`function` of NumPy for device arrays."""

    def on_device(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):  # a GPU warns of nothing
            result = function(*inner(args), **{name: inner(x) for name, x in kwargs.items()})
        return DeviceArray(result) if isinstance(result, (np.ndarray, np.generic)) else result

    return on_device


for _name in METHODS:
    assert hasattr(cupy.ndarray, _name)
    setattr(DeviceArray, _name, wrapped(getattr(np.ndarray, _name)))
for _name in OPERATORS:
    for _form in ("__{}__", "__r{}__", "__i{}__"):
        _method = getattr(np.ndarray, _form.format(_name))
        setattr(DeviceArray, _form.format(_name), wrapped(_method))
for _name in COMPARISONS:
    setattr(DeviceArray, f"__{_name}__", wrapped(getattr(np.ndarray, f"__{_name}__")))


class Namespace:
    """Stands in for the module `cupy`."""

    ndarray = DeviceArray
    lib = SimpleNamespace(
        stride_tricks=SimpleNamespace(as_strided=wrapped(np.lib.stride_tricks.as_strided))
    )
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDevice=lambda: 0), Device=lambda number: nullcontext()
    )

    def asarray(self, x: Any, dtype: Any = None) -> Any:
        """Copies host arrays to the device; takes device arrays as they are."""
        return x if isinstance(x, DeviceArray) else DeviceArray(np.array(x, dtype))

    def __getattr__(self, name: str) -> Any:
        assert hasattr(cupy, name), f"CuPy has no {name}"
        return wrapped(getattr(np, name))


@contextmanager
def strict_device() -> Iterator[None]:
    """Make cupyflash take `DeviceArray`s as CuPy's; the attention itself is the NumPy engine's."""
    namespace, host_attention = Namespace(), attend.flash_attention_varlen_forward

    def attention(*arrays: Any, **options: Any) -> Any:
        assert all(isinstance(x, DeviceArray) for x in arrays[:3]), "q, k and v are on the device"
        options = {name: on_host(x) for name, x in options.items()} | {"engine": None}
        out, saved = host_attention(*map(on_host, arrays), **options)
        return DeviceArray(out), SimpleNamespace(lse=DeviceArray(saved.lse))

    def select(problem: Any, place: Any, *args: Any, **kwargs: Any) -> str:
        return "numpy" if place == _arrays.HOST else "simt"

    with (
        mock.patch.object(_arrays, "require_cupy", return_value=namespace),
        mock.patch.dict(sys.modules, {"cupy": namespace}),
        mock.patch.object(_engines, "select", select),
        mock.patch.object(attend, "flash_attention_varlen_forward", attention),
    ):
        yield


def to_device(x: Any) -> Any:
    """`x`, in a device array if it is an array."""
    return DeviceArray(x) if isinstance(x, np.ndarray) else x


def on_host(x: Any) -> Any:
    """The values of a device array, for tests."""
    return x.get() if isinstance(x, DeviceArray) else x
