"""The emulator's own: operands of wgmma by the book, and that it sees what goes wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.emulator import build
from tests.emulator.device import Launcher
from tests.probes import products
from tests.probes.layouts import DEPTH, Layout

FAULTS = {  # in the order of faults.cu -> what is said; None: the sums are wrong
    "none": "",
    "early_read": "ended before boxes had landed|read by the asynchronous proxy",
    "no_proxy_fence": "no fence.proxy.async",
    "no_register_fence": "no wgmma.fence",
    "early_write": "sums were written while products were under way",
    "no_product_wait": "ended with products under way",
    "warps_differ": "threads? .* for other warps of its warpgroup|waits for ever",
    "arrives_twice": "one arrival too many",
    "waits_twice": "parity 1 of the mbarrier",
    "expects_too_much": "16 bytes missing",
    "counts_differ": "bar for other numbers of threads",
    "no_bulk_wait": "a bulk copy could still read shared memory",
    "early_reuse": None,
}


@pytest.mark.parametrize("by_rows", products.ENTRIES, ids=products.ENTRIES.get)
def test_operands_lie_where_descriptors_say(rng, by_rows):
    library = build.library(products.SOURCE)

    def run(entry: str, params: np.ndarray, image: np.ndarray) -> np.ndarray:
        options = {"threads": products.THREADS, "shared_memory": products.SHARED_MEMORY}
        launcher = Launcher((library, entry), -1, params, products.POINTERS, **options)
        result = np.full((64, 128), np.nan, np.float32)
        launcher(1, image.ctypes.data, result.ctypes.data)
        return result

    products.check_products(rng, run, by_rows)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_is_seen(rng, fault):
    a, b = (rng.normal(size=(64, DEPTH)).astype(np.float16) for _ in range(2))
    at = Layout(16, False, 128, 256, 0).addresses(64) // 2
    images = np.empty((2, 64 * DEPTH), np.float16)
    images[0][at], images[1][at] = a, b
    out = np.ones((128, 32), np.float32)
    fields = [("a", "u8"), ("b", "u8"), ("out", "u8"), ("fault", "i4")]
    params = np.array((0, 0, 0, list(FAULTS).index(fault)), np.dtype(fields, align=True))
    library = build.library((Path(products.__file__).parent / "faults.cu").read_text("utf-8"))
    launcher = Launcher(
        (library, "faulty"), -1, params, ("a", "b", "out"), threads=128, shared_memory=32 << 10
    )
    addresses = [array.ctypes.data for array in (*images, out)]
    if FAULTS[fault]:
        with pytest.raises(AssertionError, match=FAULTS[fault]) as error:
            launcher(1, *addresses)
        print(error.value)
        return
    launcher(1, *addresses)
    t, i = np.indices(out.shape)
    row = t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8
    col = t % 4 * 2 + i // 4 * 8 + i % 2
    product = (a.astype(np.float64) @ b.astype(np.float64).T)[row, col] + 1
    right = np.allclose(out, product, rtol=1e-4, atol=1e-4)
    assert right == (fault == "none")
