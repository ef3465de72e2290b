"""Ready `ScoreMod`s, for host and device arrays alike; read them as examples of your own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupyflash._arrays import as_array, place_of
from cupyflash.score_mod import ScoreMod

__all__ = ["distance_decay", "documents", "relative_position_bias", "soft_cap"]

Array = Any


def soft_cap(cap: float) -> ScoreMod:
    """Return ``score -> cap * tanh(score / cap)``.

    As the option ``softcap``, but behind bias and ALiBi.
    """
    # A number of the score's own type: 0.1f would be wrong in float64, 0.1 slow in float32.
    number = f"decltype(score)({float(cap)!r})"

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
        Key index that lies under query 0.
    """

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
        The same for keys. Default: `query_ids`.
    """
    key_ids = query_ids if key_ids is None else key_ids

    def forward(
        score: Array, b: int, h: int, i: Array, j: Array, query_ids: Array, key_ids: Array
    ) -> Array:
        return np.where(query_ids[b, i] == key_ids[b, j], score, -np.inf)

    def backward(
        score: Array, b: int, h: int, i: Array, j: Array, query_ids: Array, key_ids: Array
    ) -> float:
        return 1.0

    seqlen_q, seqlen_k = query_ids.shape[1], key_ids.shape[1]
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
        Position of query 0 among the keys.
    """
    num_buckets, num_heads = table.shape
    if max_distance <= num_buckets // (4 if bidirectional else 2) or num_buckets < 4:
        raise ValueError(f"{num_buckets} buckets do not go with max_distance {max_distance}")
    buckets: Array = _buckets(num_buckets, bidirectional, max_distance)
    place = place_of(as_array(table, "table"))
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
