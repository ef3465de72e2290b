"""Exact merge of partial attention results over disjoint sets of keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash._arrays import FLOAT_DTYPES, as_array, describe, place_of

__all__ = ["merge_states"]

Array = Any


def merge_states(outs: Any, lses: Any, *, out_dtype: Any = None) -> tuple[Array, Array]:
    """Merge attention over parts of the keys into attention over all of them.

    Parameters
    ----------
    outs : sequence of arrays ``(..., s, h, dv)``, or one array with the parts on axis 0
        Output of each part, normalised over the part's own keys: float16, bfloat16, float32 or
        float64, NumPy or CuPy.
    lses : sequence of as many arrays ``(..., h, s)``, or one array with the parts on axis 0
        Natural log of each part's softmax denominator (``saved.lse``), float32 or float64; -inf
        where a part sees no key: whatever its output holds there does not count.
    out_dtype : dtype, default the dtype of `outs`
        Dtype of the merged output.

    Returns
    -------
    out : array ``(..., s, h, dv)``
        ``sum_n exp(lse_n - lse) out_n``; 0 where every part is -inf.
    lse : array ``(..., h, s)``
        ``log(sum_n exp(lse_n))`` in the dtype of `lses`; -inf where every part is.

    Raises
    ------
    TypeError
        Something is no array, or dtypes or places are mixed or not supported.
    ValueError
        No part, different numbers of parts, or shapes that do not go together.

    Notes
    -----
    This is the rescaling of FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.1) applied
    once to finished parts. It computes in float32, or float64 where an input is float64. Sinks
    belong to exactly one part.
    """
    outs, lses = _parts(outs, "outs", "(..., s, h, dv)"), _parts(lses, "lses", "(..., h, s)")
    target = _checked(outs, lses, out_dtype)
    place = place_of(outs[0])
    xp = place.namespace
    wide = np.float64 if np.float64 in (outs[0].dtype, lses[0].dtype) else np.float32
    # Infinities are ordinary here: exp(-inf) = 0 is a part's missing weight, log(0) = -inf.
    with place.current(), np.errstate(all="ignore"):
        row_max = lses[0].astype(wide)
        for lse in lses[1:]:
            row_max = xp.maximum(row_max, lse)
        shift = xp.where(row_max == -np.inf, 0, row_max)
        merged = xp.zeros(outs[0].shape, wide)
        row_sum = xp.zeros(row_max.shape, wide)
        for out, lse in zip(outs, lses, strict=True):
            weight = xp.exp(lse - shift)
            row_sum += weight
            # A part without keys may hold anything; a weight of 0 would not remove NaN or inf.
            weight = xp.swapaxes(weight, -1, -2)[..., None]
            merged += weight * xp.where(weight == 0, 0, out.astype(wide))
        row_weight = xp.swapaxes(row_sum, -1, -2)[..., None]
        merged /= xp.where(row_weight == 0, 1, row_weight)
        total = shift + xp.log(row_sum)
        return merged.astype(target), total.astype(lses[0].dtype)


def _parts(arrays: Any, name: str, axes: str) -> list[Array]:
    """The parts as a list of arrays."""
    if not isinstance(arrays, list | tuple):
        stacked = as_array(arrays, name)
        if stacked.ndim == 0:
            raise ValueError(f"{name} must have the parts on axis 0, got {describe(stacked)}")
        arrays = list(stacked)
    if len(arrays) == 0:
        raise ValueError(f"{name} has no parts; expected at least one array {axes}")
    return [as_array(array, f"{name}[{part}]") for part, array in enumerate(arrays)]


def _checked(outs: list[Array], lses: list[Array], out_dtype: Any) -> np.dtype[Any]:
    """Check that the parts go together; return the output's dtype."""
    if len(outs) != len(lses):
        raise ValueError(
            f"outs and lses must have as many parts, got {len(outs)} outs and {len(lses)} lses"
        )
    out, lse = outs[0], lses[0]
    if out.ndim < 3:
        raise ValueError(f"outs[0] must have shape (..., s, h, dv), got {describe(out)}")
    *lead, seqlen, num_heads, _ = out.shape
    _require_alike(outs, "outs", tuple(out.shape), tuple(FLOAT_DTYPES), out)
    _require_alike(
        lses,
        "lses",
        (*lead, num_heads, seqlen),
        (np.dtype(np.float32), np.dtype(np.float64)),
        lse,
        f"(..., h, s) of outs {tuple(out.shape)}",
    )
    if place_of(lse) != place_of(out):
        raise TypeError(
            f"lses live on the {place_of(lse)} but outs on the {place_of(out)}; "
            "use cupy.asarray or cupy.asnumpy"
        )
    try:
        target: np.dtype[Any] = np.dtype(out.dtype if out_dtype is None else out_dtype)
    except TypeError:
        raise TypeError(f"out_dtype must be a dtype, got {out_dtype!r}") from None
    if target not in FLOAT_DTYPES:
        raise TypeError(
            f"out_dtype must be one of {', '.join(FLOAT_DTYPES.values())}, got {target}"
        )
    return target


def _require_alike(
    arrays: list[Array],
    name: str,
    shape: tuple[int, ...],
    dtypes: tuple[np.dtype[Any], ...],
    first: Array,
    meaning: str = "of the first part",
) -> None:
    for part, array in enumerate(arrays):
        if array.dtype not in dtypes:
            names = ", ".join(dtype.name for dtype in dtypes)
            raise TypeError(
                f"{name}[{part}] must have one dtype of {names}, got {describe(array)}; use .astype"
            )
        if array.dtype != first.dtype:
            raise TypeError(
                f"{name} must have one dtype, got {first.dtype} and {name}[{part}] {array.dtype}; "
                "use .astype"
            )
        if tuple(array.shape) != shape:
            raise ValueError(
                f"{name}[{part}] must have shape {shape} {meaning}, got {describe(array)}"
            )
        if place_of(array) != place_of(first):
            raise TypeError(
                f"{name}[{part}] lives on the {place_of(array)} but {name}[0] on the "
                f"{place_of(first)}; use cupy.asarray or cupy.asnumpy"
            )
