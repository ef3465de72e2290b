"""When is a result right? Its error is measured against the error of a naive user's own formula.

allowed = factor * (the largest error of the dense formula in the inputs' dtype) + tiny + noise

Inputs are drawn afresh in every run, and some make the naive formula lucky: its error alone would
then refuse right results. `tiny` is the last rounding, of numbers that are exact otherwise. `noise`
is what the roundings on the way to a result may add up to, whatever the naive formula did:
rounding.py carries the standard deviation of each step through to each result, of the numbers at
hand, and allows four of them. It knows what an engine does and the formula does not: D comes from
the rounded output, tensor cores take P and dS in 16 bits. Where a test compares numbers of its own,
its tolerance follows from what is rounded in it.

Measured: of 1500 random calls and dozens to hundreds of seeds of other tests the worst error of the
NumPy engine and of the emulated simt and mma kernels was 0.35 of what is allowed; had the naive
error been 0, 0.4. Faults are far outside. In float32 a causal mask shifted by one, a sum that is
not rescaled, and a backward without D exceed it by a factor of 10**4, the last key of each tile
left out of the row sum by 10**3, a D that is one per cent off by 10**2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# `tiny`, in ulps of the output's dtype at the reference's largest magnitude. A 16-bit result is
# rounded once more than it was computed, and a short dense sum may be exact by luck; float32 sums
# have no such last rounding, but their exponentials may be off by two ulps each.
TINY_ULPS = {"float16": 1, "bfloat16": 1, "float32": 4, "float64": 4}
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def tiny(dtype: str, magnitude: float) -> float:
    """The error that is allowed to numbers of this magnitude even where the naive one has none."""
    return TINY_ULPS[dtype] * EPSILON[dtype] * float(magnitude)


def assert_close(
    got: Any,
    reference: Any,
    dense: Any,
    factor: float = 2,
    name: str = "out",
    noise: float = 0.0,
) -> None:
    """Assert ``max|got - reference| <= factor * max|dense - reference| + tiny + noise``.

    Parameters
    ----------
    got : array
        What is tested, in its own dtype.
    reference : array
        The right values, in a wider type.
    dense : array
        The same formula carried out naively in the inputs' dtype.
    factor : float
        2 for outputs, 3 for gradients.
    name : str
        Begins the message.
    noise : float
        How far rounding may carry `got`, where the naive formula may be luckier.

    NaNs and infinities come first: they must stand exactly where the reference has them.
    """
    dtype = got.dtype.name
    wide = np.result_type(reference.dtype, np.float64)
    got, reference, dense = (np.asarray(x).astype(wide) for x in (got, reference, dense))
    assert got.shape == reference.shape, f"{name}: shape {got.shape}, expected {reference.shape}"
    _assert_same_places(np.isnan(got), np.isnan(reference), f"{name}: NaN", got, reference)
    for special in (np.inf, -np.inf):
        at = got == special, reference == special
        _assert_same_places(*at, f"{name}: {special}", got, reference)
    finite = np.isfinite(reference)
    if not finite.any():
        return
    error = np.abs(np.where(finite, got, 0) - np.where(finite, reference, 0))
    # Where the narrow formula itself overflowed it is no yardstick.
    measured = finite & np.isfinite(dense)
    naive = np.abs(dense[measured] - reference[measured]).max(initial=0)
    allowed = factor * naive + tiny(dtype, np.abs(reference[finite]).max()) + noise
    worst, count = np.unravel_index(error.argmax(), error.shape), int((error > allowed).sum())
    assert error[worst] <= allowed, (
        f"{name}: off by {error[worst]:.3g} at {tuple(map(int, worst))} of {error.shape}: "
        f"got {got[worst]:.9g}, reference {reference[worst]:.9g}, dense {dense[worst]:.9g}; "
        f"allowed {allowed:.3g} = {factor} * {naive:.3g} + tiny + {noise:.3g}; {count} too far off"
    )


def assert_result(name: str, got: Any, exact: Any, dense: Any) -> None:
    """Assert that one result of a call is close to that of `exact`, a judge's `Dense`."""
    factor = 3 if name in ("dq", "dk", "dv", "dbias", "dsinks") else 2
    values = got, getattr(exact, name), getattr(dense, name)
    assert_close(*values, factor, name, exact.noise[name])


def assert_agree(name: str, one: Any, other: Any, exact: Any) -> None:
    """Assert that two results of the same numbers are as close as one of `exact` allows."""
    other = other.astype(np.float64)
    assert_close(one, other, other, name=name, noise=2 * exact.noise[name])


def _assert_same_places(got: Any, expected: Any, what: str, values: Any, reference: Any) -> None:
    wrong = np.argwhere(got != expected)
    if wrong.size:
        worst = tuple(map(int, wrong[0]))
        raise AssertionError(
            f"{what} at {len(wrong)} wrong places of {got.shape}, first {worst}: "
            f"got {values[worst]}, reference {reference[worst]}"
        )
