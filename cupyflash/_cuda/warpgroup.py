"""What all tiles of the wgmma engine are made of: warpgroups, and panels in shared memory."""

from __future__ import annotations

__all__ = [
    "BARRIER_BYTES",
    "PANEL_ALIGNMENT",
    "PANEL_BYTES",
    "ROWS",
    "WARPGROUP_THREADS",
    "WARPGROUP_WARPS",
    "WARP_ROWS",
    "WARP_THREADS",
    "round_up",
]

ROWS = 64  # of a warpgroup in a product
WARPGROUP_THREADS = 128
WARPGROUP_WARPS = 4
WARP_ROWS = ROWS // WARPGROUP_WARPS
WARP_THREADS = WARPGROUP_THREADS // WARPGROUP_WARPS
BARRIER_BYTES = 512  # at the start of shared memory
PANEL_BYTES = 128  # of a row, that lie together
PANEL_ALIGNMENT = 1024


def round_up(number: int, step: int) -> int:
    """Return the least multiple of `step` that is no less than `number`."""
    return -(-number // step) * step
