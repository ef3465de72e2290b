"""How far rounding may carry each result: standard deviations, carried through to first order.

A number x that is rounded to nearest is off by eps / sqrt(12) * |x| in the root mean square, each
time by something else: the squares of such errors add up, and a sum of n terms rounds n partial
sums. Every step of reference.py is rounded in the engines too, whatever their order of sums and
tiles. Two things they do otherwise than the dense formula: D comes from the stored, rounded output,
not from P and dP, whose errors would partly cancel in P * (dP - D); and the backward recomputes P.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.tolerance import EPSILON

Array = Any

# Four standard deviations, and the sizes of what is rounded are rather too large throughout.
UNIT = 4 / 12**0.5
# The most that is granted to P, relative to it: where scores are so large that rounding says
# nothing of P, it must not allow everything.
CAP = 2.0**-7
# Tensor-core engines take tanh itself for larger softcaps.
LARGEST_CANCELLED = 64.0


def deviations(dtype: str, steps: dict[str, Any]) -> dict[str, float]:
    """Four standard deviations of each result of one call, the largest of each array.

    Of ``dscores`` all are returned, for sums of them: the squares are to be summed likewise.

    Parameters
    ----------
    dtype : str
        The inputs'. Engines compute in float32, or in float64 if that is it.
    steps : dict
        The local variables of `reference.attention`, in a wide type: (b, h, sq, ...), or
        (b, h, sk, ...) for keys. ``passed`` are the numbers that a score passes through, from q.k
        on.
    """
    s = SimpleNamespace(**steps)
    s.storing = UNIT * EPSILON[dtype]
    s.rounding = UNIT * EPSILON["float64" if dtype == "float64" else "float32"]
    with np.errstate(all="ignore"):  # of hidden scores
        off = _forward(s)
        if s.dout is not None:
            off |= _backward(s)
    kept = {"dscores": off.pop("dscores")} if "dscores" in off else {}
    return kept | {name: float(x.max()) if x.size else 0.0 for name, x in off.items()}


def _forward(s: SimpleNamespace) -> dict[str, Array]:
    xp, seen = s.xp, s.prob > 0
    s.product_off = s.rounding * _lengths(xp, s.query, s.key)
    if s.turned:
        s.product_off += s.storing * _rss(xp, s.query, s.key.swapaxes(2, 3))
    s.product_off *= abs(s.scale)
    passed = sum(map(abs, s.passed))
    if s.softcap:  # less 2 softcap / (1 + exp): cancels, but for large ones, to an ulp of softcap
        passed = passed + min(s.softcap, LARGEST_CANCELLED)
    score_off = (s.product_off * s.slope + s.rounding * passed) * abs(s.factor)
    score_off = xp.where(seen, score_off + s.rounding * abs(s.score[..., :-1]), 0)
    # The exponential is off by its argument's error, and by two ulps of its own.
    argument = s.rounding * (abs(s.finite_max)[..., None] + 4)
    s.relative = xp.where(seen, xp.minimum(score_off + argument, CAP), 0)
    # The product with V takes P in the inputs' dtype.
    s.weight = s.prob * s.kept
    s.weight_off = s.weight * xp.hypot(s.relative, s.storing)
    keys = s.prob.shape[3]
    row_off = xp.sqrt(((s.prob * s.relative) ** 2).sum(axis=3)) + s.rounding * keys**0.5
    s.out_off = _rss(xp, s.weight_off, s.value) + _summing(s, s.weight, s.value)
    s.out_off += abs(s.out) * row_off[..., None]
    max_off = xp.concatenate([score_off, 0 * s.prob_sink[..., None]], axis=3).max(axis=3)
    known = abs(xp.where(s.lse == -np.inf, 0, s.lse))
    return {
        "out": s.out_off,
        "row_max": max_off,
        "row_sum": s.row_sum * (row_off + xp.minimum(max_off, CAP)),
        "lse": row_off + s.rounding * (abs(s.finite_max) + known),
    }


def _backward(s: SimpleNamespace) -> dict[str, Array]:
    xp, rounding = s.xp, s.rounding
    stored = xp.hypot(s.out_off, s.storing * s.out)
    delta_off = xp.sqrt(((s.dout * stored) ** 2).sum(axis=3)) + rounding * abs(s.delta)
    delta_off += rounding * xp.sqrt(s.out.shape[3] * ((s.dout * s.out) ** 2).sum(axis=3))
    # dS of each key is off by itself, and by what D brings to all keys of a query.
    own = (s.prob * rounding * s.kept * _lengths(xp, s.dout, s.value)) ** 2
    own = xp.sqrt(own + s.dscores**2 * (s.relative**2 + s.storing**2))
    shared = s.prob * delta_off[..., None]
    # The part of D is not independent from key to key; (sum P x)**2 <= sum P x**2, for any x.
    off = {"dscores": xp.hypot(own, xp.sqrt(s.prob) * delta_off[..., None])}
    own, shared = own * abs(s.factor), shared * abs(s.factor)
    if s.score_mod is not None:  # whose derivative depends on the score
        own += abs(s.dscores) * s.relative * (1 + abs(s.factor))
    if s.bias is not None:
        off["dbias"] = _of_bias(s, own, shared)
    if s.sinks is not None:
        terms = s.prob_sink * s.delta
        sink_off = xp.minimum(rounding * (2 * abs(s.finite_max) + 4), CAP)
        terms_off = xp.hypot(s.prob_sink * delta_off, terms * sink_off)
        terms_off = xp.hypot(terms_off, rounding * (terms[:, 0].size) ** 0.5 * terms)
        off["dsinks"] = xp.sqrt((terms_off**2).sum(axis=(0, 2)))

    # slope = 1 - tanh**2 bends with the score, and is off by an ulp of 1.
    bend = 2 * s.slope / s.softcap * s.product_off + 2 * rounding if s.softcap else 0.0
    own, shared = own * s.slope + abs(s.dadded) * bend, shared * s.slope
    both, dproduct, weight = (
        x.swapaxes(2, 3) for x in (xp.hypot(own, shared), s.dproduct, s.weight)
    )
    dq = _rss(xp, own, s.key) + abs(shared @ s.key) + _summing(s, s.dproduct, s.key)
    dk = _rss(xp, both, s.query) + _summing(s, dproduct, s.query)
    dv = _rss(xp, s.weight_off.swapaxes(2, 3), s.dout) + _summing(s, weight, s.dout)

    def of_keys(x: Array) -> Array:  # summed over the heads of each group
        heads = x.reshape(x.shape[0], s.heads_kv, s.group, *x.shape[2:])
        return xp.sqrt((heads**2).sum(axis=2))

    scale = abs(s.scale)
    return off | {"dq": scale * dq, "dk": scale * of_keys(dk), "dv": of_keys(dv)}


def _of_bias(s: SimpleNamespace, own: Array, shared: Array) -> Array:
    spread = (1,) * (4 - s.bias.ndim) + s.bias.shape
    axes = tuple(axis for axis in range(4) if spread[axis] == 1)
    count = np.prod([own.shape[axis] for axis in axes])
    own = own**2 + s.rounding**2 * count * s.dadded**2
    if 3 in axes:  # the parts of D's error are not independent of one another
        own, shared = (x.sum(axis=3, keepdims=True) for x in (own, shared))
    return s.xp.sqrt((own + shared**2).sum(axis=axes))


def _lengths(xp: Any, a: Array, b: Array) -> Array:
    """|a| |b| of each pair of rows: what the partial sums of their product add up to, squared."""
    return xp.sqrt((a**2).sum(axis=3))[..., None] * xp.sqrt((b**2).sum(axis=3))[..., None, :]


def _rss(xp: Any, off: Array, factor: Array) -> Array:
    """Root of the sum of squares, over the axis that a product sums."""
    return xp.sqrt(off**2 @ factor**2)


def _summing(s: SimpleNamespace, terms: Array, factor: Array) -> Array:
    """What the sum itself adds: its partial sums are those of random terms, or grow steadily."""
    partial = s.xp.hypot(_rss(s.xp, terms, factor), terms @ factor / 3**0.5)
    return s.rounding * terms.shape[3] ** 0.5 * partial
