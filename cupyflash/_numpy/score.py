"""From q.k to the final score, with every derivative beside its forward step."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._arrays import BFLOAT16, describe
from cupyflash._numpy.broadcast import plane, plane_tile, sum_to
from cupyflash._numpy.key_range import Tile
from cupyflash._numpy.sequence import Sequence
from cupyflash._problem import Array, GradientBuffers, Operands, Problem
from cupyflash.score_mod import ScoreMod


@dataclass
class Trace:
    """What the way back through one tile needs from the way forward."""

    hidden: Array | None = None  # bool, broadcastable to the tile
    tanh: Array | None = None  # tanh(s / softcap)
    unmodified: Array | None = None  # the scores before score_mod


class Score:
    """Softcap, bias, ALiBi, score_mod and masking of one entry and head, in this order."""

    def __init__(self, problem: Problem, operands: Operands, sequence: Sequence, head: int) -> None:
        entry = sequence.entry
        self._sequence = sequence
        self._head = head
        self._softcap = problem.softcap
        self._bias = None if operands.bias is None else plane(operands.bias, entry, head)
        self._slope: float | None = None
        if operands.alibi_slopes is not None:
            slopes = operands.alibi_slopes
            self._slope = float(slopes[entry if slopes.shape[0] > 1 else 0, head])
        self._score_mod = operands.score_mod

    def forward(
        self, scores: Array, tile: Tile, hidden: Array | None, keep_trace: bool = False
    ) -> Trace:
        """Turn ``softmax_scale * q.k`` of a tile into final scores, in place.

        ``hidden`` is the mask's part of what the tile hides; the trace adds what score_mod hides
        by returning -inf.
        """
        trace = Trace(hidden)
        if self._softcap is not None:
            scores /= self._softcap
            np.tanh(scores, out=scores)
            if keep_trace:
                trace.tanh = scores.copy()
            scores *= self._softcap
        if self._bias is not None:
            scores += _finite_as(scores.dtype, plane_tile(self._bias, tile))
        if self._slope is not None:
            scores -= self._alibi(tile, scores.dtype)
        if self._score_mod is not None:
            if keep_trace:
                trace.unmodified = scores.copy()
            self._modify(self._score_mod, scores, tile)
            vanished = scores == -np.inf
            if vanished.any():
                trace.hidden = vanished if hidden is None else vanished | hidden
        if trace.hidden is not None:
            np.copyto(scores, -np.inf, where=trace.hidden)
        return trace

    def backward(
        self, grad_scores: Array, tile: Tile, trace: Trace, gradients: GradientBuffers
    ) -> None:
        """Turn gradients by final scores into gradients by ``softmax_scale * q.k``, in place.

        Adds to ``gradients.dbias`` and ``gradients.dscore_params`` on the way.
        """
        _clear(grad_scores, trace.hidden)
        if self._score_mod is not None:
            self._modify_backward(self._score_mod, grad_scores, tile, trace, gradients)
            _clear(grad_scores, trace.hidden)
        if gradients.dbias is not None:
            grad_bias = plane_tile(plane(gradients.dbias, self._sequence.entry, self._head), tile)
            np.add(
                grad_bias,
                sum_to(grad_scores, grad_bias.shape),
                out=grad_bias,
                casting="same_kind",
            )
        if trace.tanh is not None:
            # d softcap tanh(s / softcap) / ds = 1 - tanh^2
            np.square(trace.tanh, out=trace.tanh)
            np.subtract(1, trace.tanh, out=trace.tanh)
            grad_scores *= trace.tanh
            _clear(grad_scores, trace.hidden)

    def _alibi(self, tile: Tile, dtype: np.dtype) -> Array:
        positions = (tile.query_index + self._sequence.diagonal).astype(dtype)
        distance = positions - tile.key_index.astype(dtype)
        np.abs(distance, out=distance)
        distance *= self._slope
        return distance

    def _modify(self, score_mod: ScoreMod, scores: Array, tile: Tile) -> None:
        assert score_mod.numpy_forward is not None
        modified = score_mod.numpy_forward(scores, *self._indices(tile), **score_mod.params)
        np.copyto(scores, _returned(modified, "numpy_forward", tile.shape), casting="same_kind")

    def _modify_backward(
        self,
        score_mod: ScoreMod,
        grad_scores: Array,
        tile: Tile,
        trace: Trace,
        gradients: GradientBuffers,
    ) -> None:
        assert score_mod.numpy_backward is not None
        factor = score_mod.numpy_backward(
            trace.unmodified, *self._indices(tile), **score_mod.params
        )
        factor, by_params = _parts(factor) if isinstance(factor, tuple) else (factor, {})
        if gradients.dscore_params is not None:
            _require_known(by_params, score_mod.params)
            for name, (index, derivative) in by_params.items():
                grad_param = gradients.dscore_params.get(name)
                if grad_param is None:  # integers have no gradient
                    continue
                derivative = _returned(derivative, f"numpy_backward, for {name},", tile.shape)
                contribution = np.multiply(grad_scores, derivative, dtype=grad_param.dtype)
                _clear(contribution, trace.hidden)
                _add_at(grad_param, index, contribution)
        factor = _returned(factor, "numpy_backward", tile.shape)
        np.multiply(grad_scores, factor, out=grad_scores, casting="same_kind")

    def _indices(self, tile: Tile) -> tuple[int, int, Array, Array]:
        """What score_mod calls b, h, i, j."""
        return self._sequence.entry, self._head, tile.query_index, tile.key_index


def _returned(value: Any, name: str, shape: tuple[int, ...]) -> Array:
    """What the user's callable `name` returned, if it is numbers that broadcast to the tile."""
    array = np.asarray(value)
    if array.dtype != BFLOAT16 and array.dtype.kind not in "biuf":
        raise TypeError(f"score_mod.{name} must return real numbers, got {reprlib.repr(value)}")
    axes = zip(array.shape[::-1], shape[::-1], strict=False)
    if array.ndim > 2 or any(length not in (1, whole) for length, whole in axes):
        raise ValueError(
            f"score_mod.{name} must return what broadcasts to {shape}, got {describe(array)}"
        )
    return array


