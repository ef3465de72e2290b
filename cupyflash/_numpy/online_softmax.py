"""The running softmax of FlashAttention-2; the only file that knows rows without keys.

Such a row keeps ``row_max = -inf`` and ``row_sum = 0``. Inside exponents, and only there, 0
stands in for the -inf, so that ``-inf - row_max`` never becomes NaN.
"""

from __future__ import annotations

import numpy as np

from cupyflash._problem import Array


class OnlineSoftmax:
    """Running maximum and sum ``(rows, 1)`` of one row of tiles (FlashAttention-2, Algorithm 1).

    A sink is a score that is seen first and has no value.
    """

    def __init__(self, rows: int, dtype: str, sink: float | None) -> None:
        self.row_max = np.full((rows, 1), -np.inf if sink is None else sink, dtype)
        self.row_sum = (self.row_max > -np.inf).astype(dtype)

    def update(self, scores: Array) -> Array:
        """Turn scores into ``exp(scores - row_max)`` in place.

        Returns the factor ``(rows, 1)`` by which everything summed so far must shrink.
        """
        row_max = np.maximum(self.row_max, np.maximum.reduce(scores, axis=1, keepdims=True))
        shift = _shift(row_max)
        scores -= shift
        np.exp(scores, out=scores)
        correction: Array = np.exp(self.row_max - shift)
        self.row_sum *= correction
        self.row_sum += np.add.reduce(scores, axis=1, keepdims=True)
        self.row_max = row_max
        return correction

    def normaliser(self) -> Array:
        """``1 / row_sum``, and 0 for rows without keys."""
        return _normaliser(self.row_sum)


def probabilities(scores: Array, row_max: Array, row_sum: Array) -> None:
    """Turn scores into ``exp(scores - row_max) / row_sum`` in place, from saved statistics."""
    scores -= _shift(row_max)
    np.exp(scores, out=scores)
    scores *= _normaliser(row_sum)


def _shift(row_max: Array) -> Array:
    return np.where(row_max == -np.inf, row_max.dtype.type(0), row_max)


def _normaliser(row_sum: Array) -> Array:
    return np.divide(1, row_sum, out=np.zeros_like(row_sum), where=row_sum != 0)
