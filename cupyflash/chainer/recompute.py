"""Second derivatives: dense attention in Chainer's own functions, differentiated by Chainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

from cupyflash._numpy.philox import keep_mask
from cupyflash._problem import Operands, Problem
from cupyflash.errors import UnsupportedError
from cupyflash.state import SavedState

Array = Any
Variable = Any


def gradients_of_gradients(
    saved: SavedState,
    extras: Sequence[str],
    inputs: Sequence[Variable],
    grad_outputs: Sequence[Variable | None],
) -> list[Variable | None]:
    """Differentiate attention's gradients.

    Parameters
    ----------
    saved : SavedState
        Of the forward call.
    extras : sequence of str
        Names of the inputs after q, k, v.
    inputs : sequence of Variable
        q, k, v, the extras, and the gradient of out.
    grad_outputs : sequence of Variable or None
        Gradients of the gradients of q, k, v and the extras.

    Returns
    -------
    list of Variable or None
        Gradients of `inputs`.
    """
    with chainer.force_backprop_mode():
        # Inputs may depend on one another further up; their twins do not.
        twins = [F.identity(x) if x.requires_grad else chainer.Variable(x.array) for x in inputs]
        *arguments, grad_out = twins
        out = dense_attention(
            saved, *arguments[:3], **dict(zip(extras, arguments[3:], strict=True))
        )
        first = chainer.grad([out], arguments, [grad_out], enable_double_backprop=True)
        asked = [(g, gg) for g, gg in zip(first, grad_outputs, strict=True) if gg is not None]
    gradients, upstream = zip(*asked, strict=True)
    again = chainer.config.enable_backprop
    second: list[Variable | None] = chainer.grad(
        gradients, twins, upstream, enable_double_backprop=again
    )
    return second


def dense_attention(
    saved: SavedState,
    q: Variable,
    k: Variable,
    v: Variable,
    bias: Variable | None = None,
    sinks: Variable | None = None,
) -> Variable:
    """Repeat a saved call on variables, every (b, h, sq, sk) matrix in full."""
    problem, operands, layout = saved._call.problem, saved._call.operands, saved._call.layout
    if operands.score_mod is not None:
        raise UnsupportedError(
            'double_backward="recompute" does not go with score_mod, whose second derivative is '
            "not known; express it as a bias"
        )
    dtype = q.dtype
    q, k, v = (_heads_first(F.cast(x, problem.accumulator_dtype), layout) for x in (q, k, v))
    k, v = (F.repeat(x, problem.group_size, axis=1) for x in (k, v))

    scores = F.matmul(q, k, transb=True) * problem.softmax_scale
    if problem.softcap is not None:
        scores = problem.softcap * F.tanh(scores / problem.softcap)
    visible = _visible(problem, operands, q.xp)
    if bias is not None:
        bias = F.reshape(F.cast(bias, scores.dtype), (1,) * (4 - bias.ndim) + bias.shape)
        visible = visible & (bias.array != -np.inf)
        finite = F.where(bias.array != -np.inf, bias, q.xp.zeros_like(bias.array))
        scores += F.broadcast_to(finite, scores.shape)
    if operands.alibi_slopes is not None:
        slopes = operands.alibi_slopes[:, :, None, None]
        scores += q.xp.broadcast_to(-slopes * abs(_distance(problem, q.xp)), scores.shape).astype(
            scores.dtype
        )

    prob = _softmax(scores, q.xp.broadcast_to(visible, scores.shape), sinks)
    if problem.dropout_p:
        prob *= q.xp.asarray(_kept(problem, operands.seed), prob.dtype)
    out = F.cast(F.matmul(prob, v), dtype)
    out = out if layout.heads_first else F.transpose(out, (0, 2, 1, 3))
    return F.squeeze(out, axis=0) if layout.unbatched else out


def _heads_first(x: Variable, layout: Any) -> Variable:
    x = F.expand_dims(x, 0) if layout.unbatched else x
    return x if layout.heads_first else F.transpose(x, (0, 2, 1, 3))


def _softmax(scores: Variable, visible: Array, sinks: Variable | None) -> Variable:
    """Softmax over visible keys; rows that see none are 0."""
    xp = scores.xp
    hidden = xp.full((*scores.shape[:-1], 1), -np.inf, scores.dtype)  # also: a maximum of nothing
    if sinks is not None:
        sinks = F.broadcast_to(F.cast(sinks, scores.dtype)[None, :, None, None], hidden.shape)
        hidden = sinks.array
    row_max = xp.concatenate([xp.where(visible, scores.array, -np.inf), hidden], axis=-1)
    row_max = row_max.max(axis=-1, keepdims=True)
    row_max = xp.where(row_max == -np.inf, 0, row_max)
    highest = xp.broadcast_to(row_max, scores.shape)
    weight = F.exp(F.where(visible, scores, highest) - highest) * visible.astype(scores.dtype)
    row_sum = F.sum(weight, axis=-1, keepdims=True)
    if sinks is not None:
        row_sum += F.exp(sinks - row_max)
    return weight / F.broadcast_to(row_sum + (row_sum.array == 0), weight.shape)


def _distance(problem: Problem, xp: Any) -> Array:
    """How far each key lies behind its query's diagonal, ``(sq, sk)``."""
    diagonal = problem.diagonal(problem.seqlen_q, problem.seqlen_k)
    return xp.arange(problem.seqlen_k) - xp.arange(problem.seqlen_q)[:, None] - diagonal


def _visible(problem: Problem, operands: Operands, xp: Any) -> Array:
    distance = _distance(problem, xp)
    visible = xp.ones(distance.shape, bool)
    if problem.window_left is not None:
        visible &= distance >= -problem.window_left
    if problem.window_right is not None:
        visible &= distance <= problem.window_right
    visible = visible[None, None]
    if operands.mask is not None:
        visible = visible & operands.mask
    if operands.block_mask is not None:
        rows, cols = operands.block_mask.block_size
        blocks = xp.repeat(xp.repeat(operands.block_mask.blocks, rows, axis=2), cols, axis=3)
        visible = visible & blocks[:, :, : problem.seqlen_q, : problem.seqlen_k]
        if operands.block_mask.mask is not None:
            visible = visible & operands.block_mask.mask
    return visible


def _kept(problem: Problem, seed: Any) -> Array:
    """Factors of dropout, ``(b, h, sq, sk)``: 0, or 1 / (1 - dropout_p). On the host."""
    rows, cols = np.arange(problem.seqlen_q), np.arange(problem.seqlen_k)
    kept = [
        [keep_mask(seed, b, h, rows, cols, problem.dropout_p) for h in range(problem.num_heads)]
        for b in range(problem.batch)
    ]
    return np.array(kept) / (1 - problem.dropout_p)
