"""The memory of a call, with a CuPy and a PyTorch that only count."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from cupyflash.bench import timing


class Pool:
    """Knows how much was taken from it."""

    def __init__(self) -> None:
        self.taken = 0

    def malloc(self, size: int) -> None:
        self.taken += size

    def total_bytes(self) -> int:
        return self.taken

    def free_all_blocks(self) -> None:
        self.taken = 0


class Torch:
    """Holds 100 bytes, at most 130 since the last reset."""

    def __init__(self, available: bool) -> None:
        self.cuda = self
        self.available = available
        self.emptied = 0

    def is_available(self) -> bool:
        return self.available

    def reset_peak_memory_stats(self) -> None:
        assert self.available

    def memory_allocated(self) -> int:
        return 100

    def max_memory_allocated(self) -> int:
        return 130

    def empty_cache(self) -> None:
        assert self.available
        self.emptied += 1


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    """The pools made, the last one in use; the first is CuPy's own."""
    made = [Pool()]

    def new_pool() -> Pool:
        made.append(Pool())
        return made[-1]

    cuda = SimpleNamespace(
        MemoryPool=new_pool,
        using_allocator=lambda allocator: nullcontext(),
        runtime=SimpleNamespace(deviceSynchronize=lambda: None),
    )
    cupy = SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: made[0])
    monkeypatch.setattr(timing, "require_cupy", lambda: cupy)
    return made


@pytest.mark.parametrize(("torch", "expected"), [(None, 7), (True, 37), (False, 7)])
def test_extra_memory_is_that_of_both_allocators(
    torch: bool | None, expected: int, pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None if torch is None else Torch(torch))
    pools[0].malloc(5)
    assert timing.extra_bytes(lambda: pools[-1].malloc(7)) == expected
    assert pools[0].taken == 0
