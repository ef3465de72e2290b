"""`BlockMask`: which blocks of the score matrix take part."""

from __future__ import annotations

from typing import Any

from cupyflash._arrays import as_boolean, describe, place_of
from cupyflash._options import integer

__all__ = ["BlockMask"]


class BlockMask:
    """Block-sparse visibility: hidden blocks are neither read nor computed.

    Parameters
    ----------
    blocks : bool array, shape ``(b or 1, h or 1, ceil(sq / bq), ceil(sk / bk))``
        True = the block takes part.
    block_size : (int, int)
        ``(bq, bk)``: queries and keys of one block.
    mask : bool array broadcastable to ``(b, h, sq, sk)``, optional
        Element mask inside visible blocks, ANDed with the blocks (and with the call's ``mask=``).

    Raises
    ------
    TypeError
        `blocks` or `mask` is no bool array, or a block size no integer.
    ValueError
        `blocks` has not 4 axes, or a block size is below 1.
    """

    __slots__ = ("block_size", "blocks", "mask")

    def __init__(self, blocks: Any, block_size: tuple[int, int], mask: Any = None) -> None:
        self.blocks = as_boolean(blocks, "blocks")
        if self.blocks.ndim != 4:
            raise ValueError(
                "blocks must have 4 axes (b or 1, h or 1, ceil(sq/bq), ceil(sk/bk)), "
                f"got {describe(self.blocks)}"
            )
        self.block_size = _block_size(block_size)
        self.mask = None if mask is None else as_boolean(mask, "mask")

    @classmethod
    def from_mask(cls, mask: Any, block_size: tuple[int, int]) -> BlockMask:
        """Make the block mask of an element mask: a block is visible if any of its elements is.

        Parameters
        ----------
        mask : bool array, shape ``(..., sq, sk)`` with at most 4 axes
            True = takes part; the last two axes at full length.
        block_size : (int, int)
            ``(bq, bk)``.
        """
        mask = as_boolean(mask, "mask")
        if not 2 <= mask.ndim <= 4:
            raise ValueError(f"mask must have 2 to 4 axes (b, h, sq, sk), got {describe(mask)}")
        block_m, block_n = _block_size(block_size)
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        batch, heads, seqlen_q, seqlen_k = mask.shape
        rows, cols = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
        place = place_of(mask)
        with place.current():
            padded_shape = (batch, heads, rows * block_m, cols * block_n)
            padded = place.namespace.zeros(padded_shape, dtype=bool)
            padded[:, :, :seqlen_q, :seqlen_k] = mask
            blocks = padded.reshape(batch, heads, rows, block_m, cols, block_n).any(axis=(3, 5))
        return cls(blocks, (block_m, block_n), mask)

    def __repr__(self) -> str:
        element = "" if self.mask is None else ", with an element mask"
        return f"BlockMask({tuple(self.blocks.shape)} blocks of {self.block_size}{element})"


def _block_size(value: Any) -> tuple[int, int]:
    try:
        block_m, block_n = value
    except (TypeError, ValueError):
        raise ValueError(f"block_size must be (bq, bk), got {value!r}") from None
    sizes = integer(block_m, "block_size"), integer(block_n, "block_size")
    if min(sizes) < 1:
        raise ValueError(f"block_size must be >= 1 on both sides, got {value!r}")
    return sizes
