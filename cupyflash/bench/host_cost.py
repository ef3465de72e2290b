"""Host time of a warm call on small arrays: ``python -m cupyflash.bench.host_cost``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from cupyflash._cuda.device import current, require_cupy
from cupyflash.attention import (
    flash_attention,
    flash_attention_backward,
    flash_attention_forward,
)
from cupyflash.bench.timing import host_microseconds
from cupyflash.errors import NoDeviceError

SHAPE = (1, 128, 8, 64)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(
        "python -m cupyflash.bench.host_cost",
        description="Print the host's microseconds for a warm call on small arrays.",
    ).parse_args()
    cupy = require_cupy()
    query, key, value = (
        cupy.random.standard_normal(SHAPE, dtype=cupy.float32).astype(cupy.float16)
        for _ in range(3)
    )
    out, saved = flash_attention_forward(query, key, value, causal=True)
    works: dict[str, Callable[[], Any]] = {
        "flash_attention": lambda: flash_attention(query, key, value, causal=True),
        "flash_attention_forward": lambda: flash_attention_forward(query, key, value, causal=True),
        "flash_attention_backward": lambda: flash_attention_backward(out, saved),
        "cupy.empty": lambda: cupy.empty(SHAPE, cupy.float16),
    }
    print(f"{current().name}: host microseconds of a warm call, float16 {SHAPE}")
    for name, work in works.items():
        print(f"{name:26} {host_microseconds(work):6.1f}")


if __name__ == "__main__":
    try:
        main()
    except NoDeviceError as error:
        sys.exit(str(error))
