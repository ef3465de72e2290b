"""Where the cache keeps the token at a position: in an entry's own rows, or in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._arrays import HOST, Place, describe, place_of
from cupyflash._kvcache.entries import Entries, index_array

Array = Any


@dataclass(frozen=True)
class Storage:
    """The caches ``(blocks, block_size, hk, width)`` and how entries find their blocks in them.

    A block is the whole cache of an entry or a page.
    """

    key: Array
    value: Array
    capacity: int  # of an entry
    # (b, blocks of an entry), on the host or in q's place; None = entry e's is e
    blocks: Array | None
    paged: bool = False  # blocks are pages

    def locate(self, positions: Array, xp: Any) -> tuple[Array, Array, Array]:
        """Return block, row in it, and whether both exist, for positions ``(b, n)``.

        Block and row are clamped to the cache, whatever the position.
        """
        num_blocks, block_size = self.key.shape[:2]
        entry = xp.arange(positions.shape[0])[:, None]
        inside = (positions >= 0) & (positions < self.capacity)
        positions = positions.clip(0, max(self.capacity - 1, 0))
        if self.blocks is None:
            return xp.broadcast_to(entry, positions.shape), positions, inside
        found = xp.asarray(self.blocks)[entry, positions // block_size]
        inside &= (found >= 0) & (found < num_blocks)
        return found.clip(0, max(num_blocks - 1, 0)), positions % block_size, inside


def bind_storage(
    key: Array, value: Array, cache_batch_idx: Any, page_table: Any, batch: int, place: Place
) -> Storage:
    """Check what says where the entries of the batch are."""
    num_blocks, block_size = key.shape[:2]
    if page_table is None and cache_batch_idx is None:
        if batch > num_blocks:
            raise ValueError(
                f"q has batch {batch}, but k_cache has {num_blocks} entries ({describe(key)}); "
                "cache_batch_idx lets queries share them"
            )
        return Storage(key, value, block_size, None)
    if page_table is None:
        blocks = index_array(cache_batch_idx, "cache_batch_idx", place)
        if blocks.shape != (batch,):
            raise ValueError(
                f"cache_batch_idx must have shape (b,) = ({batch},), got {describe(blocks)}"
            )
        if place_of(blocks) == HOST and ((blocks < 0) | (blocks >= num_blocks)).any():
            raise ValueError(
                f"cache_batch_idx must hold entries of the cache, from 0 to {num_blocks - 1}, "
                f"got {blocks}"
            )
        return Storage(key, value, block_size if num_blocks else 0, blocks[:, None])
    if cache_batch_idx is not None:
        raise ValueError(
            "cache_batch_idx and page_table exclude each other: order the rows of page_table"
        )
    blocks = index_array(page_table, "page_table", place)
    if blocks.ndim != 2 or blocks.shape[0] != batch:
        raise ValueError(
            f"page_table must have shape (b, max_pages) with b = {batch}, got {describe(blocks)}"
        )
    if block_size == 0:
        raise ValueError(f"k_cache has pages of no tokens: {describe(key)}")
    capacity = blocks.shape[1] * block_size if num_blocks else 0
    return Storage(key, value, capacity, blocks, paged=True)


def require_pages(storage: Storage, entries: Entries) -> None:
    """Check on the host that every page which is read or written exists; others may be anything."""
    blocks, (num_pages, page_size) = storage.blocks, storage.key.shape[:2]
    if blocks is None or entries.longest == 0:
        return
    if place_of(blocks) != HOST or not entries.on_host:
        return
    first = np.minimum(entries.begin, entries.used) // page_size
    stop = -(-entries.end // page_size)
    column = np.arange(blocks.shape[1])
    needed = (column >= first[:, None]) & (column < stop[:, None])
    wrong = needed & ((blocks < 0) | (blocks >= num_pages))
    if wrong.any():
        entry, page = map(int, np.argwhere(wrong)[0])
        raise ValueError(
            f"page_table[{entry}, {page}] is {blocks[entry, page]}, but k_cache has pages "
            f"0 to {num_pages - 1}"
        )
