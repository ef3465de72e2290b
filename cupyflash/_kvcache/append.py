"""Writing new tokens into the cache, in place, and nowhere else."""

from __future__ import annotations

from typing import Any

from cupyflash._arrays import Place
from cupyflash._kvcache.bits import as_bits
from cupyflash._kvcache.storage import Storage

Array = Any


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
