"""Tile sizes of the mma engine: which ones there are, and why.

A warp multiplies 16-row pieces by 8-column pieces. What bounds it, in this order: shared-memory
reads (a warp tile of m by n reads m + n rows for m * n products, so 32 rows a warp where the sums
fit into 255 registers), fixed latencies (two warps a scheduler, from two blocks where their memory
fits, so that one waits at a barrier while the other computes), shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BACKWARD_TILES",
    "FORWARD_TILES",
    "STAGES",
    "TURNS",
    "LeastKeys",
    "MmaBackwardTile",
    "MmaForwardTile",
    "Turns",
    "bucket",
]

STAGES = 2  # tiles of what passes by in shared memory
_ITEMSIZE = 2
_MAX_WARPS = 8
_MAX_SUM_REGISTERS = 128  # of one lane
_MAX_SCORES = 2048  # of one warp in the forward, half as many in the backward

HEAD_DIM_STEP = 32  # four 16-byte chunks, the least that the permutation in shared memory needs


@dataclass(frozen=True)
class MmaForwardTile:
    """Queries, keys, warps; 16-column steps of Q kept in registers; blocks a multiprocessor.

    With `turns`, two groups of warps multiply in turns.
    """

    block_m: int
    block_n: int
    warps: int
    kept_steps: int
    blocks: int
    turns: bool = False

    def shared_memory(self, head_dim: int, head_dim_v: int, bias_itemsize: int = 0) -> int:
        """Return ``MmaForwardShape::bytes``; head dims are padded ones here and below."""
        query = self.block_m * max(head_dim, head_dim_v)
        bias = STAGES * bias_itemsize * self.block_m * _bias_columns(self.block_n)
        return _ITEMSIZE * (query + STAGES * self.block_n * (head_dim + head_dim_v)) + bias

    def complaint(self, head_dim: int, head_dim_v: int) -> str | None:
        """Return the rule that this tile breaks, if it breaks one."""
        if not 1 <= self.warps <= _MAX_WARPS:
            return f"warps must be 1 to {_MAX_WARPS}"
        if self.block_m < 1 or self.block_m % (16 * self.warps):
            return f"block_m must be a positive multiple of {16 * self.warps}"
        if self.turns and self.warps != _MAX_WARPS:
            return f"turns are for {_MAX_WARPS} warps"
        if self.block_n < 32 or self.block_n % 16:  # two steps of P V: P(n) is ready in halves
            return "block_n must be a multiple of 16, at least 32"
        if _too_few_to_load(self.warps, head_dim, head_dim_v):
            return "one warp cannot load rows of 64 columns"
        rows = self.block_m // self.warps
        if rows * head_dim_v // 32 > _MAX_SUM_REGISTERS or rows * self.block_n > _MAX_SCORES:
            return f"{rows} rows of a warp take too many registers"
        return None


@dataclass(frozen=True)
class LeastKeys:
    """From how many keys a query on a tile is the faster one; None: never."""

    full: int | None
    banded: int | None  # causal, or with a window


@dataclass(frozen=True)
class Turns:
    """A tile whose warps multiply in turns, and the calls that it is for.

    `plain` are those whose scores are products alone, but for a band.
    """

    tile: MmaForwardTile
    plain: LeastKeys
    softcap: LeastKeys
    others: LeastKeys


@dataclass(frozen=True)
class MmaBackwardTile:
    """Queries, keys, warps along the keys and along the queries; blocks a multiprocessor."""

    block_m: int
    block_n: int
    key_warps: int
    query_warps: int
    blocks: int

    def shared_memory(self, head_dim: int, head_dim_v: int, bias_itemsize: int = 0) -> int:
        """Return ``MmaBackwardShape::bytes``."""
        operands = (self.block_n + STAGES * self.block_m) * (head_dim + head_dim_v)
        scores = 2 * self.block_m * self.block_n
        statistics = STAGES * 12 * self.block_m
        bias = STAGES * bias_itemsize * self.block_m * _bias_columns(self.block_n)
        return _ITEMSIZE * (operands + scores) + statistics + bias

    def complaint(self, head_dim: int, head_dim_v: int) -> str | None:
        """Return the rule that this tile breaks, if it breaks one."""
        warps, sharing = self.key_warps * self.query_warps, self.query_warps
        if warps not in (1, 2, 4, 8):
            return "warps must be 1, 2, 4 or 8"
        if _too_few_to_load(warps, head_dim, head_dim_v):
            return "one warp cannot load rows of 64 columns"
        if self.block_n < 1 or self.block_n % (16 * self.key_warps):
            return f"block_n must be a positive multiple of {16 * self.key_warps}"
        if self.block_m < 1 or self.block_m % max(32, 16 * sharing):
            return f"block_m must be a positive multiple of {max(32, 16 * sharing)}"
        if head_dim % (16 * sharing) or head_dim_v % (16 * sharing):
            return f"head dims must be multiples of {16 * sharing}"
        if self.block_m * self._dim_warps(head_dim) % (16 * warps):
            return f"its warps cannot share dq of {self.block_m} by {head_dim}"
        keys = self.block_n // self.key_warps
        if keys * (head_dim + head_dim_v) // sharing // 32 > _MAX_SUM_REGISTERS:
            return f"sums would take more than {_MAX_SUM_REGISTERS} registers a thread"
        if keys * self.block_m // sharing > _MAX_SCORES // 2:
            return f"{keys} keys of a warp take too many registers"
        return None

    def _dim_warps(self, head_dim: int) -> int:
        """Return ``MmaBackwardShape::dim_warps``."""
        total = warps = self.key_warps * self.query_warps
        while warps > 1 and (
            head_dim % (16 * warps) or self.block_m * warps * warps > head_dim * total
        ):
            warps //= 2
        return warps


def _too_few_to_load(warps: int, *head_dims: int) -> bool:
    """Whether `SwizzledLoader` has too few threads: 8 rows at a time, 8 chunks of each."""
    return warps == 1 and any(head_dim % 64 == 0 for head_dim in head_dims)


def _bias_columns(block_n: int) -> int:
    """Return ``BiasTile::Storage::cols``, in elements."""
    return -(-block_n // 32) * 32


def bucket(head_dim: int) -> int:
    """Return head_dim padded to what the kernels are compiled for."""
    return -(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP


# Larger padded head dim -> tiles by preference; the first that fits the device is taken.
FORWARD_TILES: dict[int, tuple[MmaForwardTile, ...]] = {
    # 32 rows a warp; two sets of scores are alive, hence no more than 32 keys.
    32: (MmaForwardTile(128, 32, 4, 2, 2),),
    64: (MmaForwardTile(128, 32, 4, 4, 2),),
    # No registers left for Q.
    96: (MmaForwardTile(128, 32, 4, 0, 2),),
    128: (MmaForwardTile(128, 32, 4, 0, 2),),
    # 16 rows a warp: the output takes 80 to 128 registers of a thread.
    160: (MmaForwardTile(64, 32, 4, 6, 2),),
    192: (MmaForwardTile(64, 32, 4, 6, 2),),
    224: (MmaForwardTile(64, 32, 4, 6, 2),),
    256: (MmaForwardTile(64, 32, 4, 10, 2),),
}

_NEVER = LeastKeys(None, None)
_SOON = LeastKeys(512, 2048)
_LATE = LeastKeys(2048, 2048)
_WIDE = Turns(MmaForwardTile(128, 64, 8, 0, 1, True), _SOON, _SOON, _SOON)

# Larger padded head dim -> turns, by preference. One block a multiprocessor, so that its first
# loads and its last stores are hidden by nobody: for long calls. What a score takes beside the
# products is hidden better: softcap's calls are 12 % faster at head dim 128, where plain ones are
# not. Above 128, tiles are twice as large as those above.
TURNS: dict[int, tuple[Turns, ...]] = {
    64: (Turns(MmaForwardTile(256, 64, 8, 2, 1, True), LeastKeys(4096, 16384), _NEVER, _NEVER),),
    128: (Turns(MmaForwardTile(256, 32, 8, 0, 1, True), _NEVER, _SOON, LeastKeys(1024, 8192)),),
    160: (_WIDE,),
    192: (_WIDE,),
    # 48 keys leave no spills, 64 none of 512 keys over.
    256: (Turns(MmaForwardTile(128, 48, 8, 0, 1, True), _LATE, _LATE, _LATE), _WIDE),
}

_SMALL = MmaBackwardTile(32, 128, 4, 1, 2)  # 32 keys a warp: dk and dv take all free registers
_MEDIUM = (
    # Pairs of warps share 32 keys, half of the columns of dk and dv each. 163 KiB.
    MmaBackwardTile(64, 128, 4, 2, 1),
    # 99 KiB: 16 keys a warp, all columns.
    MmaBackwardTile(32, 64, 4, 1, 1),
)
_LARGE = (
    MmaBackwardTile(64, 64, 2, 4, 1),  # 227 KiB; needs whole 64 columns
    MmaBackwardTile(64, 64, 4, 2, 1),
    MmaBackwardTile(32, 64, 4, 2, 1),  # 163 KiB
    MmaBackwardTile(32, 32, 2, 2, 1),  # 99 KiB
    MmaBackwardTile(32, 16, 1, 2, 1),
)
BACKWARD_TILES: dict[int, tuple[MmaBackwardTile, ...]] = {
    32: (_SMALL,),
    64: (_SMALL,),
    96: _MEDIUM,
    128: _MEDIUM,
    160: _LARGE,
    192: _LARGE,
    224: _LARGE,
    256: _LARGE,
}
