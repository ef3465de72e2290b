"""Tile sizes of the wgmma engine's backward: which ones there are, and why.

A consumer warpgroup owns 64 keys: dK and dV of them stay in its registers, 240 a thread where there
are two consumers, beside the scores and their gradients for all queries of a tile. The wider the
query tile, the fewer bytes of shared memory a product reads: what 64 keys by n queries read grows
with 64 + n, and what they compute with 64 * n.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupyflash._cuda.warpgroup import (
    BARRIER_BYTES,
    PANEL_ALIGNMENT,
    ROWS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
    round_up,
)

__all__ = [
    "BACKWARD_TILES",
    "BANDED_BACKWARD_TILES",
    "DETERMINISTIC_BACKWARD_TILES",
    "QUERY_WIDTHS",
    "WgmmaBackwardTile",
    "bucket_backward",
]

_ITEMSIZE = 2
_FLOAT32_BYTES = 4  # of dq until it is complete, and of P from one role to the other
_PANEL = 64  # columns that lie together in shared memory
_STATISTICS_BYTES = 8  # of a query
_SCORE_TILES = 2  # of dS in shared memory
# dK, dV, scores, their gradients and, with these, P and dS or a part of dQ, of a thread, by number
# of consumers; beyond, the assembler lets products wait for each other (C7512).
_MAX_REGISTERS = {1: 224, 2: 224, 3: 144}

_WIDTHS = (64, 96, 128, 192, 256)  # of dK and dV for which there is an instruction
QUERY_WIDTHS = (64, 128)  # of a tile of scores
_SUM_WIDTHS = (64, 128)  # of a consumer's part of dq


@dataclass(frozen=True)
class WgmmaBackwardTile:
    """Queries, keys; query tiles and tiles of grad_out in flight; whether P is rounded at once.

    If it is, it takes registers beside the scores until dS is formed. With `roles` two warpgroups
    share 64 keys: one makes dV, the other dK. With `direct` dQ is added from registers. If
    `persistent`, blocks stay: while one ends a key tile, what is in flight is the next one's. With
    `whole_heads` a block takes all key tiles of a head: nobody else adds to its dQ, which is
    neither cleared beforehand nor converted afterwards. `most_queries`: that pass by a key tile,
    for the tile to be preferred to those after it in a table; 0: any number.
    """

    block_m: int
    block_n: int
    stages: int
    grad_out_stages: int
    early: bool
    roles: bool = False
    direct: bool = False
    persistent: bool = False
    whole_heads: bool = False
    most_queries: int = 0

    @property
    def consumers(self) -> int:
        """Warpgroups that compute; one more loads, and adds to dq."""
        return 2 if self.roles else self.block_n // ROWS

    @property
    def threads(self) -> int:
        return WARPGROUP_THREADS * (1 + self.consumers)

    @property
    def warps(self) -> int:
        return WARPGROUP_WARPS * (1 + self.consumers)

    def shared_memory(self, head_dim: int, head_dim_v: int) -> int:
        """Return ``WgmmaBackwardShape::bytes``; head dims are padded ones here and below."""
        statistics = self.stages * _STATISTICS_BYTES * self.block_m
        first = round_up(BARRIER_BYTES + 4 * self.threads + statistics, PANEL_ALIGNMENT)
        query, value = round_up(head_dim, _PANEL), round_up(head_dim_v, _PANEL)
        columns = self.block_n * (query + value)
        columns += self.block_m * (self.stages * query + self.grad_out_stages * value)
        score_tiles = 1 if self.roles else _SCORE_TILES
        columns += score_tiles * self.block_n * round_up(self.block_m, _PANEL)
        handed = self.block_m * self.block_n * self.roles
        sums = 0 if self.direct else self.block_m * (2 * _PANEL if self.roles else query)
        return first + _ITEMSIZE * columns + _FLOAT32_BYTES * (handed + sums)

    def complaint(self, head_dim: int, head_dim_v: int) -> str | None:
        """Return the rule that this tile breaks, if it breaks one."""
        if self.block_n not in (ROWS, 2 * ROWS, 3 * ROWS):
            return f"block_n must be {ROWS}, {2 * ROWS} or {3 * ROWS}"
        if self.block_m not in QUERY_WIDTHS:
            return f"block_m must be one of {', '.join(map(str, QUERY_WIDTHS))}"
        if self.stages not in (2, 3, 4) or self.grad_out_stages not in (1, 2, 3, 4):
            return "stages must be 2, 3 or 4, and those of grad_out 1 to 4"
        if self.whole_heads and not (self.persistent and self.direct):
            return "whole heads need blocks that stay, and dQ added from registers"
        if self.roles:
            both = self.block_m == self.block_n == ROWS and self.early
            return None if both else f"roles need {ROWS} queries and keys, and P rounded at once"
        row_parts = self.block_m // ROWS
        if self.consumers % row_parts:
            return f"{self.consumers} warpgroups cannot share dq of {self.block_m} queries"
        col_parts = self.consumers // row_parts
        if round_up(head_dim, _PANEL) not in [width * col_parts for width in _SUM_WIDTHS]:
            return f"{col_parts} warpgroups cannot share dq of {head_dim} columns"
        beside_scores = self.block_m // 2 if self.early else 0
        of_sums = round_up(head_dim, _PANEL) // col_parts // 2
        registers = (head_dim + head_dim_v) // 2 + self.block_m + max(beside_scores, of_sums)
        if registers > _MAX_REGISTERS[self.consumers]:
            return f"a thread would need {registers} registers for its tiles"
        return None


def bucket_backward(head_dim: int) -> int:
    """Return a head dim padded to a width for which there is an instruction."""
    return next(width for width in _WIDTHS if width >= head_dim)


# At 256 columns dK and dV fill the registers; else for softcap, whose P is gone when it is rounded
# late, and for a dq of 64 columns beside a wider dv.
_ROLES = WgmmaBackwardTile(64, 64, 2, 1, True, True)  # 219 KB at 256
# dK and dV leave room for twice as many queries, not for rounding P at once. 196 KB.
_NARROW = WgmmaBackwardTile(128, 128, 2, 2, False)
_NARROW_HEADS = replace(_NARROW, direct=True, persistent=True, whole_heads=True)
# 195 KB at 128. In long calls with a band one stage of grad_out is faster.
_MEDIUM = WgmmaBackwardTile(64, 128, 2, 2, True)
_MEDIUM_HEADS = replace(_MEDIUM, direct=True, persistent=True, whole_heads=True, most_queries=512)
_MEDIUM_FULL = (_MEDIUM, _ROLES)
_MEDIUM_BANDED = (
    _MEDIUM_HEADS,
    replace(_MEDIUM, persistent=True, most_queries=4096),
    replace(_MEDIUM, grad_out_stages=1),
    _ROLES,
)
_WIDE = replace(_ROLES, persistent=True)
_WIDE_FULL = (_WIDE,)
_WIDE_BANDED = (replace(_ROLES, most_queries=512), _WIDE)
# Larger padded head dim -> tiles by preference; the first that fits and whose limits are kept is
# taken. Those of 96 and 192 are their neighbours': not timed. Figures: kernels/TUNING.md.
#
# Blocks that stay save the start and the end of each; in long calls they lose more, perhaps by the
# order of their key tiles. Whole heads save what stands around the main kernel, until the sums of
# all heads under way leave the L2 cache.
BACKWARD_TILES: dict[int, tuple[WgmmaBackwardTile, ...]] = {
    64: (
        replace(_NARROW_HEADS, most_queries=512),
        replace(_NARROW, persistent=True, most_queries=2048),
        _NARROW,
        _ROLES,
    ),
    96: _MEDIUM_FULL,
    128: _MEDIUM_FULL,
    192: _WIDE_FULL,
    256: _WIDE_FULL,
}
# Causal or with a window.
BANDED_BACKWARD_TILES: dict[int, tuple[WgmmaBackwardTile, ...]] = {
    64: (
        replace(_NARROW_HEADS, most_queries=1024),
        replace(_NARROW, persistent=True, most_queries=4096),
        _NARROW,
        _ROLES,
    ),
    96: _MEDIUM_BANDED,
    128: _MEDIUM_BANDED,
    192: _WIDE_BANDED,
    256: _WIDE_BANDED,
}
# Before those, where dq is to be the same bits in every run: whole heads need no turns, and may be
# slower than blocks that do not take any.
DETERMINISTIC_BACKWARD_TILES: dict[int, tuple[WgmmaBackwardTile, ...]] = {
    64: (replace(_NARROW_HEADS, most_queries=1024),),
    96: (_MEDIUM_HEADS,),
    128: (_MEDIUM_HEADS,),
}
