"""When is a result right? Its error is measured against the error of a naive user's own formula."""

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
    """Assert ``max|got - reference| <= factor * max|dense - reference| + tiny``.

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
        `tiny` of the terms whose difference `got` is, where they are larger than itself: a query
        that sees one key has dq = 0, but as P * (dP - D), where D comes from the rounded output.

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
    allowed = factor * naive + max(tiny(dtype, np.abs(reference[finite]).max()), noise)
    worst, count = np.unravel_index(error.argmax(), error.shape), int((error > allowed).sum())
    assert error[worst] <= allowed, (
        f"{name}: off by {error[worst]:.3g} at {tuple(map(int, worst))} of {error.shape}: "
        f"got {got[worst]:.9g}, reference {reference[worst]:.9g}, dense {dense[worst]:.9g}; "
        f"allowed {allowed:.3g} = {factor} * {naive:.3g} + tiny; {count} too far off"
    )


def _assert_same_places(got: Any, expected: Any, what: str, values: Any, reference: Any) -> None:
    wrong = np.argwhere(got != expected)
    if wrong.size:
        worst = tuple(map(int, wrong[0]))
        raise AssertionError(
            f"{what} at {len(wrong)} wrong places of {got.shape}, first {worst}: "
            f"got {values[worst]}, reference {reference[worst]}"
        )
