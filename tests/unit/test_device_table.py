"""`DeviceTable` against a CuPy that writes down what is uploaded, on which stream, and waits."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyflash._cuda import device_table, scratch
from cupyflash._cuda.device_table import DeviceTable

KIB = 1024


class Stream:
    """CuPy's stream as far as tables need it."""

    def __init__(self, cuda: Any, ptr: int, capturing: bool = False) -> None:
        self.cuda, self.ptr, self.capturing = cuda, ptr, capturing

    def is_capturing(self) -> bool:
        return self.capturing

    def synchronize(self) -> None:
        assert not self.capturing
        self.cuda.waited.append(self.ptr)

    def __enter__(self) -> Stream:
        self.before, self.cuda.current = self.cuda.current, self
        return self

    def __exit__(self, *error: Any) -> None:
        self.cuda.current = self.before


class Array:
    """A device array that remembers the stream of its upload."""

    def __init__(self, values: np.ndarray, stream: Stream) -> None:
        assert not stream.capturing, "a graph would repeat the copy"
        self.values, self.stream = values.copy(), stream.ptr


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = SimpleNamespace(waited=[], current=None, captured=[])
    fake.stream = lambda ptr, capturing=False: Stream(fake, ptr, capturing)
    fake.current = fake.stream(0)
    fake.Stream = lambda non_blocking: fake.stream(99)
    fake.get_current_stream = lambda: fake.current
    cupy = SimpleNamespace(cuda=fake, asarray=lambda values: Array(values, fake.current))
    for module in (device_table, scratch):
        monkeypatch.setattr(module, "require_cupy", lambda: cupy)
    monkeypatch.setattr(scratch, "_captured", fake.captured)
    monkeypatch.setattr(device_table, "_held", type(device_table._held)())
    return fake


def table_of(size: int = 4) -> tuple[DeviceTable, list[int]]:
    """A table of `size` bytes, and a list that grows when it is made."""
    made: list[int] = []

    def make() -> np.ndarray:
        made.append(size)
        return np.arange(size, dtype=np.uint8)

    return DeviceTable(make), made


def on(table: DeviceTable, stream: Stream) -> Array:
    with stream:
        return table.on(stream)


def test_each_stream_uploads_its_own_copy_once_and_waits_for_nothing(cuda: Any) -> None:
    table, made = table_of()
    one, two = cuda.stream(10), cuda.stream(20)
    first, second = on(table, one), on(table, two)
    assert (first.stream, second.stream) == (10, 20)
    assert on(table, one) is first and on(table, two) is second
    assert made == [4, 4] and not cuda.waited and not cuda.captured


def test_streams_per_thread_have_one_number_and_several_copies(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, _ = table_of()
    mine = on(table, cuda.stream(2))
    monkeypatch.setattr(device_table.threading, "get_ident", lambda: -1)
    assert on(table, cuda.stream(2)) is not mine


def test_the_copies_used_least_lately_are_dropped(cuda: Any) -> None:
    size = device_table._MOST_BYTES // 4
    tables = [table_of(size) for _ in range(5)]
    stream = cuda.stream(0)
    alive = [weakref.ref(on(table, stream)) for table, _ in tables[:4]]
    on(tables[0][0], stream)
    on(tables[4][0], stream)
    gc.collect()
    assert [ref() is not None for ref in alive] == [True, False, True, True]
    on(tables[1][0], stream)
    assert tables[1][1] == [size, size]  # made again


def test_one_table_may_be_larger_than_all_are_allowed(cuda: Any) -> None:
    small, large = table_of()[0], table_of(device_table._MOST_BYTES + KIB)[0]
    stream = cuda.stream(0)
    on(small, stream)
    assert on(large, stream) is on(large, stream)
    assert len(device_table._held) == 1


def test_what_a_graph_reads_is_uploaded_outside_and_never_dropped(cuda: Any) -> None:
    table, _ = table_of(device_table._MOST_BYTES)
    capturing = cuda.stream(10, capturing=True)
    copy = weakref.ref(on(table, capturing))
    assert copy().stream == cuda.waited[0] == 99
    on(table_of()[0], cuda.stream(0))  # takes its place
    gc.collect()
    assert len(device_table._held) == 1 and copy() is not None
    warm, _ = table_of()
    before = on(warm, cuda.stream(10))
    assert on(warm, capturing) is before and before in cuda.captured
