"""Float32 forward of the simt engine against naive CuPy: ``python -m cupyflash.bench.float32``."""

from __future__ import annotations

import argparse
import sys

from cupyflash._cuda.device import current, require_cupy
from cupyflash.attention import flash_attention
from cupyflash.bench.peers import naive_cupy
from cupyflash.bench.timing import device_milliseconds
from cupyflash.errors import NoDeviceError

HIDDEN = 2048  # heads * head_dim
TOKENS = 16384  # batch * seqlen


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[4096, 8192])
    arguments = parser.parse_args()
    print(f"{current().name}: float32 forward, TFLOP/s (causal counted as half)")
    print(f"{'head_dim':>8} {'seqlen':>6} {'causal':>6} {'cupyflash':>9} {'naive':>6} {'ratio':>5}")
    for head_dim in arguments.head_dims:
        for seqlen in arguments.seqlens:
            for causal in (False, True):
                report(head_dim, seqlen, causal)


def report(head_dim: int, seqlen: int, causal: bool) -> None:
    """Check one shape against naive CuPy, time both and print a line."""
    cupy = require_cupy()
    batch, heads = max(1, TOKENS // seqlen), HIDDEN // head_dim
    shape = (batch, seqlen, heads, head_dim)
    query, key, value = (cupy.random.standard_normal(shape, dtype=cupy.float32) for _ in range(3))
    dense = [x.swapaxes(1, 2).copy() for x in (query, key, value)]
    works = {
        "cupyflash": lambda: flash_attention(query, key, value, causal=causal, engine="simt"),
        "naive": lambda: naive_cupy(*dense, causal=causal),
    }
    error = float(abs(works["cupyflash"]().swapaxes(1, 2) - works["naive"]()).max())
    if not error < 1e-4:
        raise RuntimeError(f"results differ by {error} at {shape}, causal={causal}")
    times = device_milliseconds(works)
    operations = 4 * batch * heads * seqlen**2 * head_dim * (0.5 if causal else 1)
    ours, naive = (operations / times[name] / 1e9 for name in ("cupyflash", "naive"))
    print(f"{head_dim:8} {seqlen:6} {causal!s:>6} {ours:9.1f} {naive:6.1f} {ours / naive:5.1f}")


if __name__ == "__main__":
    try:
        main()
    except NoDeviceError as error:
        sys.exit(str(error))
