"""How a decoding block shares its work, and into how many parts an entry's keys are cut.

A block has to keep copies under way: a multiprocessor of an H200 needs some 28 KB on the road for
its share of 4.2 TB/s (0.8 us for a way of 31.8 KB/us), and more where other traffic makes the way
longer. What it computes meanwhile is little: 16 rows take the tensor cores a tenth of that time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cupyflash._cuda.device import Device
from cupyflash.errors import UnsupportedError

__all__ = ["FIXED_SPLIT_KEYS", "DecodeTile", "choose_splits", "choose_tile"]

FIXED_SPLIT_KEYS = 2048  # of a batch-invariant call, a multiple of every tile's keys
_MOST_SPLITS = 128
_RESERVED = 1024  # bytes of shared memory that the driver takes from every block
_MOST_STAGES = 6
_ENOUGH_STAGES = 3  # one that is read and two under way
# In the time of a step, of which a multiprocessor takes one at a time however many blocks share it:
_START = 2.0  # until the first keys of a wave of blocks are there
_COMBINE = 4.0  # a launch more, with all partial sums read again
_PART = 0.2  # each part's sums, and their way


@dataclass(frozen=True)
class DecodeTile:
    """Warps along rows and along keys, keys of a warp's step, stages; blocks a multiprocessor."""

    row_warps: int
    key_warps: int
    warp_keys: int
    stages: int
    blocks: int

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 16 * self.row_warps

    @property
    def keys(self) -> int:
        """Keys of a block's step."""
        return self.key_warps * self.warp_keys

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.row_warps * self.key_warps

    def shared_memory(self, head_dim: int, head_dim_v: int, itemsize: int = 2) -> int:
        """Return ``DecodeShape::bytes``; head dims are padded ones, `itemsize` is the cache's."""
        pipeline = 2 * self.rows * head_dim
        pipeline += itemsize * self.stages * self.keys * (head_dim + head_dim_v)
        return max(pipeline, 4 * self.key_warps * self.rows * (2 + head_dim_v + 8))


def _shapes(rows: int, row_bytes: int) -> tuple[tuple[int, int, int], ...]:
    """Return (row_warps, key_warps, warp_keys) by preference, for the widest rows of a cache."""
    if rows <= 16:
        # Four pipelines that never wait for each other; where they do not fit, two.
        return (1, 4, 32 if row_bytes <= 128 else 16), (1, 2, 16)
    if rows <= 32:
        return (2, 2, 32 if row_bytes <= 256 else 16), (2, 1, 16)
    return ((4, 1, 32 if row_bytes <= 256 else 16),)


@lru_cache(maxsize=1024)
def choose_tile(
    rows: int, head_dim: int, head_dim_v: int, device: Device, itemsize: int = 2
) -> DecodeTile:
    """Return the first shape that fits the device, with as many stages as fit.

    `itemsize` is that of a cache's elements.

    Two blocks a multiprocessor where each has enough stages, since one then starts or ends while
    the other reads; else one.
    """
    limit = device.shared_memory_per_block_optin
    for shape in _shapes(rows, itemsize * max(head_dim, head_dim_v)):
        for blocks, least in ((2, _ENOUGH_STAGES), (1, 2)):
            room = (limit + _RESERVED) // blocks - _RESERVED
            for stages in range(_MOST_STAGES, least - 1, -1):
                tile = DecodeTile(*shape, stages, blocks)
                if tile.shared_memory(head_dim, head_dim_v, itemsize) <= room:
                    return tile
    raise UnsupportedError(
        f"head dims {head_dim} and {head_dim_v} need more shared memory than {device.name} has"
    )


@lru_cache(maxsize=4096)
def choose_splits(tasks: int, steps: int, multiprocessors: int, blocks: int) -> int:
    """Return into how many parts to cut the keys of each of `tasks` blocks' work.

    `steps` are those of the longest entry, `blocks` those that a multiprocessor runs at a time.
    Memory is the limit, and one block on each multiprocessor asks for all that it can give; the
    fewest parts of those that are done first.
    """

    def duration(splits: int) -> float:
        shares = -(-tasks * splits // multiprocessors)
        waves = -(-shares // blocks)
        combining = _COMBINE + _PART * splits if splits > 1 else 0
        return shares * -(-steps // splits) + waves * _START + combining

    return min(range(1, max(1, min(_MOST_SPLITS, steps)) + 1), key=duration)
