"""The emulator's own: operands of wgmma by the book, and that it sees what goes wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator import build
from tests.emulator.device import Launcher
from tests.probes import boxes, faults, products
from tests.probes.layouts import DEPTH, Layout

# In the order of faults.cu -> what is said; None: it runs, and is right only without a fault.
FAULTS = {
    "none": None,
    "early_read": "ended before boxes had landed",
    "no_proxy_fence": "no fence.proxy.async",
    "no_register_fence": "no wgmma.fence",
    "early_write": "sums were written while products were under way",
    "no_product_wait": "ended with products under way",
    "warps_differ": "waits for ever: .* for other warps of its warpgroup",
    "arrives_twice": "one arrival too many",
    "waits_twice": "parity 1 of the mbarrier",
    "expects_too_much": "16 bytes missing",
    "counts_differ": "bar for other numbers of threads",
    "no_bulk_wait": "a bulk copy could still read shared memory",
    "early_reuse": None,
}


def launch(probe: Any, entry: str, params: np.ndarray, *addresses: int) -> None:
    library = build.library(probe.SOURCE)
    options = {"threads": probe.THREADS, "shared_memory": probe.SHARED_MEMORY}
    Launcher((library, entry), -1, params, probe.POINTERS, **options)(1, *addresses)


@pytest.mark.parametrize("by_rows", products.ENTRIES, ids=products.ENTRIES.get)
def test_operands_lie_where_descriptors_say(rng, by_rows):
    def run(entry: str, params: np.ndarray, image: np.ndarray) -> np.ndarray:
        result = np.full((64, 128), np.nan, np.float32)
        launch(products, entry, params, image.ctypes.data, result.ctypes.data)
        return result

    products.check_products(rng, run, by_rows)


@pytest.mark.parametrize("swizzle", boxes.SWIZZLES)
def test_boxes_lie_where_tensor_maps_say(rng, swizzle):
    def run(params: np.ndarray) -> np.ndarray:
        image = np.full(int(params["bytes"]) // 2, np.nan, np.float16)
        launch(boxes, boxes.ENTRY, params, image.ctypes.data)
        return image

    boxes.check_boxes(rng, swizzle, lambda values: (values, values.ctypes.data), run)


@pytest.mark.parametrize("swizzle", boxes.SWIZZLES)
def test_boxes_are_stored_where_tensor_maps_say(rng, swizzle):
    def run(params: np.ndarray, image: np.ndarray) -> None:
        launch(boxes, boxes.STORING_ENTRY, params, image.ctypes.data)

    boxes.check_stored_boxes(rng, swizzle, lambda values: (values, values.ctypes.data), run)


def test_boxes_between_chunks_are_seen(rng):
    """The GPU stops with an illegal instruction."""
    values = rng.normal(size=(1, 1, 8, 64)).astype(np.float16)
    params = np.zeros((), boxes.PARAMS)
    params["map"] = np.void(boxes.encode(values.ctypes.data, values.shape, (1, 1, 8, 64), 128))
    params["at"], params["bytes"] = (4, 0, 0, 0), 1024
    with pytest.raises(AssertionError, match="begins between chunks"):
        launch(boxes, boxes.ENTRY, params, np.empty(512, np.float16).ctypes.data)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_is_seen(rng, fault):
    a, b = (rng.normal(size=(64, DEPTH)).astype(np.float16) for _ in range(2))
    at = Layout(16, False, 128, 256, 0).addresses(64) // 2
    images = np.empty((2, 64 * DEPTH), np.float16)
    images[0][at], images[1][at] = a, b
    out = np.ones((128, 32), np.float32)
    fields = [("a", "u8"), ("b", "u8"), ("out", "u8"), ("fault", "i4")]
    params = np.array((0, 0, 0, list(FAULTS).index(fault)), np.dtype(fields, align=True))
    addresses = [array.ctypes.data for array in (*images, out)]
    if FAULTS[fault]:
        with pytest.raises(AssertionError, match=FAULTS[fault]):
            launch(faults, faults.ENTRY, params, *addresses)
        return
    launch(faults, faults.ENTRY, params, *addresses)
    t, i = np.indices(out.shape)
    row = t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8
    col = t % 4 * 2 + i // 4 * 8 + i % 2
    product = (a.astype(np.float64) @ b.astype(np.float64).T)[row, col] + 1
    right = np.allclose(out, product, rtol=1e-4, atol=1e-4)
    assert right == (fault == "none")
