"""Writing new tokens into the cache, in place, and nowhere else; to FP8 where the cache is that."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash._arrays import Place
from cupyflash._float8 import float8_bits
from cupyflash._kvcache.bits import as_bits
from cupyflash._kvcache.storage import Storage

Array = Any


def quantized(x: Array, number: float, factors: Array | None, xp: Any) -> Array:
    """Divide 16-bit tokens ``(b, s, hk, width)`` by their descale, and round them to e4m3's bits.

    The descale is `number`, or `factors` ``(1 or b, hk)``; the division is float32's.
    """
    factor = np.float32(number) if factors is None else factors[:, None, :, None]
    with np.errstate(all="ignore"):
        return float8_bits(x.astype(np.float32) / factor, xp)


def append(storage: Storage, key: Array, value: Array, positions: Array, place: Place) -> None:
    """Write ``(b, s, hk, width)`` new tokens at ``positions`` ``(b, s)``; drop what does not fit.

    Which tokens fit may be known to the device alone, and an array operation writes as many tokens
    as it is given. So a token that is dropped writes once more what one that fits writes; where
    none fits, each writes what is there already.
    """
    if positions.size == 0:
        return
    xp = place.namespace
    block, row, inside = (x.reshape(-1) for x in storage.locate(positions, xp))
    chosen = inside.argmax()
    source = xp.where(inside, xp.arange(inside.size), chosen)
    if place.device_id is not None:
        from cupyflash._cuda import decode

        faults = decode.faults_of(place.device_id)
        faults[:1] += inside.size - inside.sum()
    block, row, some = block[source], row[source], inside.any()
    for cache, new in ((storage.key, key), (storage.value, value)):
        target, bits = as_bits(cache), as_bits(new.reshape(-1, *new.shape[2:]))
        target[block, row] = xp.where(some, bits[source], target[block, row])
