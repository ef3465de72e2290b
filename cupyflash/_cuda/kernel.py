"""What the plans of every engine are made of: launches, grids, widths of access, stubs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupyflash._problem import Problem
from cupyflash.errors import UnsupportedError

__all__ = [
    "VECTOR_BYTES",
    "KernelLaunch",
    "TileMap",
    "access_width",
    "bytes_assertion",
    "check_lengths",
    "entry_point",
    "kernel_launch",
    "row_tiles",
    "scale_can_wait",
    "stub",
    "tile_map_of",
]

VECTOR_BYTES = 16  # the widest access
_MAP_THREADS = 256
_MAX_BLOCKS = 2**31 - 1
_MAX_SEQLEN = 2**30 - 1  # so that an index plus a window bound stays an int
_SMALLEST_FACTOR, _LARGEST_FACTOR = 2.0**-100, 2.0**100


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel of a plan: entry name, blocks along x, threads and shared memory of a block."""

    entry: str
    blocks: int
    threads: int
    shared_memory: int = 0


def kernel_launch(entry: str, blocks: int, threads: int, shared_memory: int = 0) -> KernelLaunch:
    """Return a launch, or raise UnsupportedError for a grid that CUDA does not have."""
    if blocks > _MAX_BLOCKS:
        raise UnsupportedError(f"{blocks} tiles are more than one launch has: {_MAX_BLOCKS}")
    return KernelLaunch(entry, blocks, threads, shared_memory)


def check_lengths(problem: Problem) -> None:
    """Raise UnsupportedError for sequences whose indices the kernels cannot count."""
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if longest > _MAX_SEQLEN:
        raise UnsupportedError(f"sequence length {longest} is above {_MAX_SEQLEN}")


def scale_can_wait(problem: Problem) -> bool:
    """Whether the exponent can take care of softmax_scale: -inf and 0 times it must stay so."""
    return _SMALLEST_FACTOR < problem.softmax_scale < _LARGEST_FACTOR


def row_tiles(problem: Problem, rows: int, block: int) -> int:
    """Return the tiles of one head in all sequences: `locate_tile` in sequence.cuh."""
    if rows == 0:
        return 0
    if problem.varlen:
        return rows // block + problem.batch + 1
    return -(-rows // block) * problem.batch


def access_width(vector_bytes: int, itemsize: int, *head_dims: int) -> int:
    """Return how many elements one access can move: a power of two that divides head_dims."""
    return math.gcd(max(1, min(vector_bytes, VECTOR_BYTES) // itemsize), *head_dims)


def entry_point(
    launch: KernelLaunch, params: str, kernel: str, blocks: int = 1, arguments: str = "params"
) -> str:
    """Return the C++ of a kernel's entry, compiled for `blocks` blocks a multiprocessor."""
    return (
        f'extern "C" __global__ void __launch_bounds__({launch.threads}, {blocks})\n'
        f"{launch.entry}(const __grid_constant__ {params} params) {{ {kernel}({arguments}); }}"
    )


@dataclass(frozen=True)
class TileMap:
    """The map of which tiles masks hide, and the kernel that writes it."""

    pointer: str  # field of the params struct
    size: int  # bytes
    launch: KernelLaunch

    def entry_point(self, params: str, config: str, common: str = "params") -> str:
        """Return the C++ of the kernel's entry."""
        arguments = f"{common}, {common}.{self.pointer}"
        kernel = f"find_visible_tiles<{config}>"
        return entry_point(self.launch, params, kernel, arguments=arguments)


def tile_map_of(
    problem: Problem, block_m: int, block_n: int, pointer: str = "visibility"
) -> TileMap | None:
    """Return the map for tiles of this size: `TileMap` in visible_tiles.cuh; None: not needed."""
    if not problem.mask_shape:
        return None
    batch, heads, rows, cols = problem.mask_shape
    size = batch * heads * -(-rows // block_m) * -(-cols // block_n)
    blocks = -(-size * 32 // _MAP_THREADS)
    return TileMap(pointer, size, kernel_launch(f"cupyflash_{pointer}", blocks, _MAP_THREADS))


def bytes_assertion(shape: str, launch: KernelLaunch) -> str:
    """Return the line of a stub by which the kernel's shared memory is that of the plan."""
    text = f"{shape} differs from the plan"
    return f'static_assert({shape}::bytes == {launch.shared_memory}, "{text}");'


def stub(include: str, *parts: str) -> str:
    """Return the source that includes a kernel and instantiates it."""
    body = "\n".join(parts)
    return f'#include "{include}"\n\nnamespace cupyflash {{\n{body}\n}}  // namespace cupyflash\n'
