"""The stand-in's `ndarray`: NumPy's behind CuPy's interface, in memory as aligned as CuPy's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

ALIGNMENT = 512  # bytes, as in CuPy's pool; kernels are planned for the alignment of pointers
METHODS = ("all", "any", "argmax", "astype", "clip", "max", "min", "ravel", "repeat", "reshape")
METHODS += ("squeeze", "sum", "swapaxes", "transpose", "view")
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or")
OPERATORS += ("xor", "lshift", "rshift")
UNARY_AND_COMPARISONS = ("neg", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne")
CONVERSIONS = ("bool", "int", "float", "index")


class Pointer:
    """Stands in for `cupy.cuda.MemoryPointer`; keeps its memory alive."""

    device_id = 0

    def __init__(self, ptr: int, memory: Any) -> None:
        self.ptr, self.memory = ptr, memory

    def __add__(self, nbytes: int) -> Pointer:
        return Pointer(self.ptr + nbytes, self.memory)

    def memset_async(self, value: int, nbytes: int) -> None:
        """Nothing reads what it would write."""


class ndarray:
    """Stands in for `cupy.ndarray`."""

    __array_ufunc__ = None  # NumPy's operators leave mixed operands to this class
    device = SimpleNamespace(id=0)

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: Pointer | None = None,
        strides: Any = None,
        order: str = "C",
    ) -> None:
        if memptr is None:
            self._values = _allocated(shape, np.dtype(dtype), order)
        else:
            memory = memptr.memory
            offset = memptr.ptr - memory.ctypes.data
            self._values = np.ndarray(shape, dtype, memory, offset, strides)

    shape = property(lambda self: self._values.shape)
    strides = property(lambda self: self._values.strides)
    dtype = property(lambda self: self._values.dtype)
    ndim = property(lambda self: self._values.ndim)
    size = property(lambda self: self._values.size)
    itemsize = property(lambda self: self._values.itemsize)
    nbytes = property(lambda self: self._values.nbytes)
    flags = property(lambda self: self._values.flags)
    T = property(lambda self: wrap(self._values.T))

    @property
    def data(self) -> Pointer:
        return Pointer(self._values.__array_interface__["data"][0], self._values)

    def get(self) -> Any:
        return self._values.copy()

    def copy(self, order: str = "C") -> ndarray:
        return filled_from(self._values, order)

    def fill(self, value: Any) -> None:
        self._values.fill(value)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> ndarray:
        return wrap(self._values[unwrap(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self._values[unwrap(index)] = unwrap(value)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


def _allocated(shape: Any, dtype: Any, order: str = "C") -> Any:
    """Aligned memory: NaN where that exists, or else 1, a valid length and offset."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    values = np.ndarray(shape, dtype, memory, start, order="F" if order == "F" else "C")
    values.fill(1 if dtype.kind in "biu" else np.nan)
    return values


def wrap(values: Any) -> Any:
    """`values` as an array of the stand-in, over the same memory, if they are NumPy's."""
    if isinstance(values, tuple):
        return tuple(map(wrap, values))
    if not isinstance(values, (np.ndarray, np.generic)):
        return values
    array = object.__new__(ndarray)
    array._values = np.asarray(values)
    return array


def unwrap(x: Any) -> Any:
    """NumPy's array of one of the stand-in."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(unwrap, x))
    return x._values if isinstance(x, ndarray) else x


def filled_from(values: Any, order: str = "C") -> ndarray:
    """A new array with these values."""
    array = ndarray(values.shape, values.dtype, order=order)
    array._values[...] = values
    return array


def wrapped(function: Any) -> Any:
    """`function` of NumPy for arrays of the stand-in."""

    def on_arrays(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):  # a GPU warns of nothing
            kwargs = {name: unwrap(x) for name, x in kwargs.items()}
            return wrap(function(*map(unwrap, args), **kwargs))

    return on_arrays


def _converted(name: str) -> Any:
    return lambda self: getattr(self._values, name)()


for _name in METHODS:
    setattr(ndarray, _name, wrapped(getattr(np.ndarray, _name)))
for _name in OPERATORS:
    for _form in ("__{}__", "__r{}__", "__i{}__"):
        _method = _form.format(_name)
        setattr(ndarray, _method, wrapped(getattr(np.ndarray, _method)))
for _name in UNARY_AND_COMPARISONS:
    setattr(ndarray, f"__{_name}__", wrapped(getattr(np.ndarray, f"__{_name}__")))
for _name in CONVERSIONS:
    setattr(ndarray, f"__{_name}__", _converted(f"__{_name}__"))
