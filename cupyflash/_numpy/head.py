"""One query head of one entry: its tiles, and the way from q.k to scores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cupyflash._numpy.key_range import KeyRange, Tile
from cupyflash._numpy.mask import Mask
from cupyflash._numpy.philox import keep_mask
from cupyflash._numpy.score import Score
from cupyflash._numpy.sequence import Sequence
from cupyflash._problem import Array, Operands, Problem
from cupyflash.tiling import Tiling


class Head:
    """What the forward and the backward share about one query head."""

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        tiling: Tiling,
        sequence: Sequence,
        head: int,
    ) -> None:
        self.head = head
        self.sequence = sequence
        self.score = Score(problem, operands, sequence, head)
        self.sink = None if operands.sinks is None else float(operands.sinks[head])
        # Dropout multiplies what it keeps by this factor.
        self.keep_factor = 1 / (1 - problem.dropout_p)
        entry, head_kv = sequence.entry, head // problem.group_size
        self.query_scale = finite(
            problem.softmax_scale
            * factor(operands.query_descale, entry, head_kv)
            * factor(operands.key_descale, entry, head_kv),
            problem.accumulator_dtype,
        )
        self.value_scale = problem.value_scale * factor(operands.value_descale, entry, head_kv)
        self._dropout_p = problem.dropout_p
        self._seed = operands.seed
        self._key_range = KeyRange(problem, operands, tiling, sequence, head)
        self._mask = Mask(problem, operands, sequence, head)

    def query_spans(self) -> Iterator[tuple[int, int]]:
        """Rows ``(start, stop)`` of each row of tiles; they cover every query."""
        return self._key_range.query_spans()

    def tiles(self, query_start: int, query_stop: int) -> Iterator[tuple[Tile, Array | None]]:
        """Tiles in which these queries see a key, each with what the mask hides in it."""
        for tile in self._key_range.tiles(query_start, query_stop):
            hidden = self._mask.hidden(tile)
            if hidden is None or not hidden.all():
                yield tile, hidden

    def kept(self, tile: Tile) -> Array | None:
        """Which probabilities dropout keeps; None = all."""
        if self._dropout_p == 0:
            return None
        queries = np.arange(tile.query_start, tile.query_stop)
        keys = np.arange(tile.key_start, tile.key_stop)
        entry = self.sequence.entry
        return keep_mask(self._seed, entry, self.head, queries, keys, self._dropout_p)


def factor(descale: Array | None, entry: int, head_kv: int) -> float:
    """What the numbers of a head are to be multiplied by."""
    return 1.0 if descale is None else float(descale[entry if len(descale) > 1 else 0, head_kv])


def finite(scale: float, dtype: str) -> float:
    """The nearest finite number of `dtype`."""
    largest = float(np.finfo(dtype).max)
    return max(-largest, min(scale, largest))


def query_heads(problem: Problem, head_kv: int) -> range:
    """The query heads that share one key-value head."""
    return range(head_kv * problem.group_size, (head_kv + 1) * problem.group_size)
