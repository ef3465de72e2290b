"""Attention over a protein of 4096 residues in memory where its scores do not fit.

    python examples/protein_length.py [--length 4096] [--limit 256] [--device cpu|gpu]

The example takes all memory but --limit MiB away from itself. Forward and backward of cupyflash run
in what is left; dense attention, which the textbook writes, does not. Full attention both ways, as
in protein language models, so a window cannot help.
"""

import argparse
import contextlib
import sys
from pathlib import Path

import numpy as np

import cupyflash
from cupyflash._demo.arguments import HEAD_DIM, POSITIVE
from cupyflash._demo.dense import dense_backward, dense_forward
from cupyflash._demo.device import describe, select, timed, to_host

MIB = 2**20
CHECKED_ROWS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=POSITIVE, default=4096, help="residues")
    parser.add_argument("--heads", type=POSITIVE, default=8)
    parser.add_argument("--head-dim", type=HEAD_DIM, default=32)
    parser.add_argument("--limit", type=POSITIVE, default=256, help="MiB that may be used")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU if there is one")
    arguments = parser.parse_args()
    xp = select(arguments.device)
    shape = (arguments.length, arguments.heads, arguments.head_dim)
    scores = arguments.heads * arguments.length**2 * 4 / MIB
    print(f"{shape[0]} residues, {shape[1]} heads of {shape[2]}, float32, on {describe(xp)}")
    print(f"all scores of one layer: {scores:.0f} MiB; free to use: {arguments.limit} MiB")

    rng = np.random.default_rng(0)
    inputs = [xp.asarray(rng.standard_normal(shape, "float32")) for _ in range(4)]
    flash(*(x[:64] for x in inputs))  # kernels are compiled, libraries loaded when first needed
    with limited(xp, arguments.limit * MIB):
        try:
            (out, *grads), seconds = timed(xp, lambda: flash(*inputs))
        except MemoryError:
            sys.exit("cupyflash    does not fit: give a larger --limit")
        print(f"cupyflash    forward and backward in {seconds:.2f} s")
        try:
            _, seconds = timed(xp, lambda: dense(*inputs))
            print(f"dense        forward and backward in {seconds:.2f} s")
        except MemoryError:
            print("dense        does not fit")
    assert all(bool(xp.isfinite(x).all()) for x in (out, *grads))
    off = first_rows_off(out, *inputs)
    print(f"largest difference of the first {CHECKED_ROWS} rows from dense ones: {off:.1e}")


def flash(query, key, value, grad_out):
    out, saved = cupyflash.flash_attention_forward(query, key, value)
    return out, *cupyflash.flash_attention_backward(grad_out, saved)[:3]


def dense(query, key, value, grad_out):
    out, weights = dense_forward(query, key, value)
    return out, *dense_backward(grad_out, query, key, value, weights)


def first_rows_off(out, query, key, value, _) -> float:
    """A few rows do fit: the same queries against all keys, densely."""
    query = to_host(query[:CHECKED_ROWS]).astype("float64")
    key, value, out = (to_host(x).astype("float64") for x in (key, value, out[:CHECKED_ROWS]))
    scores = np.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return float(abs(np.einsum("hqk,khd->qhd", weights, value) - out).max())


@contextlib.contextmanager
def limited(xp, size: int):
    """Inside, memory beyond what is held already and `size` bytes is refused (MemoryError)."""
    if xp is not np:
        pool = xp.cuda.MemoryPool()
        pool.set_limit(size=size)
        with xp.cuda.using_allocator(pool.malloc):
            yield
        return
    memory_map = Path("/proc/self/statm")
    if not memory_map.exists():
        sys.exit("Only Linux can limit the memory of a process so: use --device gpu")
    import resource

    pages = int(memory_map.read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


if __name__ == "__main__":
    main()
