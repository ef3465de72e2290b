"""One product whose operands lie anywhere that wgmma can read them, see products.cu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.probes.layouts import draw_product

SOURCE = Path(__file__).with_name("products.cu").read_text("utf-8")
ENTRIES = {
    (a_by_rows, b_by_rows): f"product_by_{a}_{b}"
    for a_by_rows, a in enumerate(("cols", "rows"))
    for b_by_rows, b in enumerate(("cols", "rows"))
}
POINTERS = ("image", "sum")
THREADS, SHARED_MEMORY = 128, 96 << 10
_PARAMS = np.dtype(
    [("image", "u8"), ("sum", "u8"), ("a", "u8"), ("b", "u8"), ("bytes", "i4")], align=True
)

Run = Callable[[str, np.ndarray, np.ndarray], Any]


def check_products(rng: np.random.Generator, run: Run, by_rows: tuple[bool, bool]) -> None:
    """`run` an entry with its parameters and an image of shared memory; judge the sums."""
    for _ in range(20):
        image, descriptors, product = draw_product(rng, *by_rows)
        params = np.array((0, 0, *descriptors, image.nbytes), _PARAMS)
        result = run(ENTRIES[by_rows], params, image)
        np.testing.assert_allclose(result, product, rtol=1e-4, atol=1e-4)
