"""Ready `ScoreMod`s, for host and device arrays alike; read them as examples of your own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupyflash import _options
from cupyflash._arrays import FLOAT_DTYPES, as_array, describe, place_of
from cupyflash.score_mod import ScoreMod

__all__ = ["distance_decay", "documents", "relative_position_bias", "soft_cap"]

Array = Any

_CAPS = 2.0**-126, 2.0**104  # float32 has smaller ones not, and larger ones change no score
_FARTHEST = 2**30  # so that a position plus an offset stays an int
_LEAST_BUCKETS = 4


def soft_cap(cap: float) -> ScoreMod:
    """Return ``score -> cap * tanh(score / cap)``.

    As the option ``softcap``, but behind bias and ALiBi.

    Parameters
    ----------
    cap : float
        From 2**-126 to 2**104: others are 0 in float32, or change nothing.

    Raises
    ------
    TypeError, ValueError
        `cap` is no number, or outside.
    """
    cap = _options.finite_number(cap, "cap")
    least, most = _CAPS
    if not least <= cap <= most:
        raise ValueError(f"cap must be from {least:.3g} to {most:.3g}, got {cap!r}")
    # A number of the score's own type: 0.1f would be wrong in float64, 0.1 slow in float32.
    number = f"decltype(score)({cap!r})"

    def forward(score: Array, b: int, h: int, i: Array, j: Array) -> Array:
        return cap * np.tanh(score / cap)

    def backward(score: Array, b: int, h: int, i: Array, j: Array) -> Array:
        return 1 - np.tanh(score / cap) ** 2

    return ScoreMod(
        f"{number} * tanh(score / {number})",
        f"1 - tanh(score / {number}) * tanh(score / {number})",
        numpy_forward=forward,
        numpy_backward=backward,
    )


def distance_decay(rates: Array, offset: int = 0) -> ScoreMod:
    """Return ``score -> score - rates[h] * |i + offset - j|``: ALiBi whose slopes are learned.

    Parameters
    ----------
    rates : array ``(h,)``, floating
        One a head; ``dscore_params["rates"]`` is their gradient.
    offset : int, default 0
        Key index that lies under query 0; from -2**30 to 2**30.

    Raises
    ------
    TypeError, ValueError
        `rates` is no floating array of one axis, or `offset` no such integer.
    """
    rates = _require_form(rates, "rates", ("h",), floating=True)
    offset = _offset(offset)

    def forward(score: Array, b: int, h: int, i: Array, j: Array, rates: Array) -> Array:
        return score - rates[h] * abs(i + offset - j)

    def backward(score: Array, b: int, h: int, i: Array, j: Array, rates: Array) -> Any:
        return 1.0, {"rates": ((h,), -abs(i + offset - j))}

    return ScoreMod(
        f"score - rates[h] * abs(i + {offset} - j)",
        "1",
        {"rates": rates},
        numpy_forward=forward,
        numpy_backward=backward,
    )


def documents(query_ids: Array, key_ids: Array | None = None) -> ScoreMod:
    """Return a mod that hides keys of other documents than the query's.

    Every tile is computed: where documents lie one after another, varlen calls are faster.

    Parameters
    ----------
    query_ids : integer array ``(b, sq)``
        Which document a query belongs to.
    key_ids : integer array ``(b, sk)``, optional
        The same for keys, both signed or both unsigned. Default: `query_ids`.

    Raises
    ------
    TypeError, ValueError
        They are no integer arrays of two axes, or do not go together.
    """
    query_ids = _require_form(query_ids, "query_ids", ("b", "sq"))
    key_ids = query_ids if key_ids is None else _require_form(key_ids, "key_ids", ("b", "sk"))
    (batch, seqlen_q), (batch_k, seqlen_k) = query_ids.shape, key_ids.shape
    if batch_k != batch:
        raise ValueError(f"key_ids must have query_ids' batch, {batch}, got {describe(key_ids)}")
    if key_ids.dtype.kind != query_ids.dtype.kind:  # for C++ -1 is 2**32 - 1
        raise TypeError(
            "query_ids and key_ids must both be signed or both be unsigned, got dtypes "
            f"{query_ids.dtype} and {key_ids.dtype}; use .astype"
        )

    def forward(
        score: Array, b: int, h: int, i: Array, j: Array, query_ids: Array, key_ids: Array
    ) -> Array:
        return np.where(query_ids[b, i] == key_ids[b, j], score, -np.inf)

    def backward(
        score: Array, b: int, h: int, i: Array, j: Array, query_ids: Array, key_ids: Array
    ) -> float:
        return 1.0

    return ScoreMod(
        f"query_ids[b * {seqlen_q} + i] == key_ids[b * {seqlen_k} + j] ? score : -INFINITY",
        "1",
        {"query_ids": query_ids, "key_ids": key_ids},
        numpy_forward=forward,
        numpy_backward=backward,
    )


def relative_position_bias(
    table: Array, *, bidirectional: bool = True, max_distance: int = 128, offset: int = 0
) -> ScoreMod:
    """Return T5's bias by buckets of the distance (Raffel et al. 2020, arXiv 1910.10683).

    Parameters
    ----------
    table : array ``(num_buckets, h)``, floating
        As T5 stores ``relative_attention_bias``; ``dscore_params["table"]`` is its gradient.
    bidirectional : bool, default True
        Whether keys after the query have buckets of their own (encoders); else they share
        that of distance 0.
    max_distance : int, default 128
        From here on all distances are in the last bucket.
    offset : int, default 0
        Position of query 0 among the keys; from -2**30 to 2**30.

    Raises
    ------
    TypeError, ValueError
        `table` is no floating array of two axes, with 4 rows or more; `bidirectional` is no bool;
        `max_distance` or `offset` is no integer, or out of range.
    """
    table = _require_form(table, "table", ("num_buckets", "h"), floating=True)
    num_buckets, num_heads = table.shape
    if num_buckets < _LEAST_BUCKETS:
        raise ValueError(f"table must have {_LEAST_BUCKETS} buckets or more, got {describe(table)}")
    _options.require_bools(bidirectional=bidirectional)
    max_distance, offset = _options.integer(max_distance, "max_distance"), _offset(offset)
    exact = num_buckets // (4 if bidirectional else 2)  # distances with a bucket each
    if not exact < max_distance <= _FARTHEST:
        raise ValueError(
            f"max_distance must be above {exact}, the exact ones of {num_buckets} buckets, and at "
            f"most 2**30, got {max_distance}"
        )
    buckets: Array = _buckets(num_buckets, bool(bidirectional), max_distance)
    place = place_of(table)
    with place.current():
        buckets = place.namespace.asarray(buckets)

    def bucket(i: Array, j: Array, buckets: Array) -> Array:
        return buckets[np.clip(j - i - offset, -max_distance, max_distance) + max_distance]

    def forward(
        score: Array, b: int, h: int, i: Array, j: Array, table: Array, buckets: Array
    ) -> Array:
        return score + table[bucket(i, j, buckets), h]

    def backward(
        score: Array, b: int, h: int, i: Array, j: Array, table: Array, buckets: Array
    ) -> Any:
        return 1.0, {"table": ((bucket(i, j, buckets), h), 1.0)}

    distance = f"min(max(j - i - {offset}, -{max_distance}), {max_distance}) + {max_distance}"
    return ScoreMod(
        f"score + table[buckets[{distance}] * {num_heads} + h]",
        "1",
        {"table": table, "buckets": buckets},
        numpy_forward=forward,
        numpy_backward=backward,
    )


def _require_form(x: Any, name: str, axes: tuple[str, ...], *, floating: bool = False) -> Array:
    """Return `x` as an array with these axes, of floats (then not empty) or else of integers."""
    array = as_array(x, name)
    if not (array.dtype in FLOAT_DTYPES if floating else array.dtype.kind in "iu"):
        kind = "floats" if floating else "integers"
        raise TypeError(f"{name} must hold {kind}, got {describe(array)}; use .astype")
    if array.ndim != len(axes) or (floating and not array.size):
        raise ValueError(f"{name} must have the axes ({', '.join(axes)}), got {describe(array)}")
    return array


def _offset(value: Any) -> int:
    offset = _options.integer(value, "offset")
    if abs(offset) > _FARTHEST:
        raise ValueError(f"offset must be from -2**30 to 2**30, got {offset}")
    return offset


def _buckets(num_buckets: int, bidirectional: bool, max_distance: int) -> npt.NDArray[np.int32]:
    """Return the bucket of each distance ``j - i`` from -max_distance to max_distance.

    Short distances have a bucket each, longer ones share buckets that grow exponentially.
    """
    ahead = np.arange(-max_distance, max_distance + 1)
    first = np.zeros(len(ahead), np.int64)
    if bidirectional:
        num_buckets //= 2
        first[ahead > 0] = num_buckets
        distance = abs(ahead)
    else:
        distance = np.maximum(-ahead, 0)
    exact = num_buckets // 2
    growth = np.log(np.maximum(distance, 1) / exact) / np.log(max_distance / exact)
    long = exact + (growth * (num_buckets - exact)).astype(np.int64)
    bucket = np.where(distance < exact, distance, np.minimum(long, num_buckets - 1))
    return (first + bucket).astype(np.int32)
