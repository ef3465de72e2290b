"""Gradients of a score_mod's arrays: what kernels add to, and how it becomes the gradients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from cupyflash._cuda.arguments import address
from cupyflash._cuda.kernel import entry_point, kernel_launch, stub
from cupyflash._cuda.launch import Launcher
from cupyflash._cuda.module import load
from cupyflash._cuda.params import size_assertion
from cupyflash._cuda.scratch import allocate
from cupyflash._problem import Array, Problem

__all__ = ["WORDS", "round_sums", "rounding_stub", "zeroed_sums"]

WORDS = {"float32": 10, "float64": 67}  # of ExactSum in kernels/attention/exact_sum.cuh

_TYPES = {"float32": "float", "float64": "double"}
_THREADS = 256
_ENTRY = "cupyflash_round_exact_sums"
# ``RoundParams`` of the same file.
_PARAMS: np.dtype[np.void] = np.dtype(
    [("words", np.uint64), ("sums", np.uint64), ("size", np.int64)]
)


def zeroed_sums(
    problem: Problem, gradients: dict[str, Array] | None, *, exact: bool
) -> list[Array | None]:
    """Return what kernels add to, one a slot, None for integers.

    Parameters
    ----------
    problem : Problem
        Of the call.
    gradients : dict of str to array, or None
        Contiguous arrays in the accumulator dtype; None: there is no score_mod.
    exact : bool
        Whether the sums are integers, to be rounded by `round_sums`, or the gradients themselves.
    """
    if problem.score_mod is None or gradients is None:
        return []
    sums = []
    for name, _ in problem.score_mod.arrays:
        target = gradients.get(name)
        if target is not None:
            if exact:
                words = target.size * WORDS[problem.accumulator_dtype]
                target = allocate({name: (words, "uint64")})[name]
            if target.size:
                target.data.memset_async(0, target.nbytes)
        sums.append(target)
    return sums


def round_sums(problem: Problem, sums: list[Array | None], gradients: dict[str, Array]) -> None:
    """Write exact sums into the gradients."""
    assert problem.score_mod is not None
    for (name, _), words in zip(problem.score_mod.arrays, sums, strict=True):
        if words is not None:
            gradient = gradients[name]
            launcher = _launcher(problem.accumulator_dtype, gradient.device.id)
            blocks = -(-gradient.size // _THREADS)
            launcher(blocks, address(words), address(gradient), gradient.size)


def rounding_stub(dtype: str) -> str:
    """Return the source of the kernel that rounds sums to `dtype`."""
    number = _TYPES[dtype]
    launch = kernel_launch(_ENTRY, 1, _THREADS)
    return stub(
        "attention/exact_sum.cuh",
        size_assertion("RoundParams", _PARAMS),
        f'static_assert(ExactSum<{number}>::words == {WORDS[dtype]}, "Python has other sizes");',
        entry_point(launch, "RoundParams", f"round_exact_sums<{number}>"),
    )


@lru_cache(maxsize=64)
def _launcher(dtype: str, device_id: int) -> Launcher:
    module = load(rounding_stub(dtype), [_ENTRY], device_id=device_id, plan=f"sums in {dtype}")
    parameters: Any = np.zeros((), _PARAMS)
    names = _PARAMS.names or ()
    return Launcher(module.get_function(_ENTRY), device_id, parameters, names, threads=_THREADS)
