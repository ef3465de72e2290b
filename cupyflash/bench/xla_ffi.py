"""Calls of XLA's foreign functions without XLA, on CuPy's current stream and in its memory.

A handler is a C function of a call frame: its host, buffers and attributes. The structures are
those of xla/ffi/api/c_api.h, version 0.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    addressof,
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_size_t,
    c_void_p,
    cast,
    sizeof,
)
from typing import Any

from cupyflash._cuda.device import require_cupy
from cupyflash.bench.xla_host import HEAD, Host

__all__ = ["Call"]

Array = Any
Shape = tuple[int, ...]

_DTYPES = {"float16": 10, "float32": 11, "bfloat16": 16}
_SCALARS: dict[type, Any] = {bool: (1, c_bool), int: (5, c_int64), float: (12, c_double)}
_BUFFER, _SCALAR, _EXECUTE = 1, 3, 3


class _Buffer(Structure):
    _fields_ = (
        *HEAD,
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    )


class _Scalar(Structure):
    _fields_ = (("dtype", c_int), ("value", c_void_p))


class _Name(Structure):
    _fields_ = (("text", c_char_p), ("length", c_size_t))


class _Buffers(Structure):
    _fields_ = (*HEAD, ("size", c_int64), ("kinds", POINTER(c_int)), ("each", POINTER(c_void_p)))


class _Attributes(Structure):
    _fields_ = (
        *HEAD,
        ("size", c_int64),
        ("kinds", POINTER(c_int)),
        ("names", POINTER(c_void_p)),
        ("each", POINTER(c_void_p)),
    )


class _CallFrame(Structure):
    _fields_ = (
        *HEAD,
        ("api", c_void_p),
        ("context", c_void_p),
        ("stage", c_int),
        ("inputs", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
        ("future", c_void_p),
    )


_Handler = CFUNCTYPE(c_void_p, POINTER(_CallFrame))


class Call:
    """A handler and what it is given.

    Parameters
    ----------
    handler : ctypes function
    inputs : sequence of cupy.ndarray
        float16, bfloat16 or float32, C-contiguous. Held, not copied.
    results : sequence of (shape, dtype)
        Allocated anew by each call.
    attributes : mapping of str to bool, int or float

    Raises
    ------
    ValueError
        An input is not C-contiguous.
    RuntimeError
        When called: the handler's own message.
    """

    def __init__(
        self,
        handler: Any,
        inputs: Sequence[Array],
        results: Sequence[tuple[Shape, Any]],
        attributes: Mapping[str, bool | int | float],
    ) -> None:
        if not all(each.flags.c_contiguous for each in inputs):
            raise ValueError("a handler reads C-contiguous arrays alone")
        self._handler = cast(handler, _Handler)
        self._inputs, self._results = inputs, results
        self._host = Host()
        given = [_buffer(each.shape, each.dtype, each.data.ptr) for each in inputs]
        self._made = [_buffer(shape, dtype) for shape, dtype in results]
        scalars = {name: _scalar(value) for name, value in sorted(attributes.items())}
        names = [_Name(name.encode(), len(name)) for name in scalars]
        self._pointed_at = given, scalars, names
        self._frame = _CallFrame(
            struct_size=_CallFrame.future.offset,  # up to what every handler reads
            api=addressof(self._host.api),
            stage=_EXECUTE,
            inputs=_buffers(given),
            results=_buffers(self._made),
            attributes=_Attributes(
                struct_size=sizeof(_Attributes),
                size=len(scalars),
                kinds=(c_int * len(scalars))(*[_SCALAR] * len(scalars)),
                names=_addresses(names),
                each=_addresses(list(scalars.values())),
            ),
        )

    def __call__(self) -> list[Array]:
        """Enqueue the work and return its results."""
        empty = require_cupy().empty
        made = [empty(shape, dtype) for shape, dtype in self._results]
        for buffer, array in zip(self._made, made, strict=True):
            buffer.data = array.data.ptr
        try:
            error = self._handler(self._frame)
            if error:
                raise RuntimeError(self._host.message(error))
        finally:
            self._host.forget()
        return made


def _buffer(shape: Shape, dtype: Any, data: int | None = None) -> _Buffer:
    return _Buffer(
        struct_size=sizeof(_Buffer),
        dtype=_DTYPES[str(dtype)],
        data=data,
        rank=len(shape),
        dims=(c_int64 * len(shape))(*shape),
    )


def _buffers(buffers: Sequence[_Buffer]) -> _Buffers:
    kinds = (c_int * len(buffers))(*[_BUFFER] * len(buffers))
    return _Buffers(
        struct_size=sizeof(_Buffers), size=len(buffers), kinds=kinds, each=_addresses(buffers)
    )


def _scalar(value: bool | int | float) -> _Scalar:
    dtype, kind = _SCALARS[type(value)]
    number = kind(value)
    scalar = _Scalar(dtype, addressof(number))
    scalar.number = number  # of which it has only the address
    return scalar


def _addresses(structures: Sequence[Structure]) -> Any:
    return (c_void_p * len(structures))(*map(addressof, structures))
