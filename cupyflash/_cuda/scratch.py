"""Memory that a call's kernels need for themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyflash._cuda.device import require_cupy

__all__ = ["allocate", "allocate_bytes", "keep"]

_captured: list[Any] = []


def allocate(sizes: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    """Return uninitialised arrays on the current device: name -> (elements, dtype).

    Once dropped, their memory is reused in the order of the current stream. What is allocated while
    a CUDA graph is captured is never reused: replays write there, and nobody says when they end.
    """
    if not sizes:
        return {}
    cupy = require_cupy()
    arrays = {name: cupy.empty(size, dtype) for name, (size, dtype) in sizes.items()}
    keep(*arrays.values())
    return arrays


def allocate_bytes(size: int, stream: Any) -> Any:
    """Return a pointer to memory as `allocate` does, in less time; `stream` is the current one."""
    memory = require_cupy().cuda.alloc(size)
    _keep(stream, memory)
    return memory


def keep(*arrays: Any) -> None:
    """Never free these arrays, or memory, of the current device if a graph is being captured."""
    _keep(require_cupy().cuda.get_current_stream(), *arrays)


def _keep(stream: Any, *arrays: Any) -> None:
    if stream.is_capturing():
        _captured.extend(arrays)
