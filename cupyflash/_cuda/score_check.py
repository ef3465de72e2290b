"""``CUPYFLASH_DEBUG=1``: a ScoreMod's `backward` against finite differences of its `forward`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyflash._cuda.arguments import address
from cupyflash._cuda.device import require_cupy
from cupyflash._cuda.kernel import entry_point, kernel_launch, stub
from cupyflash._cuda.launch import Launcher
from cupyflash._cuda.module import load
from cupyflash._cuda.params import SCORE_PARAMS, size_assertion
from cupyflash._cuda.score_source import ScoreSource, definitions
from cupyflash._problem import Operands, Problem

__all__ = ["check_once", "check_stub", "disagreement"]

_TYPES = {"float32": "float", "float64": "double"}
_ENTRY = "cupyflash_check_score"
_THREADS = 256
_COUNT = 1024
_STEP = 2.0**-6
_TOLERANCE = 0.02
_MOST_OUTLIERS = 0.02  # share of scores that may lie within a step of a kink

# ``ScoreCheckParams`` of kernels/attention/score_check.cuh.
_POINTERS = ("score_params", "scores", "indices", "results")
_PARAMS: np.dtype[np.void] = np.dtype(
    [("score_params", np.uint64, (SCORE_PARAMS,))]
    + [(name, np.uint64) for name in _POINTERS[1:]]
    + [("param_sizes", np.int64, (SCORE_PARAMS,)), ("step", np.float64), ("count", np.int64)]
)

_checked: set[tuple[ScoreSource, int]] = set()


def check_once(problem: Problem, operands: Operands) -> None:
    """Compare `backward` with finite differences of `forward`, the first time that it is used.

    Raises
    ------
    ValueError
        They disagree.
    """
    source, device_id = problem.score_mod, operands.query.device.id
    if os.environ.get("CUPYFLASH_DEBUG") != "1" or source is None or source.backward is None:
        return
    ranges = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    if (source, device_id) in _checked or 0 in ranges:
        return
    rng = np.random.default_rng(0)
    scores = (3 * rng.standard_normal(_COUNT)).astype(problem.accumulator_dtype)
    indices = np.stack([rng.integers(0, n, _COUNT) for n in ranges], axis=1).astype(np.int32)
    results = _evaluate(source, operands, scores, indices)
    complaint = disagreement(source, scores, indices, results)
    if complaint:
        raise ValueError(complaint)
    _checked.add((source, device_id))


def disagreement(
    source: ScoreSource,
    scores: npt.NDArray[Any],
    indices: npt.NDArray[np.int32],
    results: npt.NDArray[Any],
) -> str | None:
    """Return what is wrong, if anything is; `results` as in ``ScoreCheckParams``."""
    below, above, factor = results.astype(np.float64).T
    with np.errstate(invalid="ignore"):
        quotient = (above - below) / (2 * _STEP)
    compared = np.isfinite(quotient)  # hidden scores have no derivative
    size = np.maximum(1, np.maximum(abs(quotient), abs(factor)))
    wrong = compared & ~(abs(quotient - factor) <= _TOLERANCE * size)
    if wrong.sum() <= _MOST_OUTLIERS * compared.sum():
        return None
    first = int(wrong.argmax())
    b, h, i, j = indices[first]
    return (
        f"score_mod.backward is not the derivative of score_mod.forward: at score="
        f"{scores[first]:.6g}, b={b}, h={h}, i={i}, j={j} backward gives {factor[first]:.6g} and "
        f"finite differences give {quotient[first]:.6g} (they differ at {wrong.sum()} of "
        f"{compared.sum()} random scores)\n  forward:  {source.forward}\n"
        f"  backward: {source.backward}"
    )


def check_stub(source: ScoreSource, dtype: str) -> str:
    """Return the source of the kernel that evaluates both expressions."""
    return stub(
        "attention/score_check.cuh",
        *definitions(source),
        size_assertion("ScoreCheckParams", _PARAMS),
        entry_point(
            kernel_launch(_ENTRY, 1, _THREADS), "ScoreCheckParams", f"check_score<{_TYPES[dtype]}>"
        ),
    )


def _evaluate(
    source: ScoreSource,
    operands: Operands,
    scores: npt.NDArray[Any],
    indices: npt.NDArray[np.int32],
) -> npt.NDArray[Any]:
    cupy = require_cupy()
    device_id, arrays = operands.query.device.id, operands.score_arrays
    module = load(check_stub(source, scores.dtype.name), [_ENTRY], device_id=device_id, plan=source)
    parameters: Any = np.zeros((), _PARAMS)
    parameters["param_sizes"][: len(arrays)] = [array.size for array in arrays]
    parameters["step"], parameters["count"] = _STEP, len(scores)
    launcher = Launcher(
        module.get_function(_ENTRY), device_id, parameters, _POINTERS, threads=_THREADS
    )
    with cupy.cuda.Device(device_id):
        inputs = cupy.asarray(scores), cupy.asarray(indices)
        results = cupy.empty((len(scores), 3), scores.dtype)
        pointers = [*map(address, arrays), *(0,) * (SCORE_PARAMS - len(arrays))]
        launcher(-(-len(scores) // _THREADS), *pointers, *map(address, (*inputs, results)))
        return results.get()  # type: ignore[no-any-return]
