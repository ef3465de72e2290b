"""Lengths and offsets of the entries of a batch: the only file that knows fixed from varlen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupyflash._problem import Array, Operands, Problem


@dataclass(frozen=True)
class Sequence:
    """One entry of the batch, and where its rows lie in the arrays of the call."""

    entry: int
    varlen: bool
    query_start: int
    seqlen_q: int
    key_start: int
    seqlen_k: int
    diagonal: int  # the key index that windows and ALiBi place under query 0

    def queries(self, array: Array, head: int) -> Array:
        """Rows ``(seqlen_q, dim)`` of one head of a query-like array."""
        rows = array if self.varlen else array[self.entry]
        return rows[self.query_start : self.query_start + self.seqlen_q, head]

    def keys(self, array: Array, head: int) -> Array:
        """Rows ``(seqlen_k, dim)`` of one head of a key-like array."""
        rows = array if self.varlen else array[self.entry]
        return rows[self.key_start : self.key_start + self.seqlen_k, head]

    def statistics(self, array: Array, head: int) -> Array:
        """Row statistics ``(seqlen_q,)`` of one head."""
        rows = array if self.varlen else array[self.entry]
        return rows[head, self.query_start : self.query_start + self.seqlen_q]


def sequences(problem: Problem, operands: Operands) -> Iterator[Sequence]:
    """The entries of the batch in order."""
    if not problem.varlen:
        seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
        diagonal = problem.diagonal(seqlen_q, seqlen_k)
        for entry in range(problem.batch):
            yield Sequence(entry, False, 0, seqlen_q, 0, seqlen_k, diagonal)
        return
    ends_q, ends_k = _offsets(operands.cu_seqlens_q), _offsets(operands.cu_seqlens_k)
    for entry in range(problem.batch):
        query_start, key_start = ends_q[entry], ends_k[entry]
        seqlen_q, seqlen_k = ends_q[entry + 1] - query_start, ends_k[entry + 1] - key_start
        diagonal = problem.diagonal(seqlen_q, seqlen_k)
        yield Sequence(entry, True, query_start, seqlen_q, key_start, seqlen_k, diagonal)


def tail_start(cu_seqlens: Array | None) -> int:
    """The first row of a varlen array that belongs to no entry."""
    return _offsets(cu_seqlens)[-1]


def _offsets(cu_seqlens: Array | None) -> list[int]:
    assert cu_seqlens is not None
    offsets: list[int] = cu_seqlens.tolist()
    return offsets
