"""Times on the device by events, on the host by the clock; and the memory of a call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from cupyflash._cuda.device import require_cupy

Work = Callable[[], Any]


def device_milliseconds(
    works: Mapping[str, Work], *, rounds: int = 5, target: float = 20.0
) -> dict[str, float]:
    """Return the median milliseconds of one call of each work; they take turns.

    Parameters
    ----------
    works : mapping of name to callable
        Each enqueues work on the current stream.
    rounds : int, default 5
        How often each takes its turn.
    target : float, default 20
        Milliseconds that one turn should last; cheap works are repeated within it.
    """
    cuda = require_cupy().cuda
    begin, end = cuda.Event(), cuda.Event()

    def turn(work: Work, repeat: int) -> float:
        begin.record()
        for _ in range(repeat):
            work()
        end.record()
        end.synchronize()
        return float(cuda.get_elapsed_time(begin, end)) / repeat

    repeats = {}
    for name, work in works.items():
        work()
        cuda.runtime.deviceSynchronize()
        repeats[name] = max(1, min(400, int(target / max(turn(work, 1), 1e-3))))
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(turn(work, repeats[name]))
    return {name: median(values) for name, values in times.items()}


def extra_bytes(work: Work) -> int:
    """Return the peak of the memory that one call takes from CuPy and PyTorch, its result too."""
    release()
    cuda, torch = require_cupy().cuda, _torch()
    pool, before, peak = cuda.MemoryPool(), 0, 0
    if torch is not None:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with cuda.using_allocator(pool.malloc):
        work()
        cuda.runtime.deviceSynchronize()
    if torch is not None:
        peak = torch.cuda.max_memory_allocated()
    return int(pool.total_bytes()) + int(peak) - int(before)


def release() -> None:
    """Give cached memory back, as one allocator cannot use what another keeps."""
    require_cupy().get_default_memory_pool().free_all_blocks()
    torch = _torch()
    if torch is not None:
        torch.cuda.empty_cache()


def _torch() -> Any:
    """PyTorch, if some peer has loaded it and it can use the GPU."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def host_microseconds(work: Work, *, calls: int = 500, rounds: int = 7) -> float:
    """Return the host's microseconds for one call, without waiting for the device.

    The median of several rounds; each starts with an idle device and is short enough for the
    launch queue.
    """
    synchronize = require_cupy().cuda.runtime.deviceSynchronize
    for _ in range(50):
        work()
    times = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - start) / calls * 1e6)
    synchronize()
    return median(times)
