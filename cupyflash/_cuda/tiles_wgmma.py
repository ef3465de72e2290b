"""Tile sizes of the wgmma engine: which ones there are, and why.

A consumer warpgroup multiplies 64 queries by all keys of a tile. Its scores, the probabilities of
the tile before and the output are in registers: 240 a thread where there are two consumers, 160 for
three, 112 for four. Key and value tiles take turns in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from cupyflash._cuda.warpgroup import (
    BARRIER_BYTES,
    PANEL_ALIGNMENT,
    PANEL_BYTES,
    ROWS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
    round_up,
)

__all__ = [
    "BANDED_TILES",
    "BIAS_TILES",
    "FLOAT8_BANDED_TILES",
    "FLOAT8_TILES",
    "FORWARD_TILES",
    "KEY_WIDTHS",
    "WgmmaTile",
    "bucket",
    "bucket_v",
]

# Scores, probabilities, output and Q of a thread, by number of consumers; beyond, values spill.
_MAX_REGISTERS = {1: 204, 2: 204, 3: 128, 4: 92}
_MAX_REGISTERS_APART = {1: 204, 2: 204, 3: 144}  # at 144 a few words do, and it is faster still

# Keys of a tile for which there is an instruction in arch/wgmma_*.cuh, with Q in shared memory.
KEY_WIDTHS = (64, 80, 112, 128)
_KEY_WIDTHS_WITH_KEPT_QUERIES = (64, 128)
_FLOAT8_KEY_WIDTHS = (96, 128, 192)
_MAX_FLOAT8_CONSUMERS = 3  # warps that transpose leave too few registers for four
_VALUE_WIDTHS = (64, 96, 128, 192, 256)
_VALUE_WIDTHS_WITH_SHARED_PROBABILITIES = (64, 128)


@dataclass(frozen=True)
class WgmmaTile:
    """Queries, keys, tiles in flight; whether Q stays in registers.

    `query_tiles` are in shared memory. With `turns` warpgroups issue products one after the other,
    else as they come; `joined`: those of two query tiles overlap. `eager`: exponentials do not wait
    for the maxima. `shared_probabilities`: P is in shared memory too. `staged`: columns of out that
    pass shared memory at a time, for the copy engine to write; 0: lanes write for themselves.
    `least_keys`: of a sequence, for the tile to be preferred to those after it in a table.
    `itemsize` is that of q, k and v, and `sums_by_tile` FP8's: the sums of each key tile are formed
    on their own and added in float32, as the tensor cores keep only some 14 bits of them. `apart`:
    a warpgroup has one product after the other, and no exponentials beside them, so that scores and
    the sums of a tile take the same registers. `bias_stages`: tiles of a bias in shared memory, for
    calls that have one.
    """

    block_m: int
    block_n: int
    stages: int
    query_in_registers: bool
    query_tiles: int = 1
    turns: bool = True
    eager: bool = False
    staged: int = 0
    least_keys: int = 0
    itemsize: int = 2
    sums_by_tile: bool = False
    shared_probabilities: bool = False
    joined: bool = True
    apart: bool = False
    bias_stages: int = 0

    @property
    def consumers(self) -> int:
        """Warpgroups that compute; one more loads."""
        return self.block_m // ROWS

    @property
    def threads(self) -> int:
        return WARPGROUP_THREADS * (1 + self.consumers)

    @property
    def warps(self) -> int:
        return WARPGROUP_WARPS * (1 + self.consumers)

    def shared_memory(self, head_dim: int, head_dim_v: int) -> int:
        """Return ``WgmmaForwardShape::bytes``; head dims are padded ones here and below."""
        first = round_up(BARRIER_BYTES + 4 * self.threads, PANEL_ALIGNMENT)
        panel = PANEL_BYTES // self.itemsize
        query, value = round_up(head_dim, panel), round_up(head_dim_v, panel)
        queries = self.query_tiles * self.block_m * query
        keys_and_values = self.block_n * (query + value)
        if self.itemsize == 1:  # transposed values
            keys_and_values += head_dim_v * round_up(self.block_n, panel)
        staged = round_up(self.staged_columns(head_dim_v), PANEL_BYTES // 2)
        rows_of_out = 0 if self.shared_probabilities else self.block_m * 2 * staged
        probabilities = self.shared_probabilities * self.block_m * round_up(self.block_n, panel)
        bias = self.bias_stages * self.block_m * round_up(self.block_n, panel)
        tiles = queries + self.stages * keys_and_values + probabilities + bias
        return first + self.itemsize * tiles + rows_of_out

    def staged_columns(self, head_dim_v: int) -> int:
        """Return how many columns of out pass shared memory at a time."""
        if self.staged >= head_dim_v:
            return head_dim_v
        columns = gcd(self.staged, head_dim_v)
        return columns if columns % (PANEL_BYTES // 2) == 0 and self.staged else 0

    def complaint(self, head_dim: int, head_dim_v: int) -> str | None:
        """Return the rule that this tile breaks, if it breaks one."""
        if self.block_m not in range(ROWS, 5 * ROWS, ROWS):
            return f"block_m must be {ROWS}, {2 * ROWS}, {3 * ROWS} or {4 * ROWS}"
        widths: tuple[int, ...] = KEY_WIDTHS
        if self.query_in_registers:
            widths = _KEY_WIDTHS_WITH_KEPT_QUERIES
        if self.itemsize == 1:
            if self.consumers > _MAX_FLOAT8_CONSUMERS:
                return f"FP8 takes up to {ROWS * _MAX_FLOAT8_CONSUMERS} queries"
            widths = _FLOAT8_KEY_WIDTHS
        if self.block_n not in widths:
            return f"block_n must be one of {', '.join(map(str, widths))}"
        if self.apart and not (self.itemsize == 1 and self.sums_by_tile):
            return "products are apart only where each key tile has sums of its own"
        if self.stages not in (2, 3, 4):
            return "stages must be 2, 3 or 4"
        if self.bias_stages not in (0, 1, 2) or (self.bias_stages and self.itemsize == 1):
            return "a bias, of 16-bit calls, has 1 or 2 stages"
        if self.shared_probabilities:
            if self.query_in_registers:
                return "P is in shared memory only beside Q"
            if head_dim_v not in _VALUE_WIDTHS_WITH_SHARED_PROBABILITIES:
                return "with P in shared memory head_dim_v must be up to 64, or 97 to 128"
            if 2 * self.staged_columns(head_dim_v) > self.itemsize * round_up(
                self.block_n, PANEL_BYTES // self.itemsize
            ):
                return "out takes the place of P in shared memory, which must be as wide"
        scores, sums = self.block_n // 2, head_dim_v // 2
        registers = 0 if self.shared_probabilities else self.block_n * self.itemsize // 8
        if self.apart:
            registers = sums + max(scores, sums + registers)
        else:
            registers += scores + sums * (1 + self.sums_by_tile)
        if self.query_in_registers:
            registers += head_dim * self.itemsize // 8
        limits = _MAX_REGISTERS_APART if self.apart else _MAX_REGISTERS
        if registers > limits[self.consumers]:
            return f"a thread would need {registers} registers for its tiles"
        return None


def bucket(head_dim: int) -> int:
    """Return the head_dim of q and k padded to what the kernels are compiled for."""
    return round_up(head_dim, 32)


def bucket_v(head_dim_v: int) -> int:
    """Return the head_dim of v and out likewise, for which there is an instruction."""
    return next(width for width in _VALUE_WIDTHS if width >= head_dim_v)


# Exponentials cost as much as products: three warpgroups overlap them best.
_NARROW_LONG = WgmmaTile(192, 128, 2, False, eager=True, staged=64, least_keys=8192)
# Four, each with half as many keys, waste less where sequences end, and the next Q is there.
_NARROW_SHORT = WgmmaTile(256, 64, 3, False, query_tiles=2, staged=64)
# For lengths that waste rows of both.
_NARROW_LAST = WgmmaTile(128, 128, 2, True, staged=64)
_NARROW = (_NARROW_LONG, _NARROW_SHORT, _NARROW_LAST)
# Products are the limit. Q in registers saves a third of the reads of shared memory.
_MEDIUM_SHORT = WgmmaTile(128, 128, 2, True, staged=128)
_MEDIUM = (replace(_MEDIUM_SHORT, eager=True, least_keys=1024), _MEDIUM_SHORT)
_96 = (
    WgmmaTile(192, 80, 2, False, staged=96, least_keys=4096),
    *(replace(tile, staged=96) for tile in _MEDIUM),
)
# Three warpgroups keep the tensor cores busiest. They fit if P is in shared memory, and no state of
# two query tiles, or of exponentials ahead of the maxima, is kept.
_MEDIUM_LONG = WgmmaTile(
    192, 128, 2, False, staged=128, shared_probabilities=True, joined=False, least_keys=2048
)
# The output takes 128 registers of a thread, and Q 64 KB of shared memory.
_WIDEST = (WgmmaTile(128, 64, 2, False, staged=128),)
# Larger padded head dim -> tiles by preference: `plan_wgmma` takes the first that wastes few rows.
FORWARD_TILES: dict[int, tuple[WgmmaTile, ...]] = {
    32: _NARROW,
    64: _NARROW,
    96: _96,
    128: (_MEDIUM_LONG, *_MEDIUM),
    # 218 KiB of shared memory.
    160: (WgmmaTile(128, 112, 2, False),),
    192: (WgmmaTile(128, 112, 2, False),),
    224: _WIDEST,
    256: _WIDEST,
}
# Causal or with a window, where that is faster: warpgroups have different numbers of key tiles, and
# none waits for the others; fewer key tiles go by before the next query tile.
_NARROW_BANDS = (_NARROW_LONG, replace(_NARROW_SHORT, turns=False, eager=True), _NARROW_LAST)
_MEDIUM_BANDS = (replace(_MEDIUM_LONG, least_keys=4096), *_MEDIUM)
BANDED_TILES: dict[int, tuple[WgmmaTile, ...]] = {
    **dict.fromkeys((32, 64), _NARROW_BANDS),
    128: _MEDIUM_BANDS,
}

# With a bias, two of whose tiles take a seventh of shared memory or more. Three warpgroups overlap
# the arithmetic with scores best; joined, they would spill. The other is for lengths that waste
# rows.
_NARROW_BIAS = (
    WgmmaTile(192, 128, 2, False, staged=64, joined=False, bias_stages=2),
    WgmmaTile(128, 128, 2, True, staged=64, bias_stages=2),
)
# Shared memory is the limit: Q in registers saves a ninth of its traffic. Out has no room there.
_MEDIUM_BIAS = (WgmmaTile(128, 128, 2, True, bias_stages=2),)
# 64 keys: of 80, the bias's tile would be as large as of 128.
_WIDE_BIAS = (WgmmaTile(128, 64, 2, False, staged=192, bias_stages=2),)
_WIDEST_BIAS = (WgmmaTile(128, 64, 2, False, bias_stages=2),)
BIAS_TILES: dict[int, tuple[WgmmaTile, ...]] = {
    **dict.fromkeys((32, 64), _NARROW_BIAS),
    **dict.fromkeys((96, 128), _MEDIUM_BIAS),
    **dict.fromkeys((160, 192), _WIDE_BIAS),
    **dict.fromkeys((224, 256), _WIDEST_BIAS),
}

# Three warpgroups, which overlap one another: faster than two that overlap on their own, and than
# P in shared memory, as a group waits for each product anyway.
_FLOAT8_APART = WgmmaTile(
    192, 128, 2, True, staged=64, itemsize=1, sums_by_tile=True, joined=False, apart=True,
    least_keys=512,
)  # fmt: skip
# The wider a step, the fewer waits for products. With more dims registers are short: at once, or
# with softcap.
_FLOAT8_APART_LONG = replace(_FLOAT8_APART, block_n=192, query_in_registers=False, least_keys=1536)
_FLOAT8_NARROW = (
    _FLOAT8_APART_LONG,
    _FLOAT8_APART,
    WgmmaTile(192, 96, 2, False, staged=64, itemsize=1, sums_by_tile=True),
    WgmmaTile(128, 128, 2, True, staged=64, itemsize=1, sums_by_tile=True),
)
# P in shared memory leaves registers for 128 keys beside sums by tile; the last is for widths of v
# for which it cannot be there.
_FLOAT8_MEDIUM = (
    replace(_FLOAT8_APART, query_in_registers=False),
    WgmmaTile(
        128, 128, 2, False, staged=64, itemsize=1, sums_by_tile=True, shared_probabilities=True
    ),
    WgmmaTile(128, 96, 2, True, staged=128, itemsize=1, sums_by_tile=True),
)
_FLOAT8_WIDE = WgmmaTile(128, 128, 2, False, turns=False, staged=64, itemsize=1)
_FLOAT8_WIDEST = replace(_FLOAT8_WIDE, block_n=96)
# FP8: V is in shared memory twice, as it came and transposed. Sums by tile take as many registers
# as the output, for which wide heads have no room.
FLOAT8_TILES: dict[int, tuple[WgmmaTile, ...]] = {
    **dict.fromkeys((32, 64), _FLOAT8_NARROW),
    96: _FLOAT8_MEDIUM[::2],
    128: _FLOAT8_MEDIUM,
    **dict.fromkeys((160, 192), (_FLOAT8_WIDE,)),
    **dict.fromkeys(
        (224, 256),
        (replace(_FLOAT8_WIDEST, least_keys=8192), replace(_FLOAT8_WIDEST, turns=True)),
    ),
}
# The same with a band, where that is faster: without turns none waits for others that have more key
# tiles.
FLOAT8_BANDED_TILES: dict[int, tuple[WgmmaTile, ...]] = {
    128: (
        replace(_FLOAT8_MEDIUM[0], least_keys=2048),
        replace(_FLOAT8_MEDIUM[0], turns=False),
        *_FLOAT8_MEDIUM[1:],
    ),
    **dict.fromkeys((224, 256), (_FLOAT8_WIDEST,)),
}
