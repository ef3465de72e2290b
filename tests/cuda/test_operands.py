"""What tests/emulated/test_machine.py holds against the emulator, the GPU does too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash._cuda.device import current
from cupyflash._cuda.launch import Launcher
from cupyflash._cuda.module import load
from tests.probes.products import (
    ENTRIES,
    POINTERS,
    SHARED_MEMORY,
    SOURCE,
    THREADS,
    check_products,
)


@pytest.mark.parametrize("by_rows", ENTRIES, ids=ENTRIES.get)
def test_operands_lie_where_descriptors_say(rng, by_rows):
    import cupy

    device = current()
    if device.compute_capability != (9, 0):
        pytest.skip("wgmma is Hopper's")
    module = load(SOURCE, list(ENTRIES.values()), device_id=device.id)

    def run(entry: str, params: np.ndarray, image: np.ndarray) -> Any:
        function = module.get_function(entry, SHARED_MEMORY)
        options = {"threads": THREADS, "shared_memory": SHARED_MEMORY}
        launcher = Launcher(function, device.id, params, POINTERS, **options)
        arrays = cupy.asarray(image), cupy.full((64, 128), np.nan, np.float32)
        launcher(1, *(array.data.ptr for array in arrays))
        return arrays[1].get()

    check_products(rng, run, by_rows)
