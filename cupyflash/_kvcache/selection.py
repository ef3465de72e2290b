"""Which GPU's own kernels may serve a call on a cache: light, as every call asks."""

from __future__ import annotations

from cupyflash._arrays import Place
from cupyflash._cuda.device import Device, describe

_LEAST_CAPABILITY = (8, 0)


def kernel_device(place: Place, engine: str | None) -> Device | None:
    """Return the GPU whose kernels a call at `place` may use; None: array operations serve it."""
    if place.device_id is None or engine not in (None, "mma"):
        return None
    device = describe(place.device_id)
    return device if device.compute_capability >= _LEAST_CAPABILITY else None