def _parts(returned: tuple[Any, ...]) -> tuple[Any, Mapping[str, Any]]:
    """The factor and the derivatives by parameters that numpy_backward returned."""
    if len(returned) == 2 and isinstance(returned[1], Mapping):
        pairs = (isinstance(pair, tuple) and len(pair) == 2 for pair in returned[1].values())
        if all(pairs):
            return returned[0], returned[1]
    raise TypeError(
        "score_mod.numpy_backward must return a factor, or (factor, {name: (index, derivative)}), "
        f"got {reprlib.repr(returned)}"
    )


def _add_at(total: Array, index: Any, values: Array) -> None:
    """Add each value to the element of `total` that `index` names for it."""
    axes = index if isinstance(index, tuple) else (index,)
    if len(axes) != total.ndim:
        raise ValueError(
            f"score_mod.numpy_backward returned {len(axes)} indices for params of {describe(total)}"
        )
    if axes:
        np.add.at(total, tuple(np.broadcast_to(axis, values.shape) for axis in axes), values)
    else:
        total += values.sum()


def _require_known(by_params: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    unknown = sorted(set(by_params) - set(params))
    if unknown:
        raise ValueError(
            f"numpy_backward returned derivatives by {unknown}, but params has {sorted(params)}"
        )


def _finite_as(dtype: np.dtype, bias: Array) -> Array:
    """A bias tile whose finite values stay finite in a narrower accumulator."""
    if bias.dtype.itemsize <= dtype.itemsize:
        return bias.astype(dtype, copy=False)
    limit = np.finfo(dtype).max
    return np.clip(bias, -limit, limit).astype(dtype)


def _clear(values: Array, hidden: Array | None) -> None:
    if hidden is not None:
        np.copyto(values, 0, where=hidden)
