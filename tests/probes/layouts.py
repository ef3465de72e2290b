"""Where elements of wgmma's operands lie in shared memory: the PTX ISA's canonical layouts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ITEM = 2  # bytes
DEPTH = 16  # k of one product
MODES = {16: 0, 32: 3, 64: 2, 128: 1}  # bytes that are permuted (16: none) -> the descriptor's bits


class Layout(NamedTuple):
    """Of a matrix of `rows` (m or n) by 16 (k)."""

    swizzle: int  # bytes, 16: none
    by_rows: bool  # neighbours in memory run along m or n, not along k
    leading: int  # bytes
    stride: int
    start: int  # address

    def descriptor(self) -> int:
        fields = self.start >> 4, self.leading >> 4, self.stride >> 4
        return MODES[self.swizzle] << 62 | fields[2] << 32 | fields[1] << 16 | fields[0]

    def addresses(self, rows: int) -> np.ndarray:
        """Addresses of all elements, ``(rows, 16)``."""
        r, k = np.indices((rows, DEPTH))
        plain = self.swizzle == 16
        if self.by_rows:
            width = self.swizzle // ITEM
            far, eight = (self.stride, self.leading) if plain else (self.leading, self.stride)
            at = r % width * ITEM + r // width * far + k % 8 * self.swizzle + k // 8 * eight
        else:
            at = r % 8 * self.swizzle + r // 8 * self.stride
            at += k % 8 * ITEM + k // 8 * (self.leading if plain else 8 * ITEM)
        at += self.start
        return at ^ (at >> 7 & (self.swizzle // 16 - 1)) << 4


def draw_layout(
    rng: np.random.Generator, rows: int, by_rows: bool, base: int
) -> tuple[Layout, int]:
    """A layout with room between its parts, and the address after it; `base` is a multiple of 1024.

    Where k runs through neighbours, a product may start at any of the permuted 16 columns.
    """
    swizzle = int(rng.choice(list(MODES)))
    part = 8 * swizzle * int(rng.integers(1, 3))  # eight rows, or eight k, of the permuted bytes
    if by_rows:
        near, far = part, part * 2 * int(rng.integers(1, 3))
        count = -(-rows * ITEM // swizzle)
        leading, stride = (near, far) if swizzle == 16 else (far, near)
        return Layout(swizzle, True, leading, stride, base), base + count * far
    if swizzle == 16:
        return Layout(16, False, 128, 256, base), base + rows // 8 * 256
    start = base + 32 * int(rng.integers(swizzle // 32))
    return Layout(swizzle, False, 16, part, start), base + rows // 8 * part


def draw_product(
    rng: np.random.Generator, a_by_rows: bool, b_by_rows: bool
) -> tuple[np.ndarray, tuple[int, int], np.ndarray]:
    """An image of shared memory with two operands, their descriptors, and the right product."""
    a_layout, end = draw_layout(rng, 64, a_by_rows, 0)
    b_layout, end = draw_layout(rng, 128, b_by_rows, -(-end // 1024) * 1024)
    a, b = (rng.normal(size=(rows, DEPTH)).astype(np.float16) for rows in (64, 128))
    image = np.full(-(-end // 1024) * 1024 // ITEM, np.nan, np.float16)
    image[a_layout.addresses(64) // ITEM] = a
    image[b_layout.addresses(128) // ITEM] = b
    product = a.astype(np.float64) @ b.astype(np.float64).T
    return image, (a_layout.descriptor(), b_layout.descriptor()), product
