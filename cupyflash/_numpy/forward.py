"""FlashAttention forward in NumPy (FlashAttention-2, arXiv 2307.08691, Algorithm 1)."""

from __future__ import annotations

import numpy as np

from cupyflash._numpy.head import Head, query_heads
from cupyflash._numpy.mask import without_unseen
from cupyflash._numpy.online_softmax import OnlineSoftmax
from cupyflash._numpy.rows import AccumulatorRows, Scratch
from cupyflash._numpy.sequence import sequences, tail_start
from cupyflash._numpy.tiles import default_tiling
from cupyflash._problem import Array, Operands, Problem
from cupyflash.tiling import Tiling


def forward(
    problem: Problem,
    operands: Operands,
    tiling: Tiling | None,
    out: Array,
    row_max: Array,
    row_sum: Array,
) -> None:
    """Write the output and the softmax statistics.

    Parameters
    ----------
    tiling : Tiling or None
        None = `default_tiling`.
    out : array ``(b, sq, h, dv)`` (varlen: ``(total_q, h, dv)``) of any strides
    row_max, row_sum : arrays ``(b, h, sq)`` (varlen: ``(h, total_q)``) of the accumulator's dtype
        Largest final score m of each row, and the sum of ``exp(score - m)``.
    """
    dtype = problem.accumulator_dtype
    tiling = tiling or default_tiling(problem)
    scratch = Scratch(dtype)
    with np.errstate(all="ignore"):
        for sequence in sequences(problem, operands):
            for head_kv in range(problem.num_heads_kv):
                key = AccumulatorRows(sequence.keys(operands.key, head_kv), dtype)
                value = AccumulatorRows(sequence.keys(operands.value, head_kv), dtype)
                for number in query_heads(problem, head_kv):
                    head = Head(problem, operands, tiling, sequence, number)
                    query = sequence.queries(operands.query, number)
                    head_out = sequence.queries(out, number)
                    head_max = sequence.statistics(row_max, number)
                    head_sum = sequence.statistics(row_sum, number)
                    for span in head.query_spans():
                        rows = slice(*span)
                        query_tile = query[rows].astype(dtype)
                        query_tile *= head.query_scale
                        accumulator, softmax = _attend(
                            head, span, query_tile, key, value, scratch, problem.head_dim_v
                        )
                        accumulator *= softmax.normaliser() * (head.keep_factor * head.value_scale)
                        head_out[rows] = accumulator
                        head_max[rows] = softmax.row_max[:, 0]
                        head_sum[rows] = softmax.row_sum[:, 0]
        if problem.varlen:
            tail = tail_start(operands.cu_seqlens_q)
            sinks = operands.sinks
            out[tail:] = 0
            row_max[:, tail:] = -np.inf if sinks is None else sinks[:, None]
            row_sum[:, tail:] = row_max[:, tail:] > -np.inf


def _attend(
    head: Head,
    span: tuple[int, int],
    query: Array,
    key: AccumulatorRows,
    value: AccumulatorRows,
    scratch: Scratch,
    head_dim_v: int,
) -> tuple[Array, OnlineSoftmax]:
    """The sum of ``exp(s - row_max) * value`` over all keys of a row of tiles."""
    softmax = OnlineSoftmax(len(query), query.dtype.name, head.sink)
    accumulator = np.zeros((len(query), head_dim_v), query.dtype)
    product = scratch.tile("product", accumulator.shape)
    for tile, hidden in head.tiles(*span):
        scores = scratch.tile("scores", tile.shape)
        np.matmul(query, key[tile.keys].T, out=scores)
        hidden = head.score.forward(scores, tile, hidden).hidden
        accumulator *= softmax.update(scores)
        kept = head.kept(tile)
        if kept is not None:
            scores *= kept  # the factor 1 / (1 - dropout_p) follows with the normaliser
        np.matmul(scores, without_unseen(value[tile.keys], hidden, axis=1), out=product)
        accumulator += product
    return accumulator, softmax
