"""`BlockMask`: which blocks of the score matrix take part."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["BlockMask"]


class BlockMask:
    """Block-sparse visibility: hidden blocks are neither read nor computed.

    Parameters
    ----------
    blocks : bool array ``(b or 1, h or 1, ceil(sq / bq), ceil(sk / bk))``
        True = the block takes part.
    block_size : (int, int)
        ``(bq, bk)``: queries and keys of a block.
    mask : bool array broadcastable to ``(b, h, sq, sk)``, optional
        Element mask inside visible blocks, ANDed with the blocks (and with the call's ``mask``).
    """

    __slots__ = ("block_size", "blocks", "mask")

    def __init__(self, blocks: Any, block_size: tuple[int, int], mask: Any = None) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.mask = mask

    @classmethod
    def from_mask(cls, mask: Any, block_size: tuple[int, int]) -> BlockMask:
        raise NotImplementedError
