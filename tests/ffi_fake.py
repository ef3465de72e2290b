"""The library of the peer ``fa3-ffi`` and CuPy, as far as it uses them, on NumPy arrays.

Frames are read word by word, as a C compiler lays out xla/ffi/api/c_api.h.
"""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    addressof,
    c_char,
    c_uint64,
    c_void_p,
    create_string_buffer,
    string_at,
)
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupyflash._arrays import BFLOAT16
from tests.reference import attention

STREAM, DEVICE = 0xABCD0, 3
DTYPES = {10: np.dtype(np.float16), 11: np.dtype(np.float32), 16: BFLOAT16}
SCALARS = {1: np.bool_, 5: np.int64, 12: np.float64}
_Function = CFUNCTYPE(c_void_p, c_void_p)
CREATE_ERROR, DESCRIBE_ERROR, DESTROY_ERROR, GET_STREAM = 6, 7, 8, 10  # words of the host's table
ALLOCATE, FREE, GET_DEVICE = 15, 16, 23


class DeviceArray(np.ndarray):
    """An array whose address is had as CuPy's is."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


class FakeCupy:
    """New arrays are full of NaN; `scratch` is what has been allocated besides."""

    def __init__(self) -> None:
        self.scratch: list[int] = []
        runtime = SimpleNamespace(getDevice=lambda: DEVICE)
        stream = SimpleNamespace(ptr=STREAM)
        self.cuda = SimpleNamespace(
            alloc=self.alloc, get_current_stream=lambda: stream, runtime=runtime
        )

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        return np.full(shape, np.nan, dtype).view(DeviceArray)

    def alloc(self, size: int) -> Any:
        self.scratch.append(size)
        memory = np.empty(size, np.uint8)
        return SimpleNamespace(ptr=memory.ctypes.data, memory=memory)


class Library:
    """Handlers by name; `calls` are those that ran, all of them fail while there is a `fault`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fault: str | None = None
        self.running = False

    def __getitem__(self, name: str) -> Any:
        compute = {"dew_flash3_mha_fwd": forward, "dew_flash3_mha_bwd": backward}[name]

        def handler(address: int) -> int | None:
            frame = Frame(address)
            self.calls.append(name)
            self.running = True
            try:
                frame.check()
                assert self.fault is None, self.fault
                compute(frame)
            except Exception as error:  # as C++ does
                message = create_string_buffer(str(error).encode())
                return frame.ask(CREATE_ERROR, addressof(message), 13)[0]
            finally:
                self.running = False
            return None

        return _Function(handler)


class Frame:
    """A call frame: inputs and results are arrays over the caller's memory."""

    def __init__(self, address: int) -> None:
        self.words = words(address, 22)
        self.inputs = [array(each) for each in self._pointers(5)]
        self.results = [array(each) for each in self._pointers(10)]
        size, _, names, values = self.words[17:21]
        spans = [words(each, 2) for each in words(names, size)]
        self.names = [string_at(text, length).decode() for text, length in spans]
        scalars = map(scalar, words(values, size))
        self.attributes = dict(zip(self.names, scalars, strict=True))

    def _pointers(self, at: int) -> list[int]:
        assert self.words[at] == 40
        size, kinds, each = self.words[at + 2 : at + 5]
        assert string_at(kinds, 4 * size) == np.ones(size, np.int32).tobytes()
        return list(words(each, size))

    def ask(self, function: int, *arguments: Any) -> tuple[int | None, Any]:
        """Call a function of the host; returns its error, and the words of its arguments."""
        given = (c_uint64 * (len(arguments) + 2))(8 * len(arguments) + 16, 0, *arguments)
        return _Function(words(self.words[2], 25)[function])(addressof(given)), given

    def check(self) -> None:
        """What every handler checks, and asks, before it computes."""
        assert self.words[0] == 168 and self.words[4] & 0xFFFFFFFF == 3  # to execute
        assert self.words[15] == 48 and self.names == sorted(self.names)
        assert self.ask(GET_STREAM, 0, 0)[1][3] == STREAM
        assert self.ask(GET_DEVICE, 0, 0)[1][3] == DEVICE


def forward(frame: Frame) -> None:
    out, lse, *partial = frame.results
    assert [each.shape for each in partial] == [(1, 1, 1, 1), (1, 1, 1)]
    dense = attention(*frame.inputs, **options(frame))
    out[...], lse[...] = dense.out, dense.lse


def backward(frame: Frame) -> None:
    dout, query, key, value, out, lse = frame.inputs
    dense = attention(query, key, value, dout=dout, **options(frame))
    np.testing.assert_allclose(lse, dense.lse, rtol=1e-5)
    np.testing.assert_allclose(out.astype(np.float64), dense.out, atol=0.02)
    batch, seqlen, heads, _ = query.shape
    *gradients, one, other = frame.results
    assert one.shape == other.shape and one.size >= batch * heads * (-(-seqlen // 128) * 128)
    error, asked = frame.ask(ALLOCATE, 0, 1000, 256, 0)
    if error:
        described = frame.ask(DESCRIBE_ERROR, error, 0, 0)[1]
        said = string_at(described[3]).decode()
        frame.ask(DESTROY_ERROR, error)
        raise MemoryError(f"no scratch: {said}")
    (c_char * 1000).from_address(asked[5]).value = b"\xff" * 999
    assert not frame.ask(FREE, 0, 1000, asked[5])[0]
    for gradient, right in zip(gradients, (dense.dq, dense.dk, dense.dv), strict=True):
        gradient[...] = right


def options(frame: Frame) -> dict[str, Any]:
    given = dict(frame.attributes)
    assert given.pop("window_size_left") == given.pop("window_size_right") == -1
    return {"causal": bool(given.pop("is_causal"))} | given


def words(address: int, count: int) -> Any:
    return (c_uint64 * count).from_address(address)


def array(address: int) -> Any:
    size, _, dtype, data, rank, dims = words(address, 6)
    assert size == 48
    shape, dtype = tuple(words(dims, rank)), DTYPES[dtype & 0xFFFFFFFF]
    memory = (c_char * (dtype.itemsize * int(np.prod(shape)))).from_address(data)
    return np.frombuffer(memory, dtype).reshape(shape)


def scalar(address: int) -> Any:
    dtype, value = words(address, 2)
    kind = np.dtype(SCALARS[dtype & 0xFFFFFFFF])
    return np.frombuffer(string_at(value, kind.itemsize), kind)[0]
