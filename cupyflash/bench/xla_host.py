"""What an XLA FFI handler may ask of its host, answered by CuPy in XLA's place.

The structures are those of xla/ffi/api/c_api.h, version 0.4.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int32,
    c_size_t,
    c_void_p,
    cast,
    sizeof,
)
from typing import Any

from cupyflash._cuda.device import require_cupy

__all__ = ["HEAD", "Host"]

HEAD = (("struct_size", c_size_t), ("extension", c_void_p))  # of every structure but the smallest


class _Version(Structure):
    _fields_ = (*HEAD, ("major", c_int), ("minor", c_int))


class _CreateError(Structure):
    _fields_ = (*HEAD, ("message", c_char_p), ("code", c_int))


class _DescribeError(Structure):
    _fields_ = (*HEAD, ("error", c_void_p), ("message", c_char_p), ("code", c_int))


class _GetStream(Structure):
    _fields_ = (*HEAD, ("context", c_void_p), ("stream", c_void_p))


class _GetDevice(Structure):
    _fields_ = (*HEAD, ("context", c_void_p), ("ordinal", c_int32))


class _Allocate(Structure):
    _fields_ = (
        *HEAD,
        ("context", c_void_p),
        ("size", c_size_t),
        ("alignment", c_size_t),
        ("data", c_void_p),
    )


class _Api(Structure):
    """What a host offers; handlers that only compute ask for what `Host` has, and no more."""

    _fields_ = (
        *HEAD,
        ("version", _Version),
        ("internal", c_void_p),
        ("create_error", c_void_p),
        ("describe_error", c_void_p),
        ("destroy_error", c_void_p),
        ("register_handler", c_void_p),
        ("get_stream", c_void_p),
        ("types_contexts_states", c_void_p * 4),
        ("allocate", c_void_p),
        ("free", c_void_p),
        ("threads_futures_runs", c_void_p * 6),
        ("get_device", c_void_p),
        ("find_extension", c_void_p),
    )


_Function = CFUNCTYPE(c_void_p, c_void_p)  # returns an error, or none


class Host:
    """Answers a handler. Scratch is kept until it returns: CuPy reuses memory in stream order."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._scratch: list[Any] = []
        self._functions = {  # C keeps only their addresses
            "create_error": _function(_CreateError, self._create_error),
            "describe_error": _function(_DescribeError, self._describe_error),
            "destroy_error": _Function(lambda asked: None),
            "get_stream": _function(_GetStream, self._get_stream),
            "get_device": _function(_GetDevice, self._get_device),
            "allocate": _function(_Allocate, self._allocate),
            "free": _Function(lambda asked: None),
        }
        pointers = {name: cast(each, c_void_p).value for name, each in self._functions.items()}
        version = _Version(struct_size=sizeof(_Version), major=0, minor=4)
        self.api = _Api(struct_size=sizeof(_Api), version=version, **pointers)

    def message(self, error: int) -> str:
        """Return what an error says; errors are numbered from 1, as 0 is none."""
        return self._messages[error - 1].decode(errors="replace")

    def forget(self) -> None:
        """Drop scratch memory and errors of the last call."""
        self._scratch.clear()
        self._messages.clear()

    def _error(self, message: bytes) -> int:
        self._messages.append(message)
        return len(self._messages)

    def _create_error(self, asked: Any) -> int:
        return self._error(asked.contents.message or b"unknown error")

    def _describe_error(self, asked: Any) -> None:
        asked.contents.message = self._messages[asked.contents.error - 1]

    def _get_stream(self, asked: Any) -> None:
        asked.contents.stream = require_cupy().cuda.get_current_stream().ptr

    def _get_device(self, asked: Any) -> None:
        asked.contents.ordinal = require_cupy().cuda.runtime.getDevice()

    def _allocate(self, asked: Any) -> int | None:
        try:
            memory = require_cupy().cuda.alloc(max(1, asked.contents.size))
        except Exception as error:  # which C would not pass on
            return self._error(f"{type(error).__name__}: {error}".encode())
        self._scratch.append(memory)
        asked.contents.data = memory.ptr
        return None


def _function(asked: type[Structure], answer: Callable[[Any], int | None]) -> Any:
    return CFUNCTYPE(c_void_p, POINTER(asked))(answer)
