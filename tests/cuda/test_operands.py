"""What tests/emulated/test_machine.py holds against the emulator, the GPU does too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash._cuda.device import current
from cupyflash._cuda.launch import Launcher
from cupyflash._cuda.module import load
from tests.probes import boxes, products


@pytest.fixture
def launcher() -> Callable[..., Launcher]:
    """A function that makes the launcher of a probe's entry."""
    device = current()
    if device.compute_capability != (9, 0):
        pytest.skip("these instructions are Hopper's")

    def make(probe: Any, entry: str, params: np.ndarray) -> Launcher:
        module = load(probe.SOURCE, [entry], device_id=device.id)
        function = module.get_function(entry, probe.SHARED_MEMORY)
        options = {"threads": probe.THREADS, "shared_memory": probe.SHARED_MEMORY}
        return Launcher(function, device.id, params, probe.POINTERS, **options)

    return make


@pytest.mark.parametrize("by_rows", products.ENTRIES, ids=products.ENTRIES.get)
def test_operands_lie_where_descriptors_say(rng, launcher, by_rows):
    import cupy

    def run(entry: str, params: np.ndarray, image: np.ndarray) -> Any:
        arrays = cupy.asarray(image), cupy.full((64, 128), np.nan, np.float32)
        launcher(products, entry, params)(1, *(array.data.ptr for array in arrays))
        return arrays[1].get()

    products.check_products(rng, run, by_rows)


@pytest.mark.parametrize("swizzle", boxes.SWIZZLES)
def test_boxes_lie_where_tensor_maps_say(rng, launcher, swizzle):
    import cupy

    def place(values: np.ndarray) -> tuple[Any, int]:
        placed = cupy.asarray(values)
        return placed, placed.data.ptr

    def run(params: np.ndarray) -> Any:
        image = cupy.full(int(params["bytes"]) // 2, np.nan, np.float16)
        launcher(boxes, boxes.ENTRY, params)(1, image.data.ptr)
        return image.get()

    boxes.check_boxes(rng, swizzle, place, run)
