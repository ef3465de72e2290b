"""The rotation by which `quantize_fp8` spreads outliers over a whole head."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

Array = Any


@cache
def rotation(width: int) -> Array:
    """Return the orthogonal matrix R, ``(width, width)`` in float64, of ``x @ R``.

    ``R = D H / sqrt(width)`` for a power of two: H is Sylvester's Hadamard matrix, D a diagonal of
    signs. Other widths take two such steps: D, then H of the largest power of two n that fits, on
    the first n columns and then on the last n. These overlap, so every element spreads over n or
    more.
    ``R @ R.T`` is the identity: the inverse of ``y = x @ R`` is ``x = y @ R.T``, and products of
    rows stay what they are.
    """
    size = 1 << (width.bit_length() - 1)
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    block /= np.sqrt(size)
    matrix = np.eye(width)
    for first in sorted({0, width - size}):
        matrix *= _signs(width)
        columns = slice(first, first + size)
        matrix[:, columns] = matrix[:, columns] @ block
    matrix.flags.writeable = False
    return matrix


def _signs(count: int) -> Array:
    """The Rudin-Shapiro sequence: its Hadamard transform is flat.

    So a vector of equal numbers, which H alone would gather in one place, is spread as well.
    """
    return np.array([1 - 2 * ((i & i >> 1).bit_count() & 1) for i in range(count)], float)
