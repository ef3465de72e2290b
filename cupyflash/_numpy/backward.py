"""FlashAttention backward in NumPy (FlashAttention-2, arXiv 2307.08691, Algorithm 2).

The loops are exchanged against the paper: query tiles outside, key tiles inside, as in the
forward. On a GPU the order decides which sums stay on the chip; here all of them are ordinary
memory, and one key range serves both passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyflash._numpy.head import Head, query_heads
from cupyflash._numpy.mask import without_unseen
from cupyflash._numpy.online_softmax import probabilities
from cupyflash._numpy.rows import AccumulatorRows, Scratch
from cupyflash._numpy.sequence import Sequence, sequences, tail_start
from cupyflash._numpy.tiles import default_tiling
from cupyflash._problem import Array, GradientBuffers, Operands, Problem
from cupyflash.tiling import Tiling


def backward(
    problem: Problem,
    operands: Operands,
    tiling: Tiling | None,
    out: Array,
    row_max: Array,
    row_sum: Array,
    grad_out: Array,
    grad_lse: Array | None,
    gradients: GradientBuffers,
    deterministic: bool,
) -> None:
    """Write all gradients.

    Parameters
    ----------
    tiling : Tiling or None
        None = `default_tiling`.
    out, row_max, row_sum : arrays
        What the forward wrote.
    grad_out, grad_lse : arrays of the shapes of out and row_max
        grad_lse may be None.
    gradients : GradientBuffers
        Every element is written.
    deterministic : bool
        Without effect: the order of all sums is fixed.
    """
    dtype = problem.accumulator_dtype
    tiling = tiling or default_tiling(problem)
    given = _Given(operands.query, out, row_max, row_sum, grad_out, grad_lse)
    grad_sinks = np.zeros(problem.num_heads, dtype)
    scratch = Scratch(dtype)
    _clear(problem, operands, gradients)
    with np.errstate(all="ignore"):
        for sequence in sequences(problem, operands):
            for head_kv in range(problem.num_heads_kv):
                keys = _KeySide.of(problem, operands, sequence, head_kv)
                for number in query_heads(problem, head_kv):
                    head = Head(problem, operands, tiling, sequence, number)
                    grad_query = sequence.queries(gradients.dq, number)
                    for span in head.query_spans():
                        queries = given.query_side(head, slice(*span), dtype)
                        queries.query *= problem.softmax_scale
                        _visit(head, span, queries, keys, gradients, scratch)
                        grad_query[slice(*span)] = queries.grad_query * problem.softmax_scale
                        grad_sinks[number] += _grad_sink(head.sink, queries)
                sequence.keys(gradients.dk, head_kv)[...] = keys.grad_key
                sequence.keys(gradients.dv, head_kv)[...] = keys.grad_value
        if gradients.dsinks is not None:
            if problem.varlen and grad_lse is not None:
                # Behind the last entry a sink is all that a row has, and lse is the sink itself.
                grad_sinks += grad_lse[:, tail_start(operands.cu_seqlens_q) :].sum(axis=1)
            gradients.dsinks[...] = grad_sinks


@dataclass
class _QuerySide:
    """One row of tiles, in the accumulator's dtype."""

    query: Array  # (rows, d), times softmax_scale
    grad_out: Array  # (rows, dv)
    delta: Array  # (rows, 1): rowsum(grad_out * out) - grad_lse
    row_max: Array  # (rows, 1)
    row_sum: Array  # (rows, 1)
    grad_query: Array  # (rows, d), the sum so far, without softmax_scale


@dataclass
class _KeySide:
    """One key-value head; its gradients are summed over the query heads of the group."""

    key: AccumulatorRows  # (sk, d)
    value: AccumulatorRows  # (sk, dv)
    grad_key: Array  # (sk, d), the sum so far
    grad_value: Array  # (sk, dv)

    @classmethod
    def of(cls, problem: Problem, operands: Operands, sequence: Sequence, head_kv: int) -> _KeySide:
        dtype = problem.accumulator_dtype
        return cls(
            AccumulatorRows(sequence.keys(operands.key, head_kv), dtype),
            AccumulatorRows(sequence.keys(operands.value, head_kv), dtype),
            np.zeros((sequence.seqlen_k, problem.head_dim), dtype),
            np.zeros((sequence.seqlen_k, problem.head_dim_v), dtype),
        )


