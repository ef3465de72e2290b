"""Block-sparse attention: time and memory fall with the share of blocks that is kept.

    python examples/block_sparse.py [--device cpu|gpu] [--tokens 2048] [--block 128]

Each query sees its own block and the ones before it, up to a distance, and a few blocks that all
may look at. Forward and backward, beside the same without a mask, and dense attention with one.
"""

import argparse
from functools import partial

import numpy as np

import cupyflash
from cupyflash._demo.arguments import POSITIVE
from cupyflash._demo.device import describe, measure, select

HEADS, HEAD_DIM = 4, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU if there is one")
    parser.add_argument("--tokens", type=POSITIVE, default=2048)
    parser.add_argument("--block", type=POSITIVE, default=128)
    arguments = parser.parse_args()
    xp = select(arguments.device)
    tokens, block = arguments.tokens, arguments.block
    count = -(-tokens // block)
    print(f"{describe(xp)}; {tokens} tokens, {HEADS} heads of {HEAD_DIM}, float32")
    print(f"{'blocks kept':>14}{'share':>8}{'time':>12}{'peak memory':>16}{'difference':>13}")

    rng = np.random.default_rng(0)
    shape = (1, tokens, HEADS, HEAD_DIM)
    inputs = [xp.asarray(rng.standard_normal(shape, "float32")) for _ in range(4)]
    reach = sorted({0, count // 8, count // 2})
    for distance in reach:
        blocks = pattern(count, distance)
        mask = cupyflash.BlockMask(xp.asarray(blocks[None, None]), (block, block))
        elements = xp.asarray(np.kron(blocks, np.ones((block, block), bool))[:tokens, :tokens])
        run = partial(flash, *inputs, block_mask=mask)
        run()  # compiles
        sparse = measure(xp, run)
        full_row = dense(*inputs[:3], elements)
        difference = float(abs(sparse.result[0] - full_row).max())
        show(f"{blocks.sum()} of {blocks.size}", blocks.mean(), sparse, f"{difference:.1e}")
        assert difference < 1e-4

    run = partial(flash, *inputs)
    run()
    show("no mask", 1.0, measure(xp, run))
    show("dense, forward", 1.0, measure(xp, partial(dense, *inputs[:3], elements)))


def pattern(count: int, distance: int):
    """The `distance` blocks before each query's own, and the first block for all."""
    row, col = np.ogrid[:count, :count]
    return ((col <= row) & (col >= row - distance)) | (col == 0)


def flash(q, k, v, dout, **options):
    out, saved = cupyflash.flash_attention_forward(q, k, v, **options)
    grads = cupyflash.flash_attention_backward(dout, saved)
    return out, grads.dq, grads.dk, grads.dv


def dense(q, k, v, mask):
    xp = np if isinstance(q, np.ndarray) else __import__("cupy")
    q, k, v = (array.transpose(0, 2, 1, 3) for array in (q, k, v))
    scores = xp.where(mask, q @ k.swapaxes(2, 3) * np.float32(HEAD_DIM**-0.5), -np.inf)
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v).transpose(0, 2, 1, 3)


def show(name: str, share: float, run, difference: str = "") -> None:
    print(
        f"{name:>14}{share:8.0%}{run.seconds * 1e3:9.1f} ms{run.peak_bytes / 2**20:12.1f} MiB"
        f"{difference:>13}"
    )


if __name__ == "__main__":
    main()
