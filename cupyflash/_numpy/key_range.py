"""Which tiles of the score matrix to visit, and which of them the window cuts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cupyflash._numpy.broadcast import plane
from cupyflash._numpy.sequence import Sequence
from cupyflash._problem import Array, Operands, Problem
from cupyflash.tiling import Tiling


class Tile(NamedTuple):
    """A rectangle of the score matrix of one entry and head."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    windowed: bool  # some of its scores may lie outside the window

    @property
    def shape(self) -> tuple[int, int]:
        return self.query_stop - self.query_start, self.key_stop - self.key_start

    @property
    def queries(self) -> slice:
        return slice(self.query_start, self.query_stop)

    @property
    def keys(self) -> slice:
        return slice(self.key_start, self.key_stop)

    @property
    def query_index(self) -> Array:
        """Query positions inside the entry, ``(rows, 1)``."""
        return np.arange(self.query_start, self.query_stop)[:, None]

    @property
    def key_index(self) -> Array:
        """Key positions inside the entry, ``(1, cols)``."""
        return np.arange(self.key_start, self.key_stop)[None, :]


class KeyRange:
    """The visible part of one head's score matrix, cut into tiles.

    A tile never spans blocks of different visibility. Inside a run of visible keys the tiles that
    the window leaves whole form a section of their own, which no mask touches.
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        tiling: Tiling,
        sequence: Sequence,
        head: int,
    ) -> None:
        self._tiling = tiling
        self._sequence = sequence
        self._left, self._right = window_bounds(problem, sequence)
        self._blocks: Array | None = None
        self._block_size = (max(sequence.seqlen_q, 1), max(sequence.seqlen_k, 1))
        if operands.block_mask is not None:
            self._blocks = plane(operands.block_mask.blocks, sequence.entry, head)
            self._block_size = operands.block_mask.block_size

    def query_spans(self) -> Iterator[tuple[int, int]]:
        """Rows ``(start, stop)`` of each row of tiles; they cover every query."""
        block = self._block_size[0]
        for block_start in range(0, self._sequence.seqlen_q, block):
            block_stop = min(block_start + block, self._sequence.seqlen_q)
            for start in range(block_start, block_stop, self._tiling.block_m):
                yield start, min(start + self._tiling.block_m, block_stop)

    def tiles(self, query_start: int, query_stop: int) -> Iterator[Tile]:
        """The tiles that these queries see, in the order of the keys."""
        first, last = (
            query_start + self._sequence.diagonal,
            query_stop - 1 + self._sequence.diagonal,
        )
        # Keys that some query of the span sees, and keys that all of them see.
        some = first - self._left, last + self._right + 1
        every = last - self._left, first + self._right + 1
        if every[0] >= every[1]:
            every = some[1], some[1]
        for run_start, run_stop in self._visible_runs(query_start):
            start, stop = max(run_start, some[0]), min(run_stop, some[1])
            whole_start = min(max(start, every[0]), stop)
            whole_stop = max(whole_start, min(stop, every[1]))
            if whole_stop < stop:  # a last short tile joins the section that is masked anyway
                whole_stop -= (whole_stop - whole_start) % self._tiling.block_n
            sections = (
                (start, whole_start, True),
                (whole_start, whole_stop, False),
                (whole_stop, stop, True),
            )
            for section_start, section_stop, windowed in sections:
                for key_start in range(section_start, section_stop, self._tiling.block_n):
                    key_stop = min(key_start + self._tiling.block_n, section_stop)
                    yield Tile(query_start, query_stop, key_start, key_stop, windowed)

    def _visible_runs(self, query_start: int) -> Iterator[tuple[int, int]]:
        """Runs of keys in neighbouring visible blocks."""
        seqlen_k = self._sequence.seqlen_k
        if self._blocks is None:
            yield 0, seqlen_k
            return
        block_m, block_n = self._block_size
        visible = np.zeros(-(-seqlen_k // block_n) + 2, np.int8)
        visible[1:-1] = self._blocks[query_start // block_m]
        edges = np.flatnonzero(np.diff(visible)).tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield start * block_n, min(stop * block_n, seqlen_k)


def window_bounds(problem: Problem, sequence: Sequence) -> tuple[int, int]:
    """The window ``(left, right)`` with numbers for open sides, none larger than it matters."""
    open_side = sequence.seqlen_q + sequence.seqlen_k
    left, right = problem.window_left, problem.window_right
    return (
        open_side if left is None else min(left, open_side),
        open_side if right is None else min(right, open_side),
    )