@dataclass(frozen=True)
class _Given:
    """The arrays that have a row for each query."""

    query: Array
    out: Array
    row_max: Array
    row_sum: Array
    grad_out: Array
    grad_lse: Array | None

    def query_side(self, head: Head, rows: slice, dtype: str) -> _QuerySide:
        sequence, number = head.sequence, head.head
        query = sequence.queries(self.query, number)[rows].astype(dtype)
        out = sequence.queries(self.out, number)[rows].astype(dtype)
        grad_out = sequence.queries(self.grad_out, number)[rows].astype(dtype)
        # Rows without keys have out = 0, and what grad_out holds there must not count.
        products = np.multiply(grad_out, out, out=np.zeros_like(out), where=out != 0)
        delta = np.add.reduce(products, axis=1, keepdims=True)
        if self.grad_lse is not None:
            delta -= sequence.statistics(self.grad_lse, number)[rows, None]
        row_max = sequence.statistics(self.row_max, number)[rows, None]
        row_sum = sequence.statistics(self.row_sum, number)[rows, None]
        return _QuerySide(query, grad_out, delta, row_max, row_sum, np.zeros_like(query))


def _visit(
    head: Head,
    span: tuple[int, int],
    queries: _QuerySide,
    keys: _KeySide,
    gradients: GradientBuffers,
    scratch: Scratch,
) -> None:
    """Add what one row of tiles contributes to every gradient."""
    for tile, hidden in head.tiles(*span):
        scores = scratch.tile("scores", tile.shape)
        np.matmul(queries.query, keys.key[tile.keys].T, out=scores)
        trace = head.score.forward(scores, tile, hidden, keep_trace=True)
        probabilities(scores, queries.row_max, queries.row_sum)

        query = without_unseen(queries.query, trace.hidden, axis=0)
        grad_out = without_unseen(queries.grad_out, trace.hidden, axis=0)
        key = without_unseen(keys.key[tile.keys], trace.hidden, axis=1)
        value = without_unseen(keys.value[tile.keys], trace.hidden, axis=1)
        grad_scores = scratch.tile("grad_scores", tile.shape)
        np.matmul(grad_out, value.T, out=grad_scores)
        dropped = scores
        kept = head.kept(tile)
        if kept is not None:
            weight = np.where(kept, scores.dtype.type(head.keep_factor), 0)
            dropped = scores * weight
            grad_scores *= weight
        _add_product(keys.grad_value[tile.keys], dropped.T, grad_out, scratch)

        # dS = P * (dP - D), and then back through the steps from q.k to the score
        grad_scores -= queries.delta
        grad_scores *= scores
        head.score.backward(grad_scores, tile, trace, gradients)
        _add_product(queries.grad_query, grad_scores, key, scratch)
        _add_product(keys.grad_key[tile.keys], grad_scores.T, query, scratch)


def _add_product(total: Array, left: Array, right: Array, scratch: Scratch) -> None:
    product = scratch.tile("product", total.shape)
    np.matmul(left, right, out=product)
    total += product


def _grad_sink(sink: float | None, queries: _QuerySide) -> Array | float:
    """The sink is a score without a value: dS = P * (0 - D)."""
    if sink is None:
        return 0.0
    probability = np.full_like(queries.row_max, sink)
    probabilities(probability, queries.row_max, queries.row_sum)
    return -np.multiply(
        probability, queries.delta, out=np.zeros_like(probability), where=probability != 0
    ).sum()


def _clear(problem: Problem, operands: Operands, gradients: GradientBuffers) -> None:
    """Zero what is summed in place, and the rows that belong to no entry."""
    if gradients.dbias is not None:
        gradients.dbias[...] = 0
    for grad_param in (gradients.dscore_params or {}).values():
        grad_param[...] = 0
    if problem.varlen:
        gradients.dq[tail_start(operands.cu_seqlens_q) :] = 0
        gradients.dk[tail_start(operands.cu_seqlens_k) :] = 0
        gradients.dv[tail_start(operands.cu_seqlens_k) :] = 0
